"""Parameters of a request that OpenAI, vLLM, SGLang, TGI, llama.cpp, Ollama or transformers call
otherwise, or that are not there."""

from __future__ import annotations

from penstock.protocol.suggestions import ForeignNames

_RENAMED = {
    "eos_token_id": "stop_token_ids",
    "max_gen_len": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_prompt_tokens": "truncate_prompt_tokens",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
    "dry_penalty_last_n": "dry_range",
    "dynatemp_low": "dynatemp_min",
    "dynatemp_high": "dynatemp_max",
    "eps_cutoff": "epsilon_cutoff",
    "mirostat": "mirostat_mode",
    "sampler_priority": "sampler_order",
    "sequence_breakers": "dry_sequence_breakers",
    "samplers": "sampler_order",
    "tfs_z": "tfs",
    "top_n_sigma": "nsigma",
    "top_n_tokens": "logprobs",
    "truncate": "truncate_prompt_tokens",
}

_TOOLS = "tools are for chats: use tools and tool_choice of /v1/chat/completions"
_NO_MULTIMODAL = "not supported yet: models take text alone"
_LORA = "an adapter is a model of its own: name it in model"
_NO_BEAMS = (
    "beam search is use_beam_search of /v1/completions and /v1/chat/completions, and "
    "LLM.beam_search of the library"
)
_ALL_MATCHES = "leave it out: every repetition is found, however long and however often"
_WHITESPACE = "use structured_outputs.disable_any_whitespace"
_THINKING = "use chat_template_kwargs"

_EXPLAINED = {
    "add_special_tokens": "not supported yet: completions begin with the special tokens of the "
    "model's tokenizer, chats with those of its chat template",
    "adapter": _LORA,
    "audio": _NO_MULTIMODAL,
    "best_of": "not supported yet: choosing among more answers than n; /v1/completions does it",
    "do_sample": "use temperature: 0 for the likeliest tokens",
    "documents": "not supported yet: put them into a message",
    "dry_early_exit_match_len": _ALL_MATCHES,
    "dry_max_ngram": _ALL_MATCHES,
    "dry_max_occurrences": _ALL_MATCHES,
    "dynatemp_range": "use dynatemp_min and dynatemp_max",
    "early_stopping": _NO_BEAMS,
    "ebnf": 'use structured_outputs: {"grammar": …}',
    "enable_thinking": f'{_THINKING}: {{"enable_thinking": …}}',
    "format": 'use structured_outputs: {"json": schema}',
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "grammar": 'use structured_outputs: {"grammar": …}',
    "guided_choice": 'use structured_outputs: {"choice": […]}',
    "guided_decoding": 'use structured_outputs: {"json": schema}, or regex, choice, grammar',
    "guided_decoding_backend": "leave it out: there is one engine for structured outputs",
    "guided_grammar": 'use structured_outputs: {"grammar": …}',
    "guided_json": 'use structured_outputs: {"json": schema}',
    "guided_regex": 'use structured_outputs: {"regex": …}',
    "guided_whitespace_pattern": _WHITESPACE,
    "images": _NO_MULTIMODAL,
    "input": "use messages with /v1/chat/completions, or prompt with /v1/completions",
    "inputs": "use prompt with /v1/completions",
    "json_schema": 'use structured_outputs: {"json": schema}, or response_format',
    "length_penalty": _NO_BEAMS,
    "logits_processors": "not supported: code of a client's is never run; logit_bias, bad_words "
    "and allowed_token_ids change logits",
    "lora": _LORA,
    "lora_path": _LORA,
    "messages": "use /v1/chat/completions",
    "modalities": _NO_MULTIMODAL,
    "num_beams": _NO_BEAMS,
    "typical": "use typical_p",
    "num_ctx": "the server's --max-model-len sets the length of the context",
    "options": "give what it holds beside the other parameters",
    "parameters": "give what it holds beside the other parameters",
    "prompt": "use /v1/completions",
    "prompt_embeds": _NO_MULTIMODAL,
    "reasoning_effort": f'{_THINKING}: {{"reasoning_effort": …}}, where the model\'s chat template '
    "knows it",
    "regex": 'use structured_outputs: {"regex": …}',
    "sampling_params": "give what it holds beside the other parameters",
    "store": "nothing is stored here; send false, or leave it out",
    "structural_tag": "not supported yet: structural tags; structured_outputs has json, regex, "
    "choice and grammar",
    "suffix": "not supported yet: text that comes after the answer",
    "system": 'use a message with "role": "system"',
    "thinking": f'{_THINKING}: {{"thinking": …}}',
    "tool_choice": _TOOLS,
    "tools": _TOOLS,
    "use_beam_search": _NO_BEAMS,
}

FOREIGN_PARAMETERS = ForeignNames(_RENAMED, _EXPLAINED)

"""Parameters of other servers that are not supported yet.

With these values they ask for nothing and are accepted; any other value is refused by name, never
ignored in silence.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.declared import NO_ITEMS, SameAs

_NO_TOOLS: tuple[Any, ...] = ("none", "auto")

_NEUTRAL: dict[str, tuple[Any, ...] | SameAs] = {
    # OpenAI
    "tools": NO_ITEMS,
    "tool_choice": _NO_TOOLS,
    "functions": NO_ITEMS,
    "function_call": _NO_TOOLS,
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": SameAs("n", 1),
    # vLLM
    "logits_processors": NO_ITEMS,
    "add_special_tokens": (True,),
    "detokenize": (True,),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    # no logprobs, in the words of the other endpoint
    "prompt_logprobs": (False,),
    # nothing is stored here
    "store": (False,),
}

_OF_CHATS = ("tools", "tool_choice", "reasoning_effort", "include_reasoning")
CHAT_NEUTRAL: dict[str, tuple[Any, ...] | SameAs] = {
    **{name: values for name, values in _NEUTRAL.items() if name not in _OF_CHATS},
    "add_special_tokens": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": NO_ITEMS,
}
COMPLETION_NEUTRAL = {
    **{name: values for name, values in _NEUTRAL.items() if name != "best_of"},
    "top_logprobs": (0,),
    "logprobs": (False,),
}

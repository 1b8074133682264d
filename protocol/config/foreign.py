"""Settings of vLLM, SGLang, llama.cpp and TGI that are called otherwise here, or are not there."""

from __future__ import annotations

from penstock.protocol.suggestions import ForeignNames

_RENAMED = {
    "api_server_count": "frontends",
    "base_gpu_id": "device_index",
    "batch_size": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "context_length": "max_model_len",
    "cors_allow_origins": "allowed_origins",
    "ctx_size": "max_model_len",
    "data_type": "dtype",
    "distributed_executor_backend": "executor",
    "dp": "data_parallel_size",
    "dp_size": "data_parallel_size",
    "lora_modules": "lora",
    "lora_paths": "lora",
    "max_context_len": "max_model_len",
    "max_loaded_loras": "max_cpu_loras",
    "max_loaded_models": "resident",
    "max_loras_per_batch": "max_loras",
    "max_prefill_tokens": "max_num_batched_tokens",
    "max_queued_requests": "max_waiting_requests",
    "max_running_requests": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "max_seq_len_to_capture": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_id": "model",
    "model_name_or_path": "model",
    "model_path": "model",
    "n_ctx": "max_model_len",
    "nnodes": "nodes",
    "num_gpu_blocks_override": "num_kv_blocks",
    "num_threads": "threads",
    "page_size": "block_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "q": "quantization",
    "quantize": "quantization",
    "random_seed": "seed",
    "schedule_policy": "scheduling_policy",
    "speculative_draft_model_path": "speculative_model",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "tokenizer_worker_num": "tokenizers",
    "tool_call_parser": "tool_parser",
    "tool_strict_level": "tool_strictness",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "uvicorn_log_level": "log_level",
}

_NO_EXPERTS = (
    "not supported yet: a model is divided by --tensor-parallel-size and --pipeline-parallel-size"
)
_NO_TORCHAO = "not supported yet: torchao; --quantization int8, int4 or fp8 rounds plain weights"
_SPECULATION = (
    "use --speculative suffix, ngram, eagle3 or draft-model, with --speculative-tokens and "
    "--speculative-model"
)
_NO_OFFLOAD = "not supported yet: weights stay on the device"
_KV_TIERS = "use --kv-tier-memory-bytes or --kv-tier-disk, which keep KV blocks off the device"
_ROLES = "use --prefill-engines and --decode-engines, which hand KV blocks over on one host"
_NO_MULTIMODAL = "not supported yet: models take text alone"
_NODES = "use --nodes on the first host and --join on the others: docs/deployment.md"
_TEMPLATE = "not supported yet: the chat template is the one in the model's folder"
_NO_CODE = "leave it out: nothing in a model's folder is ever executed"
_FOLDER = "leave it out: it is read from the model's folder"
_ALWAYS = "leave it out: it is always on"
_CHOSEN = "leave it out: the kernels are chosen by measurement, and the log names them"
_GRAPHS = "leave it out: CUDA graphs are used wherever they are faster"
_GRAMMARS = "leave it out: there is one engine for structured outputs, and it is always on"
_FEWER_LOGS = "use --log-level warning for fewer lines"
_MAX_TOKENS = "give max_tokens in each request; --max-model-len bounds prompt and output together"
_SAMPLING = "give it in each request, or in generation_config.json in a copy of the model's folder"
_REVISION = "download it with `hf download NAME --revision R`, and give the folder as MODEL"

_EXPLAINED = {
    "allowed_headers": "use --allowed-origins, which is all that there is to say",
    "allowed_local_media_path": _NO_MULTIMODAL,
    "allowed_methods": "use --allowed-origins, which is all that there is to say",
    "async_scheduling": _ALWAYS,
    "attention_backend": _CHOSEN,
    "chat_template": _TEMPLATE,
    "chat_template_content_format": _TEMPLATE,
    "code_revision": _REVISION,
    "compilation_config": _GRAPHS,
    "cpu_offload_gb": _NO_OFFLOAD,
    "cuda_graph_max_bs": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "disable_cuda_graph": _GRAPHS,
    "disable_log_requests": _FEWER_LOGS,
    "disable_log_stats": _FEWER_LOGS,
    "disable_radix_cache": "use --no-enable-prefix-caching",
    "disaggregation_mode": _ROLES,
    "dist_init_addr": _NODES,
    "download_dir": "set the environment variable HF_HUB_CACHE",
    "enable_auto_tool_choice": _ALWAYS,
    "enable_chunked_prefill": _ALWAYS,
    "enable_expert_parallel": _NO_EXPERTS,
    "enable_lora": "leave it out: --lora NAME=FOLDER loads an adapter",
    "fully_sharded_loras": "leave it out: each rank has what it computes of an adapter",
    "enable_metrics": "leave it out: /metrics is always there",
    "enable_reasoning": _ALWAYS,
    "enable_sleep_mode": "use --keep-alive, or --resident with several models",
    "enforce_eager": _GRAPHS,
    "ep_size": _NO_EXPERTS,
    "generation_config": _FOLDER,
    "grammar_backend": _GRAMMARS,
    "guided_decoding_backend": _GRAMMARS,
    "hf_overrides": "edit config.json in a copy of the model's folder",
    "hf_token": "set the environment variable HF_TOKEN",
    "kv_transfer_config": _ROLES,
    "limit_mm_per_prompt": _NO_MULTIMODAL,
    "log_requests": "use --log-level debug for more lines",
    "max_input_length": "use --max-model-len, which bounds prompt and output together",
    "max_completion_tokens": _MAX_TOKENS,
    "max_logprobs": "leave it out: 20 may be asked for",
    "max_new_tokens": _MAX_TOKENS,
    "max_output_tokens": _MAX_TOKENS,
    "max_tokens": _MAX_TOKENS,
    "max_total_tokens": "use --num-kv-blocks, which counts blocks of --block-size tokens",
    "n_gpu_layers": "leave it out: a GPU holds the whole model; --device says where it runs",
    "n_predict": _MAX_TOKENS,
    "ngl": "leave it out: a GPU holds the whole model; --device says where it runs",
    "node_rank": _NODES,
    "num_predict": _MAX_TOKENS,
    "num_scheduler_steps": _ALWAYS,
    "num_speculative_tokens": "use --speculative-tokens",
    "otlp_traces_endpoint": "use --otel-traces, and name the collector in the environment variable "
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "override_generation_config": "edit generation_config.json in a copy of the model's folder",
    "revision": _REVISION,
    "runner": "use --task, which is generate, embed, score or classify",
    "sampling_backend": _CHOSEN,
    "served_model_names": "use --served-model-name, once for each name",
    "speculative_algorithm": _SPECULATION,
    "speculative_config": _SPECULATION,
    "structured_outputs_config": _GRAMMARS,
    "swap_space": _KV_TIERS,
    "tokenizer": _FOLDER,
    "tokenizer_mode": _FOLDER,
    "tokenizer_path": _FOLDER,
    "tokenizer_revision": _REVISION,
    "temperature": _SAMPLING,
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
    "torchao_config": _NO_TORCHAO,
    "trust_remote_code": _NO_CODE,
    "watchdog_timeout": "leave it out: a process that hangs is always found and replaced",
}

FOREIGN_SETTINGS = ForeignNames(_RENAMED, _EXPLAINED)

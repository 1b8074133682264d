"""Every configuration field, declared once.

One annotated field gives the flag (``--max-model-len``), the environment variable
(``PENSTOCK_MAX_MODEL_LEN``), the key of a file and the help text. Names follow vLLM where the
meaning is the same. ``None`` means: derive it from the model and the machine.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str, Meta(description="Folder of a Hugging Face checkpoint. Empty: the built-in model.")
    ] = ""
    served_model_name: Annotated[
        list[str], Meta(description="Names in the API; default: the folder's name.")
    ] = []
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        Meta(description="Longest prompt and output together, in tokens."),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Type of weights and activations; auto: what the checkpoint says."),
    ] = "auto"
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="Seeds what the server itself draws.")
    ] = 0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: Annotated[
        Literal[8, 16, 32, 64], Meta(description="Tokens in one block of KV memory.")
    ] = 16
    num_kv_blocks: Annotated[
        Annotated[int, Meta(ge=2, le=2**31 - 1)] | None,
        Meta(description="KV blocks; default: what fits into the memory left for them."),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=2**50)] | None,
        Meta(description="Bytes of KV memory; default: on the CPU a quarter of what is free."),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0.0, le=1.0, description="Share of a GPU's memory for weights, KV and all else."),
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV blocks of prompts with a common beginning.")
    ] = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=8192, description="Sequences that run at the same time.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=2**20, description="Tokens computed in one step, prefill and decode.")
    ] = 2048
    scheduling_policy: Annotated[
        str, Meta(description="fcfs, priority, sjf, fair, or an entry point's name.")
    ] = "fcfs"


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_waiting_requests: Annotated[
        int, Meta(ge=1, le=10_000_000, description="More than this many waiting: 503 at once.")
    ] = 4096
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**40)] | None,
        Meta(description="More prompt tokens waiting: 503; default: 8 times KV memory, or 2**20."),
    ] = None
    max_wait_s: Annotated[
        float,
        Meta(gt=0.0, le=86_400.0, description="A new request that would wait longer: 503 at once."),
    ] = 600.0
    max_tenant_share: Annotated[
        float,
        Meta(gt=0.0, le=1.0, description="Of the queue, for one tenant while others come: 429."),
    ] = 0.5


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    device: Annotated[
        Literal["auto", "cpu", "cuda", "null"],
        Meta(description="null answers at once with seeded tokens and loads no model."),
    ] = "auto"
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="CPU threads of a worker; default: measured at start."),
    ] = None
    null_step_ms: Annotated[
        float, Meta(ge=0.0, le=60_000.0, description="Time of one step of the null device.")
    ] = 0.0


class LoadingConfig(msgspec.Struct, frozen=True, kw_only=True):
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="dummy: random weights, for measurements; only config.json is read."),
    ] = "auto"
    compress_weights: Annotated[
        Literal["auto", "never"],
        Meta(
            description="auto: a Hopper GPU with room keeps them a second time, losslessly smaller."
        ),
    ] = "auto"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="Address that HTTP listens on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="HTTP port; 0: any free one, printed at start.")
    ] = 8000
    api_key: Annotated[
        list[str], Meta(description="Keys that clients may use; none: no key is asked for.")
    ] = []
    insecure: Annotated[
        bool, Meta(description="Let everybody who reaches --host use it without an API key.")
    ] = False
    allowed_origins: Annotated[
        list[str],
        Meta(description="https://HOST[:PORT] of web pages that may call, beside the own page."),
    ] = []
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=2**31 - 1, description="Larger request bodies get 413.")
    ] = 8 * 1024 * 1024
    request_timeout_s: Annotated[
        float, Meta(gt=0.0, le=86_400.0, description="A request that takes longer ends.")
    ] = 3600.0
    keep_alive_comment_s: Annotated[
        float, Meta(gt=0.0, le=3600.0, description="A silent SSE stream gets a comment this often.")
    ] = 10.0


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    router: Annotated[
        str, Meta(description="Address of the router, ipc://… or tcp://host:port.")
    ] = ""
    runtime_dir: Annotated[
        str, Meta(description="Folder for ipc sockets; only its owner may enter it.")
    ] = ""
    bind: Annotated[
        str, Meta(description="tcp://host for the own inbox; default: ipc as the router is.")
    ] = ""
    advertise: Annotated[
        str, Meta(description="Host that others reach the own inbox at; default: found out.")
    ] = ""
    port_range: Annotated[
        str, Meta(description="FIRST-LAST port of the own inbox on tcp; default: any.")
    ] = ""
    secret: Annotated[
        str, Meta(description="Shared secret: encrypts and admits on tcp. A file with file:PATH.")
    ] = ""
    engine: Annotated[
        str, Meta(description="Name of the engine that a scheduler and its workers form.")
    ] = "0"
    rank: Annotated[
        int, Meta(ge=0, le=1023, description="Number of this worker within its engine.")
    ] = 0


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    frontends: Annotated[
        int, Meta(ge=1, le=64, description="Frontend processes that serve starts.")
    ] = 1
    tokenizers: Annotated[
        int, Meta(ge=1, le=64, description="Tokenizer processes that serve starts.")
    ] = 1
    data_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="Engines (model replicas) that serve starts.")
    ] = 1
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0.0, le=3600.0, description="SIGTERM: running requests may take this long."),
    ] = 30.0
    startup_timeout_s: Annotated[
        float, Meta(gt=0.0, le=86_400.0, description="Not ready by then: serve gives up.")
    ] = 1800.0


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level logged.")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description="auto: console on a terminal, else JSON lines."),
    ] = "auto"


class TestConfig(msgspec.Struct, frozen=True, kw_only=True):
    """For tests only; each does nothing unless set."""

    __test__ = False  # not a pytest class

    fault: Annotated[
        list[str],
        Meta(description="Faults to play, see penstock.protocol.faults; for tests only."),
    ] = []


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All groups. A service reads the groups that its command declares."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    admission: AdmissionConfig = AdmissionConfig()
    device: DeviceConfig = DeviceConfig()
    loading: LoadingConfig = LoadingConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    launch: LaunchConfig = LaunchConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    test: TestConfig = TestConfig()

"""Every configuration field, declared once: here, and in the modules that this one imports.

One annotated field gives the flag (``--max-model-len``), the environment variable
(``PENSTOCK_MAX_MODEL_LEN``), the key of a file and the help text. Names follow vLLM where the
meaning is the same. ``None`` means: derive it from the model and the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.protocol.config.cache_fields import CacheConfig
from penstock.protocol.config.process_fields import (
    ClusterConfig,
    LaunchConfig,
    ObservabilityConfig,
    ProcessConfig,
)
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.config.speculation_fields import SpeculationConfig


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str,
        Meta(
            description="Folder of a Hugging Face checkpoint; serve also takes a name on the hub, "
            "ORG/NAME, and several models. Without one it serves the built-in model."
        ),
    ] = ""
    models: list[str] = []
    """What serve was given as ``model`` if that is several; then ``model`` is empty. No setting of
    its own."""
    served_model_name: Annotated[
        list[str],
        Meta(
            description="Model names in the API; by default the folder's name. Several models take "
            "one each, in their order."
        ),
    ] = []
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        Meta(description="Longest prompt and output together, in tokens."),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Type of weights and activations; auto is the checkpoint's own, or "
            "float32 on a CPU that is slow in bfloat16."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8"],
        Meta(
            description="Round plain weights while they are read, to take less memory and to be "
            "read faster; none keeps them. A checkpoint that is quantized already needs no flag."
        ),
    ] = "none"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        Meta(
            description="Whose code computes the model: native is Penstock's own, transformers is "
            "that library's; auto takes native where there is one that accepts the model."
        ),
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "score", "classify"],
        Meta(
            description="What the model is for: auto is what its folder says; embed makes vectors, "
            "score judges pairs, classify gives labels."
        ),
    ] = "auto"
    pooling: Annotated[
        Literal["auto", "last", "cls", "mean", "max"],
        Meta(
            description="Which positions of a prompt a vector is made of; auto is what the folder "
            "says. A model that generates makes vectors too if this is given."
        ),
    ] = "auto"
    allow_dimensions: Annotated[
        bool,
        Meta(
            description="Let requests cut vectors to any number of dimensions, also where the "
            "folder does not say that the model is trained for it."
        ),
    ] = False
    tool_parser: Annotated[
        str,
        Meta(
            description="How tool calls are written: auto finds it out from the chat template and "
            "the vocabulary; else a name, or none."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(description="How thinking is written: auto, a name, or none. As --tool-parser."),
    ] = "auto"
    tool_strictness: Annotated[
        Literal["auto", "function", "parameter"],
        Meta(
            description="What a grammar enforces of tool calls where the model may also answer "
            "without one: auto, only calls of strict tools; function, the form of calls and the "
            "tools' names; parameter, the schemas of their arguments as well."
        ),
    ] = "function"
    seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1, description="Where requests without a seed get theirs from."),
    ] = 0

    def names(self) -> list[str]:
        """Under which the model is served; the first one is what processes know it by."""
        return self.served_model_name or [Path(self.model).resolve().name]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=8192, description="Most sequences that run at the same time.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**20,
            description="Most tokens computed in one step, prefill and decode together.",
        ),
    ] = 2048
    scheduling_policy: Annotated[
        str, Meta(description="fcfs, priority, sjf, fair, or an entry point's name.")
    ] = "fcfs"
    role: Annotated[
        Literal["both", "prefill", "decode"],
        Meta(description="Of one engine: prefill hands computed prompts over to decode engines."),
    ] = "both"


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_waiting_requests: Annotated[
        int,
        Meta(
            ge=1, le=10_000_000, description="Refuse new requests (503) while so many wait already."
        ),
    ] = 4096
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**40)] | None,
        Meta(
            description="Refuse new requests (503) while so many prompt tokens wait; by "
            "default 8 times the KV memory, at least 1,048,576."
        ),
    ] = None
    max_wait_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=86_400.0,
            description="Refuse a new request (503) that would wait for longer.",
        ),
    ] = 600.0
    restart_wait_s: Annotated[
        float,
        Meta(ge=0.0, le=86_400.0, description="A new request waits so long for a part to restart."),
    ] = 30.0
    wake_wait_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description="A request for a model that sleeps waits so long for it to be awake.",
        ),
    ] = 300.0
    max_tenant_share: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1.0,
            description="Share of the queue that one tenant may fill while others wait too (429).",
        ),
    ] = 0.5


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    device: Annotated[
        Literal["auto", "cpu", "cuda", "null"],
        Meta(
            description="Where the model runs; null loads no model and answers with random tokens."
        ),
    ] = "auto"
    device_index: Annotated[
        int,
        Meta(ge=0, le=1023, description="CUDA device of a worker; serve counts on from it."),
    ] = 0
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="CPU threads of a worker; by default what measures best."),
    ] = None
    null_step_ms: Annotated[
        float, Meta(ge=0.0, le=60_000.0, description="Time of one step of the null device.")
    ] = 0.0
    deterministic: Annotated[
        bool,
        Meta(
            description="Compute each row in one order of sums, so that the answer of a seed is "
            "the same whatever runs beside it; slower on a GPU."
        ),
    ] = False
    kernel_table: Annotated[
        list[str],
        Meta(
            description="Choices of kernels that penstock tune has measured on this kind of GPU, "
            "TABLE SIZES = NUMBERS each."
        ),
    ] = []
    kernel_table_device: Annotated[
        str, Meta(description="The GPU that --kernel-table was measured on; another is refused.")
    ] = ""


class LoadingConfig(msgspec.Struct, frozen=True, kw_only=True):
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="dummy reads only config.json and makes random weights, for benchmarks."),
    ] = "auto"
    compress_weights: Annotated[
        Literal["auto", "never"],
        Meta(
            description="auto keeps a second, losslessly compressed copy of bf16 weights on a "
            "Hopper GPU that has room, which small batches read faster."
        ),
    ] = "auto"
    hold_weights: Annotated[
        bool,
        Meta(
            description="Keep the memory of loaded weights when a worker ends, in a holder: "
            "the next worker of the model maps them instead of loading them."
        ),
    ] = False
    lora: Annotated[
        list[str],
        Meta(
            description="An adapter (LoRA, or on CPUs a soft prompt), NAME=FOLDER (peft's "
            "format), served as a model of that name."
        ),
    ] = []
    lora_required: Annotated[
        bool,
        Meta(description="End at the start where an adapter of --lora cannot be loaded."),
    ] = True
    max_loras: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Most adapters that are on the device, and in one step, at the same time.",
        ),
    ] = 8
    max_cpu_loras: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Most adapters that are kept in the host's memory; default: --max-loras."),
    ] = None
    max_registered_loras: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Most adapters that are served by name; default: --max-cpu-loras."),
    ] = None
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="Highest rank of an adapter.")] = (
        64
    )
    download: Annotated[
        bool,
        Meta(description="Fetch a MODEL of the Hugging Face hub that its local cache lacks."),
    ] = True


class TestConfig(msgspec.Struct, frozen=True, kw_only=True):
    """For tests only; each does nothing unless set."""

    __test__ = False  # not a pytest class

    fault: Annotated[
        list[str],
        Meta(description="Faults to inject (penstock.protocol.process.faults); for tests only."),
    ] = []


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All groups. A service reads the groups that its command declares."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    admission: AdmissionConfig = AdmissionConfig()
    device: DeviceConfig = DeviceConfig()
    loading: LoadingConfig = LoadingConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    process: ProcessConfig = ProcessConfig()
    launch: LaunchConfig = LaunchConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    test: TestConfig = TestConfig()

    @property
    def num_workers(self) -> int:
        """Workers that serve starts for a model; on GPUs each has a device of its own."""
        return self.launch.data_parallel_size * self.cluster.world_size

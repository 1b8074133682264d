"""The fields that say which processes a server has, on which hosts, how they meet, and what they
tell of themselves."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    router: Annotated[
        str, Meta(description="Address of the router, ipc://… or tcp://host:port.")
    ] = ""
    runtime_dir: Annotated[
        str, Meta(description="Folder for the processes' sockets; only its owner may have access.")
    ] = ""
    bind: Annotated[
        str,
        Meta(
            description="Interface (tcp://HOST) that this process listens on; by default a "
            "local socket where the router has one."
        ),
    ] = ""
    advertise: Annotated[
        str,
        Meta(
            description="Host name or address at which other processes reach this one; by "
            "default it is found out."
        ),
    ] = ""
    port_range: Annotated[
        str, Meta(description="Ports (FIRST-LAST) that this process may listen on; by default any.")
    ] = ""
    secret: Annotated[
        str,
        Meta(description="Secret shared by all processes, needed on tcp; file:PATH reads a file."),
    ] = ""
    engine: Annotated[
        str, Meta(description="Name of the engine that a scheduler and its workers form.")
    ] = "0"
    rank: Annotated[
        int, Meta(ge=0, le=1023, description="Number of this worker within its engine, from 0.")
    ] = 0
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Devices among which an engine divides each layer, by heads and columns.",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Stages among which an engine divides the layers; each has as many "
            "devices as --tensor-parallel-size says.",
        ),
    ] = 1
    pipeline_layers: Annotated[
        str,
        Meta(
            pattern=r"^(auto|even|balanced|[0-9]{1,5}(,[0-9]{1,5})*)\Z",
            description="Layers of each stage of --pipeline-parallel-size, the first stage first: "
            "17,15; even: equally many; balanced: so that the stage that reads the most weights "
            "reads the least; auto: balanced on CPUs, even on GPUs.",
        ),
    ] = "auto"
    rank_traffic: Annotated[
        Literal["encrypted", "plain"],
        Meta(
            description="What the ranks of an engine tell each other over tcp: encrypted with the "
            "secret, or plain by gloo and NCCL, for hosts with a closed network of their own."
        ),
    ] = "encrypted"
    disable_custom_all_reduce: Annotated[
        bool,
        Meta(
            description="Let NCCL do all sums over the GPUs of --tensor-parallel-size, also those "
            "of few rows, which a kernel over peer memory does faster."
        ),
    ] = False

    max_local_prefill_length: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31 - 1,
            description="With prefill engines: a prompt of which a decode engine lacks fewer "
            "tokens, about, is computed there.",
        ),
    ] = 512

    @property
    def holder_socket(self) -> str:
        """Where the holder of this server listens: beside the router's socket."""
        return f"{self.router.removeprefix('ipc://').rpartition('/')[0]}/holder.sock"

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of a single process, and so nothing for ``serve``."""

    state_file: Annotated[
        str,
        Meta(
            description="File in which this process keeps its phase (starting, loading, ready, "
            "draining) and which it touches once a second, for probes."
        ),
    ] = ""


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
    prefill_engines: Annotated[
        Annotated[int, Meta(ge=1, le=63)] | None,
        Meta(description="Engines that compute prompts and hand them over to --decode-engines."),
    ] = None
    decode_engines: Annotated[
        Annotated[int, Meta(ge=1, le=63)] | None,
        Meta(description="Engines that go on with what --prefill-engines have computed."),
    ] = None
    nodes: Annotated[
        int, Meta(ge=1, le=1024, description="Hosts of the server; on the others run serve --join.")
    ] = 1
    join: Annotated[
        str,
        Meta(description="Start this host's part of the server whose router (tcp://…) this is."),
    ] = ""
    executor: Annotated[
        Literal["process", "ray"],
        Meta(
            description="Who starts the engines' processes: this launcher and those that join it, "
            "or Ray, on the hosts of its cluster."
        ),
    ] = "process"
    join_timeout_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=86_400.0,
            description="With --join: end when the first host is silent for so long. With "
            "--executor ray: most time for Ray to place the workers.",
        ),
    ] = 300.0
    drain_timeout_s: Annotated[
        float,
        Meta(
            ge=0.0, le=3600.0, description="Most time for running requests to finish after SIGTERM."
        ),
    ] = 30.0
    startup_timeout_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=86_400.0,
            description="Give up the start when the server is not ready by then.",
        ),
    ] = 1800.0
    resident: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(
            description="Of several models so many are awake at a time; the others sleep, and wake "
            "for their next request. By default all are awake."
        ),
    ] = None
    keep_alive: Annotated[
        list[str],
        Meta(
            description="A model that nobody uses for so long (90s, 10m, 2h) falls asleep; one for "
            "all, or one for each. By default, and with -1, none does for that."
        ),
    ] = []
    prepare_engines: Annotated[
        bool,
        Meta(
            description="A model that sleeps keeps the processes of its engines started, with "
            "nothing on the device: it wakes some seconds sooner, for memory of the host. With "
            "--hold-weights each worker has a spare, which takes memory of a GPU, too."
        ),
    ] = False
    sleep_level: Annotated[
        Literal[1, 2],
        Meta(
            description="What a model that sleeps keeps: 2, nothing; 1, its workers, with weights "
            "in pinned memory of the host, from which they come back. On GPUs 1 "
            "needs --hold-weights."
        ),
    ] = 2
    min_awake_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description="With --resident: a model that is in use stays awake so long at least "
            "while another one waits for its place.",
        ),
    ] = 10.0
    lora_dirs: Annotated[
        list[str],
        Meta(
            description="Folder below which administrators may load LoRA adapters while serve "
            "runs; without one none can be loaded or unloaded."
        ),
    ] = []
    model_dirs: Annotated[
        list[str],
        Meta(
            description="Folder below which administrators may load models while serve runs; "
            "without one none can be loaded or unloaded."
        ),
    ] = []

    @property
    def may_sleep(self) -> bool:
        """Whether models fall asleep and wake."""
        return self.resident is not None or bool(self.keep_alive)


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe level that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description="auto writes readable lines on a terminal and JSON lines elsewhere."),
    ] = "auto"
    otel_traces: Annotated[
        bool,
        Meta(
            description="Send OpenTelemetry spans of each request over OTLP (HTTP) to the "
            "collector that the standard OTEL_… variables name."
        ),
    ] = False

"""Settings that contradict each other. All contradictions are reported together, and each names
both sides with their flags and values."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.protocol.config.access_checks import (
    contradictions_around,
    contradictions_of_access,
    contradictions_of_names,
)
from penstock.protocol.config.adapters import contradictions_of_adapters
from penstock.protocol.config.determinism import contradictions_of_determinism
from penstock.protocol.config.division import contradictions_of_division
from penstock.protocol.config.fields import Config
from penstock.protocol.config.holding_checks import contradictions_of_holding
from penstock.protocol.config.host_checks import (
    contradictions_of_devices,
    contradictions_of_hosts,
    contradictions_of_no_device,
)
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.models import contradictions_of_several
from penstock.protocol.config.role_checks import contradictions_of_roles
from penstock.protocol.config.sleep_checks import contradictions_of_sleep
from penstock.protocol.config.sources import Provenance, with_places
from penstock.protocol.config.speculation_checks import contradictions_of_speculation
from penstock.protocol.config.tier_checks import contradictions_of_tiers
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.process.spans import MODULES as SPAN_MODULES
from penstock.protocol.wire.addresses import is_loopback
from penstock.protocol.wire.codec import MAX_PROMPT_BYTES
from penstock.protocol.wire.unix_listener import LONGEST_PATH

GRPC_MODULES = ("grpc", "google.protobuf", "google.rpc", "grpc_health", "grpc_reflection")
"""What the extra ``grpc`` brings."""


def contradictions(
    config: Config,
    sources: Provenance,
    machine: Machine | None = None,
    info: ModelInfo | None = None,
) -> list[str]:
    """One line for each pair of settings that cannot both hold."""
    lines = [
        *_memory(config, sources),
        *contradictions_of_tiers(config),
        *contradictions_of_roles(config, sources),
        *contradictions_of_several(config),
        *contradictions_of_sleep(config),
        *contradictions_of_holding(config),
        *contradictions_of_adapters(config),
        *contradictions_of_hosts(config, sources),
        *_device(config, sources, machine),
        *contradictions_of_speculation(config, sources),
        *contradictions_of_determinism(config),
        *_network(config, sources),
        *_serving(config, sources),
        *_model(config, sources, info),
        *_traces(config),
    ]
    return [with_places(line, sources) for line in lines]


_DEFAULTS = {
    name: value
    for group in msgspec.structs.asdict(Config()).values()
    for name, value in msgspec.structs.asdict(group).items()
}


def _given(config: Config, sources: Provenance, name: str) -> bool:
    """Whether somebody asked for another value than the default, which contradicts nobody."""
    if sources[name].origin in {"default", "derived"}:
        return False
    groups = msgspec.structs.asdict(config).values()
    return any(getattr(group, name, _DEFAULTS[name]) != _DEFAULTS[name] for group in groups)


def _memory(config: Config, sources: Provenance) -> Iterator[str]:
    scheduler, model, cache = config.scheduler, config.model, config.cache
    if scheduler.max_num_seqs > scheduler.max_num_batched_tokens:
        yield (
            f"--max-num-seqs {scheduler.max_num_seqs} is more than --max-num-batched-tokens "
            f"{scheduler.max_num_batched_tokens}: every running sequence decodes a token a step"
        )
    if model.max_model_len and cache.num_kv_blocks:
        room = cache.num_kv_blocks * cache.block_size
        if model.max_model_len > room:
            yield (
                f"--max-model-len {model.max_model_len} does not fit into --num-kv-blocks "
                f"{cache.num_kv_blocks} of {cache.block_size} tokens ({room} tokens)"
            )
    if cache.num_kv_blocks is not None and cache.kv_cache_memory_bytes is not None:
        yield (
            f"--num-kv-blocks {cache.num_kv_blocks} and --kv-cache-memory-bytes "
            f"{cache.kv_cache_memory_bytes} both set the size of KV memory; give one"
        )
    if _given(config, sources, "memory_share"):
        shares = " ".join(f"{share:g}" for share in cache.memory_share)
        for other in ("num_kv_blocks", "kv_cache_memory_bytes"):
            if _given(config, sources, other):
                yield (
                    f"--memory-share {shares} and --{other.replace('_', '-')} "
                    f"{getattr(cache, other)} both set the size of KV memory; give one"
                )
        if config.device.device == "null":
            yield (
                f"--memory-share {shares} has no meaning with --device null, which loads no model"
            )
    if _given(config, sources, "gpu_memory_utilization"):
        for other in ("num_kv_blocks", "kv_cache_memory_bytes"):
            if _given(config, sources, other):
                yield (
                    f"--gpu-memory-utilization {cache.gpu_memory_utilization} and "
                    f"--{other.replace('_', '-')} {getattr(cache, other)} both set the size of KV "
                    "memory; give one"
                )


def _device(config: Config, sources: Provenance, machine: Machine | None) -> Iterator[str]:
    device, model, cache = config.device, config.model, config.cache
    if device.device == "cpu" and model.dtype == "float16":
        yield "--device cpu cannot compute in --dtype float16; use bfloat16 or float32"
    if device.device in {"cpu", "null"} and _given(config, sources, "gpu_memory_utilization"):
        yield (
            f"--gpu-memory-utilization {cache.gpu_memory_utilization} has no meaning with "
            f"--device {device.device}; use --kv-cache-memory-bytes or --num-kv-blocks"
        )
    if device.device == "cpu" and model.quantization == "fp8":
        yield "--quantization fp8 with --device cpu: CPUs do not multiply FP8; use int8"
    if device.device == "cpu" and _given(config, sources, "compress_weights"):
        yield (
            f"--compress-weights {config.loading.compress_weights} has no meaning with --device "
            "cpu, which computes with plain weights"
        )
    if device.device in {"cpu", "null"} and _given(config, sources, "device_index"):
        yield (
            f"--device-index {device.device_index} has no meaning with --device {device.device}; "
            "it names a CUDA device"
        )
    if device.device != "null" and _given(config, sources, "null_step_ms"):
        yield f"--null-step-ms {device.null_step_ms} needs --device null, not {device.device}"
    if device.device == "null":
        for group, name in (
            (device, "threads"),
            (model, "model_impl"),
            (model, "quantization"),
            (config.loading, "load_format"),
            (config.loading, "compress_weights"),
            (cache, "kv_cache_memory_bytes"),
            (cache, "kv_cache_dtype"),
        ):
            if _given(config, sources, name):
                value = getattr(group, name)
                yield (
                    f"--{name.replace('_', '-')} {value} has no meaning with --device null, "
                    "which loads no model"
                )
    if machine is None:
        return
    if device.device == "cuda" and not machine.gpus:
        yield from contradictions_of_no_device(config)
    elif device.device == "cuda":
        yield from contradictions_of_devices(config, sources, machine.gpus)
    if device.threads and device.threads > machine.cores:
        yield f"--threads {device.threads} is more than this machine's {machine.cores} cores"


def _network(config: Config, sources: Provenance) -> Iterator[str]:
    cluster, launch = config.cluster, config.launch
    ipc = cluster.router.startswith("ipc://")
    if ipc:
        for name in ("bind", "advertise", "port_range"):
            value = getattr(cluster, name)
            if value and not (name == "bind" and value.startswith("ipc://")):
                yield (
                    f"--{name.replace('_', '-')} {value} is for tcp, but --router "
                    f"{cluster.router} is on one host"
                )
    if cluster.router and not cluster.router.startswith(("ipc://", "tcp://")):
        yield f"--router {cluster.router}: expected ipc://PATH or tcp://HOST:PORT"
    if cluster.bind.startswith("tcp://") and not cluster.secret:
        host = cluster.bind.removeprefix("tcp://").rpartition(":")[0] or cluster.bind[6:]
        if not is_loopback(host):
            yield (
                f"--bind {cluster.bind} is open to other hosts, but there is no --secret, so "
                "anybody could connect"
            )
    if cluster.port_range:
        low, _, high = cluster.port_range.partition("-")
        models = max(1, len(config.model.models))
        engines = (1 + cluster.world_size) * launch.data_parallel_size
        wanted = 2 + launch.frontends + models * (launch.tokenizers + engines)
        if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < 65536):
            yield f"--port-range {cluster.port_range}: expected FIRST-LAST within 1-65535"
        elif int(high) - int(low) + 1 < wanted and _given(config, sources, "port_range"):
            yield (
                f"--port-range {cluster.port_range} has fewer ports than the {wanted} processes of "
                f"--frontends {launch.frontends}, --tokenizers {launch.tokenizers} and "
                f"--data-parallel-size {launch.data_parallel_size}"
            )


def _serving(config: Config, sources: Provenance) -> Iterator[str]:
    server, launch, cluster = config.server, config.launch, config.cluster
    yield from contradictions_of_names(config.model.served_model_name)
    for folder in launch.model_dirs:
        if not Path(folder).expanduser().is_dir():
            yield f"--model-dirs {folder}: there is no such folder"
    yield from _uds(config, sources)
    yield from contradictions_of_access(server)
    yield from _grpc(config, sources)
    if server.max_body_bytes > MAX_PROMPT_BYTES:
        yield (
            f"--max-body-bytes {server.max_body_bytes} is more than {MAX_PROMPT_BYTES}, the "
            "longest prompt that a message to the tokenizer can carry beside its parameters"
        )
    yield from contradictions_around(server)
    if (
        _given(config, sources, "keep_alive_comment_s")
        and server.keep_alive_comment_s > server.request_timeout_s
    ):
        yield (
            f"--keep-alive-comment-s {server.keep_alive_comment_s:g} is longer than "
            f"--request-timeout-s {server.request_timeout_s:g}: no comment would ever be sent"
        )
    if launch.data_parallel_size > 1 and _given(config, sources, "engine"):
        yield (
            f"--engine {cluster.engine} names one engine, but --data-parallel-size "
            f"{launch.data_parallel_size} starts several, named 0, 1, …"
        )
    if launch.drain_timeout_s > server.request_timeout_s and _given(
        config, sources, "drain_timeout_s"
    ):
        yield (
            f"--drain-timeout-s {launch.drain_timeout_s:g} is longer than --request-timeout-s "
            f"{server.request_timeout_s:g}: every request has ended by then"
        )


def _uds(config: Config, sources: Provenance) -> Iterator[str]:
    server = config.server
    if not server.uds:
        if _given(config, sources, "uds_mode"):
            yield f"--uds-mode {server.uds_mode} has no meaning without --uds"
        return
    for name in ("port", *(("host",) if server.grpc_port is None else ())):
        if _given(config, sources, name):
            value = getattr(server, name)
            yield f"--uds {server.uds} and --{name} {value} both say where HTTP is; give one"
    if server.tls_cert:
        yield (
            f"--uds {server.uds} and --tls-cert {server.tls_cert} do not go together: what goes "
            "through a UNIX socket stays on this host, and is not encrypted"
        )
    if len(os.fsencode(os.path.abspath(os.path.expanduser(server.uds)))) > LONGEST_PATH:
        yield f"--uds {server.uds}: the path of a UNIX socket has at most {LONGEST_PATH} bytes"


def _traces(config: Config) -> Iterator[str]:
    missing = [name for name in SPAN_MODULES if not _is_installed(name)]
    if config.observability.otel_traces and missing:
        yield (
            f"--otel-traces needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'penstock[otel]'"
        )


def _grpc(config: Config, sources: Provenance) -> Iterator[str]:
    server = config.server
    if server.grpc_port is None:
        for name in ("grpc_host", *(() if server.grpc_uds else ("grpc_tokenizer",))):
            if _given(config, sources, name):
                flag = f"--{name.replace('_', '-')} {getattr(server, name)}"
                yield f"{flag} has no meaning without --grpc-port"
    if not server.has_grpc:
        return
    flag = f"--grpc-port {server.grpc_port}"
    if server.grpc_uds:
        flag = f"--grpc-uds {server.grpc_uds}"
        yield from _grpc_uds(config, flag)
    if missing := [name for name in GRPC_MODULES if not _is_installed(name)]:
        yield (
            f"{flag} needs packages that are not installed "
            f"({', '.join(missing)}): pip install 'penstock[grpc]'"
        )
    if server.grpc_port and server.grpc_port == server.port and not server.uds:
        yield f"--grpc-port {server.grpc_port} is --port as well; each needs one of its own"
    host = server.grpc_host
    if host and not (is_loopback(host) or server.has_keys or server.insecure):
        yield (
            f"--grpc-host {host} is open to other hosts, but there is no --api-key, so anybody "
            "could use the server; --insecure allows that"
        )


def _grpc_uds(config: Config, flag: str) -> Iterator[str]:
    server = config.server
    if server.grpc_port is not None:
        yield f"{flag} and --grpc-port {server.grpc_port} both say where gRPC is; give one"
    if config.launch.frontends > 1:
        yield f"{flag} goes with one frontend, and --frontends is {config.launch.frontends}"
    if len(os.fsencode(os.path.abspath(os.path.expanduser(server.grpc_uds)))) > LONGEST_PATH:
        yield f"{flag}: the path of a UNIX socket has at most {LONGEST_PATH} bytes"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _model(config: Config, sources: Provenance, info: ModelInfo | None) -> Iterator[str]:
    given = config.model.max_model_len
    if info is not None and given is not None and given > info.max_model_len:
        yield (
            f"--max-model-len {given}: --model {info.folder} was trained for "
            f"{info.max_model_len} positions (max_position_embeddings in config.json)"
        )
    told = sources["device"].origin not in {"default", "derived"}  # a tokenizer has no device
    if info is not None and told and config.device.device != "null":
        yield from contradictions_of_division(config.cluster, info)

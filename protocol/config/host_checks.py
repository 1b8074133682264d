"""Settings that contradict what devices and hosts there are."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.fields import Config
from penstock.protocol.config.sources import ConfigError, Provenance
from penstock.protocol.wire.addresses import is_loopback

MAKE_SECRET = "openssl rand -hex 32 > secret; chmod 600 secret; --secret file:secret"
EVERYWHERE = frozenset({"*", "0.0.0.0", "[::]"})
"""Hosts of an address that listens on all interfaces, at which nobody can be found."""


def contradictions_of_hosts(config: Config, sources: Provenance) -> Iterator[str]:
    """One line for each."""
    launch, cluster = config.launch, config.cluster
    if launch.join:
        yield from _joining(config)
    if launch.executor == "ray":
        yield from _on_ray(config)
    elif not launch.join and sources["join_timeout_s"].origin == "flag":
        yield (
            f"--join-timeout-s {launch.join_timeout_s:g} needs --join or --executor ray; with "
            "--nodes the first host waits --startup-timeout-s for the others"
        )
    if launch.nodes == 1:
        return
    flag = f"--nodes {launch.nodes}"
    host = cluster.router.removeprefix("tcp://").rpartition(":")[0]
    if not cluster.router.startswith("tcp://") or host in EVERYWHERE:
        given = f", not {cluster.router}" if cluster.router else ""
        yield (
            f"{flag} needs an address at which the other hosts find this one: --router "
            f"tcp://HOST:5570, where HOST is this host's address in their network{given}"
        )
    if not cluster.secret:
        yield f"{flag} needs a --secret that all hosts have: {MAKE_SECRET}"
    if len(config.model.models) > 1 or launch.model_dirs:
        what = "--model-dirs" if launch.model_dirs else f"{len(config.model.models)} models"
        yield f"{flag} and {what} do not go together: several hosts serve one model"
    workers = cluster.world_size * launch.data_parallel_size
    if launch.nodes > workers:
        yield (
            f"{flag} has nothing for each host to do: --tensor-parallel-size "
            f"{cluster.tensor_parallel_size}, --pipeline-parallel-size "
            f"{cluster.pipeline_parallel_size} and --data-parallel-size "
            f"{launch.data_parallel_size} make {workers} worker{'s' if workers > 1 else ''}; use "
            f"--nodes {workers}, or larger sizes"
        )
    on_gpus = config.device.device == "cuda"
    if on_gpus and cluster.world_size > 1 and cluster.rank_traffic == "encrypted":
        each = -(-workers // launch.nodes)
        if each % cluster.world_size:
            yield (
                f"{flag} divides an engine of {cluster.world_size} GPUs among hosts, and NCCL "
                "sends what they compute unencrypted, but --rank-traffic is encrypted; where the "
                "network between the hosts is closed to others, use --rank-traffic plain"
            )


def contradictions_of_devices(config: Config, sources: Provenance, devices: int) -> Iterator[str]:
    """Each worker has a CUDA device of its own, those of an engine one after another; a worker that
    was told its rank looks at its own alone. Of several hosts the first one places them when it
    knows all devices."""
    if config.launch.nodes > 1 or config.launch.executor == "ray":
        return
    first, engines = config.device.device_index, config.launch.data_parallel_size
    is_rank = sources["rank"].origin not in {"default", "derived"}
    world = 1 if is_rank else config.cluster.world_size
    have = f"this machine has {devices} CUDA device{'s' if devices > 1 else ''}"
    after = f" from --device-index {first} on" if first else ""
    left = devices - first
    if first >= devices:
        yield f"--device-index {first}: {have}, counted from 0; choose one of them"
    elif world > left:
        yield (
            f"--tensor-parallel-size {config.cluster.tensor_parallel_size} and "
            f"--pipeline-parallel-size {config.cluster.pipeline_parallel_size} need {world} CUDA "
            f"devices{after}, but {have}"
        )
    elif world * engines > left:
        each = "engines, each on a CUDA device of its own"
        if world > 1:
            each = f"engines, each on {world} CUDA devices of its own"
        yield (
            f"--data-parallel-size {engines} starts {engines} {each}{after}, but {have}; use "
            f"--data-parallel-size {left // world}, or more devices"
        )


def _on_ray(config: Config) -> Iterator[str]:
    launch, cluster = config.launch, config.cluster
    flag = "--executor ray"
    if launch.nodes > 1 or launch.join:
        other = f"--join {launch.join}" if launch.join else f"--nodes {launch.nodes}"
        yield f"{flag} and {other} do not go together: Ray chooses the hosts"
    if cluster.router.startswith("ipc://"):
        yield f"{flag} needs --router tcp://HOST:PORT, or none, not {cluster.router}"
    if len(config.model.models) > 1 or launch.model_dirs:
        yield f"{flag} places the workers of one model, not of several or of --model-dirs"
    if config.device.device_index:
        yield (
            f"{flag} and --device-index {config.device.device_index} do not go together: Ray "
            "chooses each worker's device; leave --device-index out"
        )


def contradictions_of_no_device(config: Config) -> Iterator[str]:
    """Why there can be no ``--device cuda`` on a machine without a CUDA device."""
    launch, missing = config.launch, "--device cuda: this machine has no CUDA device"
    if launch.nodes > 1 or launch.executor == "ray":
        yield f"{missing}; start the server on a host that has one, or use --device cpu on all"
    else:
        yield f"{missing}; use --device cpu"


def refuse_hosts_of_library(config: Config) -> None:
    """The library starts all processes on its own host. Raises ``ConfigError``."""
    launch = config.launch
    for flag, given in (
        (f"--nodes {launch.nodes}", launch.nodes > 1),
        (f"--join {launch.join}", bool(launch.join)),
        (f"--executor {launch.executor}", launch.executor != "process"),
    ):
        if given:
            raise ConfigError(
                f"{flag} is for `penstock serve`: the library starts all processes on this host; "
                "leave it out, or start a server and ask it over HTTP"
            )


def _joining(config: Config) -> Iterator[str]:
    launch, cluster = config.launch, config.cluster
    flag = f"--join {launch.join}"
    host, _, port = launch.join.removeprefix("tcp://").rpartition(":")
    if not launch.join.startswith("tcp://") or not host or not port.isdecimal():
        yield f"{flag}: expected tcp://HOST:PORT, the --router of the first host"
    elif not cluster.secret and not is_loopback(host):
        yield f"{flag} needs the --secret of the first host, as in --secret file:PATH"
    if launch.nodes > 1:
        yield f"{flag} and --nodes {launch.nodes} do not go together: the first host has --nodes"
    if cluster.router:
        yield f"{flag} and --router {cluster.router} both name the router; give --join alone"

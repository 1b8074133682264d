"""What prefill and decode in engines of their own do not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.fields import Config
from penstock.protocol.config.process_fields import ClusterConfig
from penstock.protocol.config.sources import ConfigError, Provenance


def contradictions_of_roles(config: Config, sources: Provenance) -> Iterator[str]:
    """One line for each."""
    launch, role = config.launch, config.scheduler.role
    prefill, decode = launch.prefill_engines, launch.decode_engines
    if not prefill and not decode and role == "both":
        return
    if prefill and not decode:
        yield f"--prefill-engines {prefill} hand over to others: give --decode-engines, too"
    if decode and not prefill:
        yield f"--decode-engines {decode} take over from others: give --prefill-engines, too"
    flag = f"--prefill-engines {prefill}" if prefill else f"--decode-engines {decode}"
    if role != "both":
        flag = f"--role {role}"
        if prefill or decode:
            yield f"{flag} is for one engine; serve gives roles by --prefill-engines"
    if not config.cache.has_tiers:
        yield (
            f"{flag} hands KV blocks over through the keeper: it needs --kv-tier-memory-bytes or "
            "--kv-tier-disk"
        )
    is_given = sources["data_parallel_size"].origin not in {"default", "derived"}
    if prefill and decode and is_given and launch.data_parallel_size != prefill + decode:
        yield (
            f"--data-parallel-size {launch.data_parallel_size} is not the sum of --prefill-engines "
            f"{prefill} and --decode-engines {decode}; leave it out"
        )
    if launch.resident is not None or launch.keep_alive:
        given = f"--resident {launch.resident}" if launch.resident is not None else "--keep-alive"
        yield f"{flag} and {given} do not go together: engines with roles do not sleep"


def check_roles(command: str, config: Config) -> None:
    """What only the command can tell: a scheduler has a role (its worker may hear of it), ``serve``
    starts engines of both. Raises ``ConfigError``."""
    role = config.scheduler.role
    if role != "both" and command in ("serve", "plan", "warm"):
        raise ConfigError(
            f"--role {role} is for one engine: `penstock scheduler` takes it, `penstock {command}` "
            "does not; `penstock serve` gives roles by --prefill-engines and --decode-engines"
        )
    if command != "serve":
        return
    longest = config.cluster.max_local_prefill_length
    if longest != ClusterConfig().max_local_prefill_length and not config.launch.prefill_engines:
        raise ConfigError(
            f"--max-local-prefill-length {longest} has no meaning without --prefill-engines"
        )

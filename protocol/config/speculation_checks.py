"""What drafts do not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.fields import Config, SpeculationConfig
from penstock.protocol.config.sources import Provenance

_BY_NAME = {"suffix", "ngram"}


def contradictions_of_drafts(config: Config) -> Iterator[str]:
    """Of drafts that are asked for by name, and the device or the model's layout."""
    source = config.speculation.speculative
    if source not in _BY_NAME:
        return
    flag = f"--speculative {source}"
    if config.device.device == "null":
        yield f"{flag} has no meaning with --device null, which has no text; use off"
    if config.cluster.world_size > 1:
        yield (
            f"{flag} does not go with a model divided among {config.cluster.world_size} "
            "devices; use --speculative off"
        )


def contradictions_of_speculation(config: Config, sources: Provenance) -> Iterator[str]:
    """What was asked for by name must be possible; ``auto`` is off where it is not."""
    source = config.speculation.speculative
    if source in _BY_NAME:
        yield from contradictions_of_drafts(config)
    else:
        for name in ("speculative_tokens", "speculative_history"):
            if _is_set(config, sources, name):
                value = getattr(config.speculation, name)
                yield (
                    f"--{name.replace('_', '-')} {value} has no meaning with --speculative "
                    f"{source}, which drafts nothing; add --speculative suffix or ngram"
                )
    if source == "ngram" and _is_set(config, sources, "speculative_history"):
        yield (
            f"--speculative-history {config.speculation.speculative_history} has no meaning with "
            "--speculative ngram, which looks at a sequence's own text"
        )


def _is_set(config: Config, sources: Provenance, name: str) -> bool:
    """Whether somebody asked for another value than the default, which contradicts nobody."""
    if sources[name].origin in {"default", "derived"}:
        return False
    return bool(getattr(config.speculation, name) != getattr(SpeculationConfig(), name))

"""What drafts do not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.fields import Config
from penstock.protocol.config.sources import Provenance
from penstock.protocol.config.speculation_fields import SpeculationConfig


def contradictions_of_drafts(config: Config) -> Iterator[str]:
    """Of drafts that are asked for by name, and the device or the model's layout."""
    if not config.speculation.drafts:
        return
    flag = f"--speculative {config.speculation.speculative}"
    if config.device.device == "null":
        yield f"{flag} has no meaning with --device null, which has no text; use off"
    if config.cluster.world_size > 1:
        yield (
            f"{flag} does not go with a model divided among {config.cluster.world_size} "
            "devices; use --speculative off"
        )
    if config.device.device == "cuda" and config.speculation.by_model:
        yield (
            f"{flag} with --device cuda: drafts of models and heads have not been checked on a GPU "
            "yet; use --device cpu, or --speculative suffix"
        )


def contradictions_of_speculation(config: Config, sources: Provenance) -> Iterator[str]:
    """What was asked for by name must be possible; ``auto`` is off where it is not."""
    texts = ("auto", "suffix")
    wanted = config.speculation
    flag = f"--speculative {wanted.speculative}"
    yield from contradictions_of_drafts(config)
    if wanted.speculative == "off" and _is_set(config, sources, "speculative_tokens"):
        yield (
            f"--speculative-tokens {wanted.speculative_tokens} has no meaning with {flag}, which "
            "drafts nothing; add --speculative auto, suffix, ngram, eagle3 or draft-model"
        )
    if wanted.speculative not in texts and _is_set(config, sources, "speculative_history"):
        yield (
            f"--speculative-history {wanted.speculative_history} has no meaning with {flag}: only "
            "--speculative auto and suffix draft from finished outputs"
        )
    yield from _of_models(config, flag)


def _of_models(config: Config, flag: str) -> Iterator[str]:
    folder = config.speculation.speculative_model
    if not config.speculation.by_model:
        if folder:
            yield (
                f"--speculative-model {folder} has no meaning with {flag}; add --speculative "
                "eagle3 or draft-model"
            )
        return
    if not folder:
        yield f"{flag} drafts with a model of its own; name its folder with --speculative-model"
    if len(config.model.models) > 1:
        yield f"{flag} goes with one model, and {len(config.model.models)} are served; use off"
    if config.cache.has_tiers:
        yield (
            f"{flag} with --kv-tier-memory-bytes or --kv-tier-disk: tiers hold the model's KV "
            "blocks alone, without those of what drafts; leave one out"
        )


def _is_set(config: Config, sources: Provenance, name: str) -> bool:
    """Whether somebody asked for another value than the default, which contradicts nobody."""
    if sources[name].origin in {"default", "derived"}:
        return False
    return bool(getattr(config.speculation, name) != getattr(SpeculationConfig(), name))

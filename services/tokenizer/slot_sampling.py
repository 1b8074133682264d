"""What a worker's slot is told about the draw: resolved parameters as ``SlotSampling``."""

from __future__ import annotations

from array import array

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.steps import (
    Dry,
    SamplerStage,
    SlotAdjustments,
    SlotSampling,
)
from penstock.services.tokenizer.sampler_stages import sampler_stages

_UINT64 = 0xFFFF_FFFF_FFFF_FFFF


def slot_sampling(
    params: SamplingParams, stop_ids: list[int], bad_words: list[bytes], breakers: bytes = b""
) -> SlotSampling:
    """What a request asks of the sampler.

    Args:
        params: resolved (``penstock.protocol.sampling.resolve``). Raises ``ValueError`` for others.
        stop_ids: tokens that end a choice.
        bad_words: ``params.bad_words`` as rows of int32 token ids.
        breakers: ids of the tokens that ``params.dry_sequence_breakers`` stand for, ascending.
    """
    temperature, top_p, top_k, seed = params.temperature, params.top_p, params.top_k, params.seed
    if temperature is None or top_p is None or top_k is None or seed is None:
        raise ValueError(
            "temperature, top_p, top_k and seed must be resolved before a request is scheduled, "
            f"got {temperature}, {top_p}, {top_k}, {seed}"
        )
    stages = sampler_stages(params)
    return SlotSampling(
        temperature=1.0 if stages else temperature,
        top_k=0 if stages else max(top_k, 0),
        top_p=1.0 if stages else top_p,
        seed=seed & _UINT64,
        min_p=0.0 if stages else params.min_p or 0.0,
        adjustments=_adjustments(params, stop_ids, bad_words, breakers, stages),
        logprobs=params.logprobs,
    )


def _adjustments(
    params: SamplingParams,
    stop_ids: list[int],
    bad_words: list[bytes],
    breakers: bytes,
    stages: list[SamplerStage],
) -> SlotAdjustments | None:
    """``None`` where the request asks for nothing that changes logits."""
    allowed = params.allowed_token_ids
    adjustments = SlotAdjustments(
        repetition=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        biased=array("i", params.logit_bias).tobytes(),
        biases=array("f", params.logit_bias.values()).tobytes(),
        allowed=None if allowed is None else array("i", allowed).tobytes(),
        bad_words=bad_words,
        min_tokens=params.min_tokens,
        ends=array("i", stop_ids).tobytes() if params.min_tokens else b"",
        grammar=params.structured_outputs,
        stages=stages,
        dry=_dry(params, breakers),
        no_repeat_ngram=params.no_repeat_ngram_size,
    )
    return None if adjustments == SlotAdjustments() else adjustments


def _dry(params: SamplingParams, breakers: bytes) -> Dry | None:
    if params.dry_multiplier == 0.0:
        return None
    return Dry(
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=params.dry_allowed_length,
        range=max(0, params.dry_range),
        breakers=breakers,
    )

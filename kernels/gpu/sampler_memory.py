"""What the sampler's kernels read and write on the device.

``SamplerSlots`` is what the slots ask for; ``SamplerSpace`` is for the kernels alone, as large as
the largest step needs, and free again after each step. The vocabulary is cut into *splits*, one
a program, and these into *groups*: a group's highest logit says whether anything in it matters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from penstock.kernels.sampling.bad_words import WORDS

ASKS_PENALTIES = 1
ASKS_BIASES = 2
ASKS_ALLOWED = 4
ASKS_BAD_WORDS = 8
ASKS_HISTORY = 16
ASKS_STAGES = 32
"""Bits of ``SamplerSlots.asks``."""
ASKS_WRITTEN = ASKS_BIASES | ASKS_BAD_WORDS | ASKS_HISTORY | ASKS_STAGES
"""Adjustments of single tokens, and samplers that work in place: where a row asks for any, its
logits are written anew."""
MOST_STAGES = 16
"""A power of two, and no less than there are samplers."""
STAGE_NUMBERS = 3
"""That a sampler takes, at most."""
SPLIT = 4096
"""Logits of one program."""
GROUP = 64
CANDIDATES = 4096
"""Logits of a row that are looked at together: a floor among so many costs no pass over the row."""
ALWAYS = 0x7FFFFFFF
"""An entry's ``entry_until`` that no output reaches."""


class SamplerSlots(NamedTuple):
    """Sampling parameters by slot. S: slots; V: vocabulary; E: entries of a slot, at most."""

    asks: Tensor
    """[S] int32: which adjustments the slot asks for, ``ASKS_``… bits; 0: none."""
    temperature: Tensor
    """[S] fp32."""
    top_k: Tensor
    """[S] int32; 0, or V and more: all."""
    top_p: Tensor
    """[S] fp32; 1: all."""
    min_p: Tensor
    """[S] fp32; 0: all."""
    repetition: Tensor
    """[S] fp32."""
    frequency: Tensor
    presence: Tensor
    num_output: Tensor
    """[S] int32: output tokens so far."""
    counts: Tensor
    """[S, V] int16; see ``penstock.kernels.sampling.penalties``."""
    allowed: Tensor
    """[S, ceil(V / 32)] int32; see ``penstock.kernels.sampling.allowed_tokens``."""
    entry_count: Tensor
    """[S] int32: entries that the slot has of the three below."""
    entry_token: Tensor
    """[S, E] int32."""
    entry_value: Tensor
    """[S, E] fp32: a bias, or -inf, a ban. No token has two biases; a ban wins over a bias."""
    entry_until: Tensor
    """[S, E] int32: the entry counts while the slot has less output than this."""
    word_ban: Tensor
    """[S, WORDS] int32: tokens that bad words ban in this step; -1: none. See ``ban_words``."""
    stage_count: Tensor
    """[S] int32: samplers that the slot has of the two below."""
    stage_kind: Tensor
    """[S, MOST_STAGES] int32: which, as ``penstock.kernels.sampling.samplers`` numbers them."""
    stage_value: Tensor
    """[S, MOST_STAGES, STAGE_NUMBERS] fp32: their numbers."""
    bound: Tensor
    """[S] fp32: the surprise up to which Mirostat keeps tokens."""


class HistoryEntries(NamedTuple):
    """What rows that ask for DRY or no-repeat-ngram add to logits in one step. No token of a row
    has two that are finite."""

    start: Tensor
    """[N + 1] int32: row n has the entries from ``start[n]`` to before ``start[n + 1]``."""
    token: Tensor
    """int32."""
    value: Tensor
    """fp32: a token's bias and what DRY takes; -inf: a ban."""


def no_history(device: torch.device) -> HistoryEntries:
    """Of a step in which no row asks for any."""
    whole, real = (
        torch.zeros(1, dtype=kind, device=device) for kind in (torch.int32, torch.float32)
    )
    return HistoryEntries(whole, whole, real)


class SamplerSpace(NamedTuple):
    """N: rows of the largest step; V: vocabulary; ``T``: its splits; G: its groups."""

    adjusted: Tensor
    """[N, V] fp32: logits after bans, biases and penalties, of rows with an ask in
    ``ASKS_WRITTEN``; those of other rows are computed where they are read."""
    group_max: Tensor
    """[N, G] fp32: the highest of each group, of rows with a limit."""
    split_max: Tensor
    """[N, T] fp32."""
    split_min: Tensor
    """[N, T] fp32: the lowest above -inf."""
    split_mass: Tensor
    """[N, T] fp32: sum of exp(logit - the split's highest), at the row's temperature."""
    bad: Tensor
    """[N, T] int32: why a split holds what is not finite, see ``Choice.bad``; 0: it does not."""
    group_list: Tensor
    """[N, G rounded up to a power of two] int32."""
    candidates: Tensor
    """[N, CANDIDATES] fp32."""
    candidate_ids: Tensor
    """[N, CANDIDATES] int32."""
    floor: Tensor
    """[N] fp32: the lowest logit that is kept, before the temperature; -inf: all."""
    chosen: Tensor
    """[N] int32: the token, where it is drawn along with the floor; -1 where it is not yet drawn.
    Bits 29 and 30: why the row has none, see ``Choice.bad``."""
    reached: Tensor
    """[N] fp32: what the chosen token reached, noise included."""


def vocab_splits(vocab: int) -> int:
    """Stretches that a vocabulary is cut into."""
    return triton.cdiv(vocab, SPLIT)


def groups_of(vocab: int) -> int:
    """Groups that a vocabulary is cut into."""
    return triton.cdiv(vocab, GROUP)


def sampler_space(
    rows: int, vocab: int, device: torch.device, candidates: int = CANDIDATES
) -> SamplerSpace:
    """Memory for steps of up to so many rows. candidates: a power of two."""

    def empty(width: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, width, dtype=kind, device=device)

    splits, groups = vocab_splits(vocab), groups_of(vocab)
    return SamplerSpace(
        adjusted=empty(vocab),
        group_max=empty(groups),
        split_max=empty(splits),
        split_min=empty(splits),
        split_mass=empty(splits),
        bad=empty(splits, torch.int32),
        group_list=empty(triton.next_power_of_2(groups), torch.int32),
        candidates=empty(candidates),
        candidate_ids=empty(candidates, torch.int32),
        floor=empty(1)[:, 0],
        chosen=empty(1, torch.int32)[:, 0],
        reached=empty(1)[:, 0],
    )


def sampler_slots(
    slots: int, vocab: int, entries: int, device: torch.device, **given: Tensor
) -> SamplerSlots:
    """Columns of slots that ask for nothing; ``given`` are taken as they are."""

    def filled(value: float, *width: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.full((slots, *width), value, dtype=kind, device=device)

    def make(name: str) -> Tensor:
        match name:
            case "top_p" | "repetition":
                return filled(1.0)
            case "temperature" | "min_p" | "frequency" | "presence" | "bound":
                return filled(0.0)
            case "stage_kind":
                return filled(0, MOST_STAGES, kind=torch.int32)
            case "stage_value":
                return filled(0.0, MOST_STAGES, STAGE_NUMBERS)
            case "counts":
                return filled(0, vocab, kind=torch.int16)
            case "allowed":
                return filled(-1, -(-vocab // 32), kind=torch.int32)
            case "entry_value":
                return filled(0.0, entries)
            case "entry_token" | "entry_until":
                return filled(0, entries, kind=torch.int32)
            case "word_ban":
                return filled(-1, WORDS, kind=torch.int32)
        return filled(0, kind=torch.int32)

    return SamplerSlots(
        **{name: given[name] if name in given else make(name) for name in SamplerSlots._fields}
    )

"""The sampler's cases of ``penstock bench kernels`` on a CUDA device.

All but the logprobs are chains of kernels, from logits to tokens that are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from penstock.kernels.gpu.adjust_logits import adjust_logits
from penstock.kernels.gpu.draw import commit, draw
from penstock.kernels.gpu.keep_floor import keep_floor
from penstock.kernels.gpu.logprobs import logprob_columns, logprobs
from penstock.kernels.gpu.sampler_memory import (
    ASKS_PENALTIES,
    ASKS_STAGES,
    SamplerSlots,
    no_history,
    sampler_slots,
    sampler_space,
    vocab_splits,
)
from penstock.kernels.gpu.sampler_stages import sampler_stages
from penstock.kernels.gpu.tail_free_rows import tail_free_rows
from penstock.kernels.gpu.token_history import add_tokens
from penstock.kernels.sampling import MOST_LOGPROBS
from penstock.kernels.sampling.bad_words import RING
from penstock.kernels.sampling.samplers import SAMPLERS
from penstock.loadtest.kernel_benches.kernel_case import Grid, KernelCase, Maker
from penstock.protocol.sampling import GREEDY_TEMPERATURE

Call = Callable[[], object]
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 0.95
_STAGES: dict[str, list[float]] = {
    "dynamic_temperature": [0.5, 1.5, 1.0],
    "nsigma": [1.5, 0.0, 0.0],
    "top_a": [0.1, 0.0, 0.0],
    "min_p": [0.05, 0.0, 0.0],
    "tfs": [0.95, 0.0, 0.0],
    "eta_cutoff": [0.001, 0.0, 0.0],
    "epsilon_cutoff": [0.0001, 0.0, 0.0],
    "typical_p": [0.9, 0.0, 0.0],
    "smoothing": [0.3, 1.0, 0.0],
    "xtc": [0.0001, 1.0, 0.0],
    "skew": [0.5, 0.0, 0.0],
    "top_k": [50.0, 0.0, 0.0],
    "top_p": [0.9, 0.0, 0.0],
    "mirostat": [5.0, 0.1, 0.0],
}
"""Usual numbers of each sampler."""
_OCCURS = 300
"""One token of so many has occurred."""


def sampler_cases(maker: Maker, grid: Grid) -> Iterator[KernelCase]:
    """Draws of every kind, and logprobs. The logits are normal with a deviation of 1: so flat that
    top-p alone keeps most of the vocabulary."""
    vocab, size = maker.config.vocab_size, maker.dtype.itemsize
    count = torch.int16.itemsize
    for rows in grid.batches:
        name, read = f"{rows} x {vocab}", rows * vocab * size
        counted = read + rows * vocab * count
        cases: list[tuple[str, int, Callable[[Maker, int], Call]]] = [
            ("draw", read, _draw),
            ("sample: top-k, top-p", read, partial(_sample, top_k=_TOP_K)),
            ("sample: penalties", counted, partial(_sample, top_p=1.0, penalised=True)),
            ("sample: both", counted, partial(_sample, top_k=_TOP_K, penalised=True)),
            ("sample: flat top-p", read, _sample),
            *((f"sampler: {name}", read, partial(_stage, name=name)) for name in _STAGES),
            ("logprobs", read, _logprobs),
        ]
        for kernel, moved, make in cases:
            yield KernelCase(kernel, name, moved, 0, partial(make, maker, rows))


def _draw(maker: Maker, rows: int) -> Call:
    """Rows drawn at a temperature alone, and the commit of their tokens."""
    return _chain(maker, rows, None)


def _sample(
    maker: Maker, rows: int, top_k: int = 0, top_p: float = _TOP_P, penalised: bool = False
) -> Call:
    """The whole chain of rows that are limited, or penalised, or both."""
    vocab = maker.config.vocab_size
    slots = sampler_slots(rows, vocab, 1, maker.device)
    slots.top_k.fill_(top_k)
    slots.top_p.fill_(top_p)
    if penalised:
        slots.asks.fill_(ASKS_PENALTIES)
        slots.repetition.fill_(1.1)
        slots.frequency.fill_(0.1)
        slots.presence.fill_(0.2)
        slots.counts[:, ::_OCCURS] = 1
    return _chain(maker, rows, slots)


def _chain(maker: Maker, rows: int, slots: SamplerSlots | None, share: float = 0.0) -> Call:
    """share: of tail-free sampling; 0: no row has any."""
    vocab, device = maker.config.vocab_size, maker.device
    parts = rows * vocab_splits(vocab)
    logits = maker.normal(rows, vocab)
    which = maker.integers(list(range(rows)))
    last, position, seed = (maker.integers([0] * rows) for _ in range(3))
    best = torch.empty(parts, dtype=torch.float32, device=device)
    token = torch.empty(parts, dtype=torch.int32, device=device)
    result = torch.zeros(2, rows, dtype=torch.int32, device=device)
    ring = torch.zeros(rows, RING, dtype=torch.int32, device=device)
    temperature = torch.full((rows,), _TEMPERATURE, dtype=torch.float32, device=device)
    count = maker.integers([0] * rows) if slots is None else slots.num_output
    space = None if slots is None else sampler_space(rows, vocab, device)
    history = no_history(device)
    staged = slots is not None and bool(slots.stage_count.any())
    every = torch.arange(rows, device=device)
    shares = torch.full((rows,), share, device=device)
    if slots is not None:
        slots.temperature.copy_(temperature)

    def call() -> None:
        if slots is not None and space is not None:
            adjust_logits(logits, which, slots, space, history, GREEDY_TEMPERATURE)
            if staged:
                sampler_stages(which, rows, seed, seed, slots, space)
            if share:
                tail_free_rows(space.adjusted, every, shares)
                sampler_stages(which, rows, seed, seed, slots, space, after_sort=True)
            keep_floor(logits, which, seed, seed, slots, space, GREEDY_TEMPERATURE)
        splits = draw(
            logits, which, temperature, seed, seed, count, best, token, GREEDY_TEMPERATURE, slots,
            space,
        )  # fmt: skip
        commit(best, token, which, last, position, count, result, rows, splits)
        if slots is not None:
            add_tokens(which, rows, slots, last, ring)

    return call


def _stage(maker: Maker, rows: int, name: str) -> Call:
    """Rows with one sampler of ``penstock.kernels.sampling.samplers``."""
    vocab = maker.config.vocab_size
    slots = sampler_slots(rows, vocab, 1, maker.device)
    slots.asks.fill_(ASKS_STAGES)
    slots.stage_count.fill_(1)
    slots.stage_kind.fill_(SAMPLERS[name].number)
    slots.stage_value.copy_(torch.tensor(_STAGES[name], device=maker.device))
    slots.bound.fill_(6.0)
    return _chain(maker, rows, slots, share=_STAGES[name][0] if name == "tfs" else 0.0)


def _logprobs(maker: Maker, rows: int) -> Call:
    """Logprobs of the chosen token and of as many others as can be asked for."""
    vocab, device = maker.config.vocab_size, maker.device
    logits = maker.normal(rows, vocab)
    which, last = maker.integers(list(range(rows))), maker.integers([0] * rows)
    wanted = maker.integers([min(MOST_LOGPROBS, vocab)] * rows)
    space, out = sampler_space(rows, vocab, device), logprob_columns(rows, device)
    return lambda: logprobs(logits, which, wanted, last, space, out)

"""Which backends attend where the device has no kernels of ours for a model: measured at load.

On the CPU the reference attends in float32, where its results do not depend on the batch; in other
dtypes it has the decode rows, and torch's SDPA the chunks (2 to 4 times as fast; docs/cpu.md). On a
CUDA device both are measured, and the faster one is taken, for decode rows and for chunks apart.
What is measured is what a layer of the model does: its heads, its blocks, contexts of several
lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from penstock.kernels.attention import KV_TILE, ReferenceAttention, paged_attention
from penstock.kernels.attention_backend import AttentionBackend, CacheShape, QuerySpans
from penstock.services.worker.models.specification import CacheSpecification

DECODE_CONTEXTS = (1000, 900, 800, 700, 600, 500, 400, 300)
"""Context lengths of the decode rows that are measured, in tokens."""
CHUNK_ROWS = 512
"""Rows of each of the two chunks that are measured: a prompt's first rows, and its next."""
WARM_UP = 3
ROUNDS = 5
CALLS = 4
"""Calls of a round; the round with the least time counts."""

Seconds = Callable[[Callable[[], object]], float]


class PlainAttention(NamedTuple):
    """The backends of an executor."""

    decode: AttentionBackend
    """The backend for spans of one row."""
    prefill: AttentionBackend
    """The backend for longer spans."""
    summary: str = ""
    """What was measured; empty if nothing was."""

    def of(self, cache: CacheSpecification) -> PlainAttention:
        """Those for one of the model's caches: the reference has windows, chunks, soft
        caps and sinks."""
        return self if cache.plain else REFERENCE

    @property
    def finite_keys(self) -> bool:
        return self.decode.finite_keys or self.prefill.finite_keys


REFERENCE = PlainAttention(ReferenceAttention(), ReferenceAttention())


class AttentionOfKinds(NamedTuple):
    """The backends of an executor whose layers may differ."""

    chosen: Mapping[CacheSpecification, PlainAttention]
    """For each distinct plain cache."""

    def of(self, cache: CacheSpecification) -> PlainAttention:
        return self.chosen.get(cache, REFERENCE)

    @property
    def finite_keys(self) -> bool:
        return any(each.finite_keys for each in self.chosen.values())

    @property
    def summary(self) -> str:
        return "; ".join(dict.fromkeys(each.summary for each in self.chosen.values()))


AnyAttention = PlainAttention | AttentionOfKinds


def choose_plain_attention(
    cache: CacheSpecification, dtype: torch.dtype, block_size: int, device: torch.device
) -> PlainAttention:
    """What attends to such a plain cache on this device."""
    if device.type == "cpu" and dtype == torch.float32:
        return REFERENCE
    from penstock.kernels.sdpa_attention import SdpaAttention

    if device.type == "cpu":
        return PlainAttention(ReferenceAttention(), SdpaAttention())
    with torch.inference_mode():
        measured = MeasuredLayer(cache, dtype, block_size, device)
        return faster_of(SdpaAttention(), ReferenceAttention(), measured)


def faster_of(
    first: AttentionBackend, second: AttentionBackend, measured: MeasuredLayer
) -> PlainAttention:
    """The faster of two backends for decode rows and for chunks; the second where the first
    fails."""
    chosen, words = [], []
    for kind, spans in (("decode", measured.decode_rows()), ("prefill", measured.chunks())):
        best, text = _faster(first, second, partial(measured.seconds, spans=spans))
        chosen.append(best)
        words.append(f"{kind} attention by {best.name} ({text})")
    return PlainAttention(chosen[0], chosen[1], ", ".join(words))


def _faster(
    first: AttentionBackend,
    second: AttentionBackend,
    seconds: Callable[[AttentionBackend], float],
) -> tuple[AttentionBackend, str]:
    other = seconds(second)
    try:
        # Which fused kernels there are differs between devices and builds of torch.
        one = seconds(first)
    except Exception as failure:
        words = " ".join(str(failure).split())[:200]
        return second, f"{first.name} failed: {type(failure).__name__}: {words}"
    if one <= other:
        return first, f"{1e3 * one:.2f} ms against {1e3 * other:.2f}"
    return second, f"{1e3 * other:.2f} ms against {1e3 * one:.2f}"


def least_seconds(work: Callable[[], object]) -> float:
    """Seconds of one call. Each round ends when the device does: launches count as in a step."""
    for _ in range(WARM_UP):
        work()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            work()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - begun) / CALLS)
    return min(rounds)


class MeasuredLayer:
    """Caches of one layer with sequences in them."""

    def __init__(
        self,
        cache: CacheSpecification,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
        clock: Seconds = least_seconds,
    ) -> None:
        """``clock``: gives the seconds of a call."""
        self._clock, self._device = clock, device
        sequences, longest = len(DECODE_CONTEXTS), max(*DECODE_CONTEXTS, 2 * CHUNK_ROWS)
        # As wide as the reference wants tables: whole tiles.
        width = -(-longest // KV_TILE) * -(-KV_TILE // block_size)
        self._tables = np.arange(sequences * width, dtype=np.int64).reshape(sequences, width)
        self._shape = CacheShape(
            cache.num_kv_heads, sequences * width, block_size, cache.head_dim, cache.num_heads,
            dtype,
        )  # fmt: skip
        self._keys, self._values = (
            torch.empty(self._shape[:4], dtype=dtype, device=device).normal_() for _ in range(2)
        )

    def decode_rows(self) -> QuerySpans:
        context = np.array(DECODE_CONTEXTS, np.int64)
        return QuerySpans(np.arange(len(context)), context - 1, None, self._tables)

    def chunks(self) -> QuerySpans:
        """Spans of two sequences: a prompt's first rows, and rows behind as many cached ones."""
        counts = np.full(2, CHUNK_ROWS, np.int64)
        first = np.array([0, CHUNK_ROWS], np.int64)
        return QuerySpans(first, first, counts, self._tables[:2])

    def seconds(self, backend: AttentionBackend, spans: QuerySpans) -> float:
        """Seconds of attention over these spans in one layer, without planning (once a step)."""
        batches = backend.plan(spans, self._shape, self._device)
        rows = len(spans.rows) if spans.counts is None else int(spans.counts.sum())
        heads, dim = self._shape.num_query_heads, self._shape.head_dim
        query = torch.empty(rows, heads, dim, dtype=self._keys.dtype, device=self._device).normal_()
        scale = dim**-0.5
        return self._clock(lambda: paged_attention(query, self._keys, self._values, batches, scale))

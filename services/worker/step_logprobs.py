"""Logprobs of a step's rows, packed as messages carry them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.logprobs import OWN_WORDS, PackedLogprobs
from penstock.protocol.wire.messages.steps import ChunkLogprobs, SampledLogprobs
from penstock.services.worker.slots import IntArray, PlannedChunk, PlannedStep, SlotTable

Words = npt.NDArray[np.int32]


def pack_entries(
    tokens: npt.NDArray[Any],
    rank: npt.NDArray[Any],
    chosen: npt.NDArray[np.float32],
    top_ids: npt.NDArray[Any],
    top: npt.NDArray[np.float32],
) -> Words:
    """[R, 3 + 2 N]: an entry a row. tokens, rank, chosen: [R]; top_ids, top: [R, N]."""
    count, most = top_ids.shape
    words = np.empty((count, OWN_WORDS + 2 * most), "<i4")
    words[:, 0], words[:, 1] = tokens, rank
    words[:, 2] = chosen.astype("<f4").view("<i4")
    words[:, OWN_WORDS : OWN_WORDS + most] = top_ids
    words[:, OWN_WORDS + most :] = np.ascontiguousarray(top, "<f4").view("<i4")
    return words


def trim(words: Words, most: int) -> PackedLogprobs:
    """Entries with the ``most`` likeliest of the tokens that were listed. words: [R, 3 + 2 N]."""
    listed = (words.shape[1] - OWN_WORDS) // 2
    if most < listed:
        columns = [
            *range(OWN_WORDS + most),
            *range(OWN_WORDS + listed, OWN_WORDS + listed + most),
        ]
        words = words[:, columns]
    return PackedLogprobs(most, words.tobytes())


def asking_rows(slots: SlotTable, sampled: IntArray) -> IntArray:
    """Rows of a step whose token's logprob is wanted."""
    return np.flatnonzero(slots.logprobs[sampled] >= 0)


def row_logprobs(words: Words, rows: IntArray, most: IntArray) -> list[SampledLogprobs]:
    """words: [R, 3 + 2 N], the entries of ``rows``; most: how many each lists."""
    return [
        SampledLogprobs(row, trim(words[at : at + 1], number))
        for at, (row, number) in enumerate(zip(rows.tolist(), most.tolist(), strict=True))
    ]


def asking_chunks(step: PlannedStep) -> list[tuple[int, PlannedChunk]]:
    """(row that predicts the first token, chunk) of chunks that bring logprobs of their prompt."""
    found, row = [], len(step.decoding)
    for chunk in step.chunks:
        if len(chunk.predicted):
            found.append((row + chunk.predicted_from, chunk))
        row += len(chunk.tokens)
    return found


def chunk_logprobs(chunk: PlannedChunk, words: Words, most: int) -> ChunkLogprobs:
    return ChunkLogprobs(chunk.slot, max(chunk.start - chunk.virtual, 0), trim(words, most))

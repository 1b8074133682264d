"""A batch of requests in the slots of a device, and the chain of the sampler's kernels on it."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from support.kernels.plain_sampler import Request, count_table
from support.kernels.triton_device import DEVICE

from penstock.kernels.draw_keys import draw_bases
from penstock.kernels.gpu.adjust_logits import adjust_logits
from penstock.kernels.gpu.adjusted_row import adjusted_row, load_adjusted
from penstock.kernels.gpu.draw import commit, draw
from penstock.kernels.gpu.keep_floor import keep_floor
from penstock.kernels.gpu.sampler_memory import (
    ALWAYS,
    ASKS_ALLOWED,
    ASKS_BAD_WORDS,
    ASKS_BIASES,
    ASKS_PENALTIES,
    CANDIDATES,
    SamplerSlots,
    no_history,
    sampler_slots,
    sampler_space,
    vocab_splits,
)
from penstock.kernels.gpu.token_history import add_tokens, ban_words
from penstock.kernels.sampling import WordTable, allowed_mask

GREEDY = 1e-5
Array = np.ndarray


def _on_device(values: Array | list[float], kind: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values)).to(kind).to(DEVICE)


@triton.jit
def _read_kernel(
    logits, rows, asks, repetition, frequency, presence, counts, allowed, adjusted, out, vocab,
    mask_words,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    asked = adjusted_row(
        logits, adjusted, counts, allowed, repetition, frequency, presence, tl.load(asks + slot),
        row, slot, vocab, mask_words,
    )  # fmt: skip
    ids = tl.program_id(1) * 1024 + tl.arange(0, 1024)
    z = load_adjusted(asked, ids, ids < vocab)
    tl.store(out + row * vocab + ids, z, mask=ids < vocab)


class DeviceSampler:
    """Request i is row i, in slot ``slots_of_rows[i]``; one slot more stays empty."""

    def __init__(
        self,
        requests: list[Request],
        vocab: int,
        seed: int = 1,
        candidates: int = CANDIDATES,
        until: int = ALWAYS,
    ) -> None:
        """until: outputs up to which entries count."""
        count = len(requests)
        order = np.random.default_rng(2).permutation(count)
        self.order = order
        by_slot = [requests[row] for row in np.argsort(order)]
        self.vocab, self.count = vocab, count
        self.rows = _on_device(order, torch.int32)
        entries = [
            [*request.biases.items(), *((token, -math.inf) for token in request.bans)]
            for request in by_slot
        ]
        width = max(map(len, entries)) + 3
        token, value = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
        for slot, pairs in enumerate(entries):
            for at, (name, number) in enumerate(pairs):
                token[slot, at], value[slot, at] = name, number
        asks = [
            ASKS_PENALTIES * request.penalised
            + ASKS_BIASES * bool(pairs)
            + ASKS_ALLOWED * (request.allowed is not None)
            + ASKS_BAD_WORDS * bool(request.bad_words)
            for request, pairs in zip(by_slot, entries, strict=True)
        ]
        masks = [
            allowed_mask(range(vocab) if request.allowed is None else request.allowed, vocab)
            for request in by_slot
        ]
        words = WordTable(count)
        for slot, request in enumerate(by_slot):
            words.begin(slot, request.bad_words, request.output)
        self.words = (
            _on_device(words.tokens, torch.int32), _on_device(words.starts, torch.int32),
            _on_device(words.ring, torch.int32),
        )  # fmt: skip

        def column(name: str, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return _on_device([getattr(request, name) for request in by_slot], kind)

        self.slots: SamplerSlots = sampler_slots(
            count, vocab, width, DEVICE,
            asks=_on_device(asks, torch.int32),
            temperature=column("temperature"), top_k=column("top_k", torch.int32),
            top_p=column("top_p"), min_p=column("min_p"), repetition=column("repetition"),
            frequency=column("frequency"), presence=column("presence"),
            num_output=_on_device([len(request.output) for request in by_slot], torch.int32),
            counts=count_table(by_slot, vocab).to(DEVICE),
            allowed=_on_device(np.stack(masks), torch.int32),
            entry_count=_on_device([len(pairs) for pairs in entries], torch.int32),
            entry_token=_on_device(token, torch.int32),
            entry_value=_on_device(value, torch.float32),
            entry_until=torch.full((count, width), until, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        self.history = no_history(DEVICE)
        self.space = sampler_space(count, vocab, DEVICE, candidates)
        for part in self.space:
            part.fill_(float("nan") if part.is_floating_point() else 77)
        bases = draw_bases(np.full(count, seed, np.uint64), np.zeros(count, np.uint64))
        words_of = np.stack((bases & np.uint64(0xFFFFFFFF), bases >> np.uint64(32)))
        self.seeds = _on_device(words_of.astype(np.uint32).view(np.int32), torch.int32)
        splits = vocab_splits(vocab)
        self.best = torch.zeros(count * splits, dtype=torch.float32, device=DEVICE)
        self.token = torch.zeros(count * splits, dtype=torch.int32, device=DEVICE)
        self.last_token = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        self.position = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        self.result = torch.full((2, count), -7, dtype=torch.int32, device=DEVICE)

    def adjust(self, logits: torch.Tensor) -> None:
        """Run until the floors are known. Leaves adjusted logits in ``adjusted``: fp32, [N, V]."""
        ban_words(self.rows, len(logits), self.slots, *self.words)
        adjust_logits(logits, self.rows, self.slots, self.space, self.history, GREEDY)
        self.adjusted = self._read(logits)
        keep_floor(logits, self.rows, *self.seeds, self.slots, self.space, GREEDY)

    def draw(self, logits: torch.Tensor, plain: bool = False) -> None:
        """Run until the tokens are chosen. plain: as if no row could ask for anything."""
        slots, space = (None, None) if plain else (self.slots, self.space)
        self.splits = draw(
            logits, self.rows, self.slots.temperature, self.seeds[0], self.seeds[1],
            self.slots.num_output, self.best, self.token, GREEDY, slots, space,
        )  # fmt: skip

    def commit(self, count: int) -> tuple[list[int], list[int]]:
        """Tokens, and which rows have none."""
        commit(
            self.best, self.token, self.rows, self.last_token, self.position,
            self.slots.num_output, self.result, count, self.splits,
        )  # fmt: skip
        add_tokens(self.rows, count, self.slots, self.last_token, self.words[2])
        tokens, bad = self.result[:, :count].cpu().tolist()
        return tokens, bad

    def step(self, logits: torch.Tensor) -> tuple[list[int], list[int]]:
        """The whole chain."""
        self.adjust(logits)
        self.draw(logits)
        return self.commit(len(logits))

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        """The adjusted logits as the kernels read them."""
        out = torch.full(logits.shape, float("nan"), device=DEVICE)
        slots, space = self.slots, self.space
        grid = (len(logits), triton.cdiv(self.vocab, 1024))
        _read_kernel[grid](
            logits, self.rows, slots.asks, slots.repetition, slots.frequency, slots.presence,
            slots.counts, slots.allowed, space.adjusted, out, self.vocab, slots.allowed.shape[1],
        )  # fmt: skip
        return out.cpu()

"""Counts for penalties beside drafts, against plain Python."""

from __future__ import annotations

import random
from collections import Counter

import torch
from support.kernels.triton_device import DEVICE

from penstock.kernels.gpu.draft_counts import count_accepted, count_ahead
from penstock.kernels.gpu.guessed_drafts import DRAWN, ENTRY, FIRST, SLOT, Outcome
from penstock.kernels.gpu.sampler_memory import ASKS_BIASES, ASKS_PENALTIES, sampler_slots

VOCAB, IN_PROMPT, MOST = 50, -0x8000, 0x7FFF


def test_a_row_counts_the_drafts_ahead_of_it_but_for_the_first() -> None:
    chance, drafts = random.Random(1), [5, 1, 9, 3]
    rows = sum(drafts)
    columns = sampler_slots(rows, VOCAB, 1, DEVICE)
    tokens = [chance.randrange(3) for _ in range(rows)]
    before = [place for count in drafts for place in range(count)]
    asks = [ASKS_PENALTIES, ASKS_PENALTIES, ASKS_BIASES, ASKS_PENALTIES | ASKS_BIASES]
    columns.asks.copy_(torch.tensor([asks[at] for at, n in enumerate(drafts) for _ in range(n)]))
    columns.counts[:, 0], columns.counts[:, 1] = IN_PROMPT + 4, MOST
    started = columns.counts.cpu().tolist()
    count_ahead(
        torch.tensor(tokens, dtype=torch.int32).to(DEVICE), torch.tensor(before).to(DEVICE), columns
    )
    for row, found in enumerate(columns.counts.cpu().tolist()):
        ahead = Counter(tokens[row - before[row] + 1 : row + 1])
        if not int(columns.asks[row]) & ASKS_PENALTIES:
            ahead = Counter()
        wanted = [count + ahead[token] for token, count in enumerate(started[row])]
        wanted[1] = MOST
        assert found == wanted, row


def test_a_slot_counts_the_accepted_tokens_and_takes_back_what_was_not_to_be() -> None:
    slots = sampler_slots(5, VOCAB, 1, DEVICE)
    slots.asks.copy_(torch.tensor([ASKS_PENALTIES, 0, ASKS_PENALTIES, ASKS_PENALTIES, 0]))
    slots.counts[2, 6] = slots.counts[3, 8] = IN_PROMPT + 1
    entries = torch.full((5, ENTRY), -1, dtype=torch.int32)
    for number, (slot, first, drawn) in enumerate([(3, 0, 0), (1, 1, 4), (2, 2, 8), (0, 3, 12)]):
        entries[number, SLOT], entries[number, FIRST], entries[number, DRAWN] = slot, first, drawn
    result = torch.full((2, 8), 6, dtype=torch.int32)
    drawn = torch.tensor([[8, 8, 9, 9] * 5] * 2, dtype=torch.int32)
    counts = torch.tensor([4, 4, 0, 1, 7], dtype=torch.int32)
    given = [one.to(DEVICE) for one in (entries, counts, result, drawn)]
    count_accepted(given[0], Outcome(given[1], given[1]), *given[2:], slots)
    wanted = torch.zeros(5, VOCAB, dtype=torch.int16)
    wanted[3, 8], wanted[3, 9] = IN_PROMPT + 3, 1
    wanted[2, 6] = IN_PROMPT
    assert slots.counts.cpu().tolist() == wanted.tolist()

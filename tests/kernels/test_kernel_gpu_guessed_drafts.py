"""Drafts placed by what the device knows, and counted, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from support.kernels.triton_device import DEVICE

from penstock.kernels.gpu.guessed_drafts import (
    COUNT,
    DISAGREED,
    DRAFTS,
    DRAWN,
    ENTRY,
    FIRST,
    GUESSED,
    KNOWN,
    MOST_DRAFTS,
    ROW,
    SLOT,
    TOKENS,
    Outcome,
    PlacedRows,
    PlannedRows,
    accept_drafts,
    accepted,
    place_drafts,
    placed,
)
from penstock.kernels.sampling import NOT_FINITE, NOTHING_LEFT

ENTRIES, SLOTS, ROWS, WIDTH, GROUPS, BLOCK_SIZE = 6, 9, 176, 20, 2, 8
ALONE, NOBODY = 2, 5
"""A slot among the others that has no guess, and an entry that is no slot's."""


def numbers(*shape: int, fill: int = 0) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.int32)


class Case:
    """Guesses of some slots: what there is of them, and the rows of a step."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.slots = chance.sample(range(SLOTS), ENTRIES)
        self.entries = numbers(ENTRIES, ENTRY, fill=-1)
        self.last, self.position = numbers(SLOTS), numbers(SLOTS)
        self.lists = torch.stack([numbers(ROWS, fill=-1), numbers(ROWS), numbers(ROWS, fill=-1)])
        self.drafts: list[list[int] | None] = []
        self.most: list[int] = []
        row, drawn = ENTRIES, 0
        for number, slot in enumerate(self.slots):
            most = chance.choice([1, 3, MOST_DRAFTS])
            guess = [chance.randint(0, 2) for _ in range(chance.randint(1, GUESSED))]
            since, known = chance.randint(0, 12), chance.randint(0, 90)
            self.last[slot], self.position[slot] = chance.randint(0, 2), known + since
            self.drafts.append(placed(guess, since, int(self.last[slot]), most))
            self.most.append(most)
            if number == NOBODY:
                continue
            self.lists[0, number] = slot
            if number == ALONE:
                continue
            entry = self.entries[number]
            entry[SLOT], entry[KNOWN], entry[COUNT] = slot, known, len(guess)
            entry[DRAFTS], entry[FIRST], entry[ROW], entry[DRAWN] = most, number, row, drawn
            entry[TOKENS : TOKENS + len(guess)] = torch.tensor(guess)
            self.lists[2, number] = number
            rows = slice(row, row + most)
            self.lists[0, rows], self.lists[2, rows] = slot, number
            self.lists[1, rows] = torch.arange(1, most + 1)
            row, drawn = row + most, drawn + most
        self.tables = torch.arange(GROUPS * SLOTS * WIDTH, dtype=torch.int32)
        self.tables = self.tables.view(GROUPS, SLOTS, WIDTH)


def check_row(case: Case, rows: PlacedRows, row: int, slot: int, token: int, at: int) -> None:
    """slot: -1: the row is padding."""
    if slot < 0:
        assert int(rows.slots[row]) == int(rows.own[row]) == -1 and int(rows.tokens[row]) == 0
        return
    found = [int(part[row]) for part in rows[:4]]
    assert found == [token, at, slot, row]
    read = at // BLOCK_SIZE + 1
    assert torch.equal(rows.tables[:, row, :read].cpu(), case.tables[:, slot, :read])


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_taken_from_where_the_text_has_come_to_and_counted(seed: int) -> None:
    case, chance = Case(seed), random.Random(seed)
    last, position = case.last.clone().to(DEVICE), case.position.clone().to(DEVICE)
    output = numbers(SLOTS, fill=5).to(DEVICE)
    lists = [numbers(ROWS, fill=-7).to(DEVICE) for _ in range(4)]
    rows = PlacedRows(*lists, numbers(GROUPS, ROWS, WIDTH).to(DEVICE))
    outcome, entries = Outcome(*numbers(2, ENTRIES).to(DEVICE)), case.entries.to(DEVICE)
    planned = PlannedRows(*case.lists.to(DEVICE))
    tables = case.tables.to(DEVICE)
    place_drafts(planned, entries, last, position, tables, rows, outcome, ROWS, BLOCK_SIZE)
    before, result, drawn = last.tolist(), numbers(2, 40), numbers(2, 5 * MOST_DRAFTS)
    draws: list[tuple[list[int], list[int]]] = []
    for number, slot in enumerate(case.slots):
        tokens = [token if chance.random() < 0.8 else 9 for token in case.drafts[number] or []]
        tokens = [*tokens, *[8] * (1 + case.most[number] - len(tokens))]
        bad = [chance.choice([0] * 20 + [NOT_FINITE, NOTHING_LEFT]) for _ in tokens]
        result[0, number], result[1, number] = tokens[0], bad[0]
        draws.append((tokens, bad))
        last[slot] = tokens[0]
        if number not in (ALONE, NOBODY):
            at = int(case.entries[number, DRAWN])
            drawn[:, at : at + len(tokens) - 1] = torch.tensor([tokens[1:], bad[1:]])
    position.add_(1), output.add_(1)  # as ``commit`` does
    of_drafts = drawn.to(DEVICE)
    accept_drafts(
        entries, last, position, output, rows.tokens, result.to(DEVICE), of_drafts, outcome
    )
    for number, slot in enumerate(case.slots):
        start, (tokens, bad) = int(case.position[slot]), draws[number]
        check_row(case, rows, number, -1 if number == NOBODY else slot, before[slot], start)
        if number in (ALONE, NOBODY):
            assert int(position[slot]) == start + 1
            continue
        drafts, row = case.drafts[number] or [], int(case.entries[number, ROW])
        for ahead in range(case.most[number]):
            there = ahead < len(drafts)
            token = drafts[ahead] if there else 0
            check_row(case, rows, row + ahead, slot if there else -1, token, start + ahead + 1)
        live = DISAGREED if case.drafts[number] is None else len(drafts)
        assert int(outcome.live[number]) == live
        count = accepted(drafts, tokens, bad)
        again = bad[0] == NOT_FINITE and len(drafts) > 0
        advanced = -1 if again else count
        assert int(outcome.counts[number]) == 1 + advanced
        assert int(position[slot]) == start + 1 + advanced
        assert int(output[slot]) == 6 + advanced
        assert int(last[slot]) == (before[slot] if again else tokens[count])


def test_a_guess_that_ends_ahead_of_the_text_has_no_drafts() -> None:
    assert placed([4, 5], 2, 5, 3) == []
    assert placed([4, 5], 3, 5, 3) is None
    assert placed([4, 5, 6, 7], 0, 1, 3) == [4, 5, 6]
    assert placed([4, 5, 6, 7], 1, 4, 9) == [5, 6, 7]
    assert placed([4, 5, 6, 7], 1, 9, 9) is None

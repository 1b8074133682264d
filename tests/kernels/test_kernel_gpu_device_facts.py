"""Numbers of programs follow from the device's multiprocessors."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from penstock.kernels.gpu import decode_shapes, device_facts, shared_prefix


def pretend_multiprocessors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    facts = device_facts.facts_of((9, 0), count)
    monkeypatch.setattr(device_facts, "_pretended", facts)


def test_an_h100_and_an_h200_have_the_numbers_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_multiprocessors(monkeypatch, 132)
    for rows in (1, 3, 8, 33, 64, 256):
        wanted = max(1, 1056 // (rows * 8))
        assert decode_shapes.splits_for(rows, 8) == min(32, 1 << (wanted.bit_length() - 1))
    assert [shared_prefix.parts_for(rows, 32, 8) for rows in (1, 16, 64, 256)] == [16, 16, 8, 2]


def test_a_smaller_device_cuts_rows_into_fewer_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_multiprocessors(monkeypatch, 58)
    assert decode_shapes.splits_for(8, 8) == 4
    assert shared_prefix.parts_for(64, 32, 8) == 2

"""Why there was no room: what ``requests_shed_total`` tells of a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from support.client.remembered_wire import LastError, Wire

from penstock.client.ledger import ClientLedger
from penstock.client.meters import Meters
from penstock.client.refusals import Shed, shed_reason
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import Participant
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.membership import Identity
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    PromptText,
    Rejected,
    RequestHead,
    Work,
)


@pytest.mark.parametrize(
    ("rejected", "reason"),
    [
        (Rejected(1, 1, 503, "overloaded_error", ""), "pipeline"),
        (Rejected(1, 1, 400, "invalid_request_error", ""), ""),
        (Shed(1, 1, 503, "overloaded_error", ""), "unavailable"),
        (Shed(1, 1, 429, "rate_limit_error", "", reason="share"), "share"),
        (Shed(1, 1, 500, "server_error", ""), ""),
    ],
)
def test_a_refusal_counts_once_under_its_reason(rejected: Rejected, reason: str) -> None:
    registry = Registry()
    Meters(registry).refused(rejected)
    assert shed_reason(rejected) == reason
    found = {
        one.labels[0]: one.values
        for one in registry.report().samples
        if one.name == "requests_shed_total"
    }
    assert found == ({reason: [1.0]} if reason else {})


def test_what_waits_in_vain_for_a_part_of_the_server_found_it_unavailable() -> None:
    wire: Any = Wire()
    participant = Participant("frontend", wire, "ipc:///router", Identity(1, "host"))
    ledger = ClientLedger(wire.address, wire.incarnation, participant, wire.send, 1.0)
    sink = LastError()
    work = Work(
        head=RequestHead(model="m"),
        prompt=PromptText("x"),
        params=SamplingParams(seed=1),
        choices=[ChoiceState(0, b"")],
    )
    ledger.submit(work, sink, 0.0)
    ledger.end_waiting("m", lambda began: True, "no engine came")
    assert sink.rejected is not None
    assert shed_reason(sink.rejected) == "unavailable"

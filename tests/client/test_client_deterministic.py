"""A request that wants its answer repeated is refused where no engine of its model does so."""

from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec
import pytest
from support.client.remembered_wire import LastError, Wire

from penstock.client.gateway import PipelineGateway
from penstock.client.gateway_interface import Overloaded, ServedModel
from penstock.client.tasks import repeat_refusal
from penstock.protocol.process.participant import Participant
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.membership import Capacity, Identity, Members, Peer, Phase
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    RequestHead,
    Submit,
    Tokens,
    Work,
)

CAPACITY = Capacity(
    num_blocks=1000, block_size=16, max_num_seqs=8, max_model_len=4096, vocab_size=320
)


@pytest.mark.parametrize("engines", [(False,), (False, True), (True,)])
def test_one_engine_that_repeats_answers_suffices(engines: tuple[bool, ...]) -> None:
    wire: Any = Wire()
    participant = Participant("frontend", wire, "ipc:///run/router.sock", Identity(1, "host"))
    gateway = PipelineGateway(wire, participant)
    capacities = [msgspec.structs.replace(CAPACITY, repeats=one) for one in engines]
    services = [("router", Capacity()), ("tokenizer", Capacity())]
    services += [("scheduler", capacity) for capacity in capacities]
    peers = [
        Peer(
            *(service, f"ipc:///run/{number}.sock", number),
            *(Identity(number, f"host{number}", model="base"), Phase.READY, "", capacity, 0),
        )
        for number, (service, capacity) in enumerate(services, 1)
    ]
    now = time.monotonic()
    participant.handle(1, Members(1, 1, peers, [], served=["base"], withdrawn=[]), now)
    gateway.tick(now)
    prompt = Tokens(array("i", [1, 2, 3]).tobytes())
    head = RequestHead(model="base", deterministic=True)
    work = Work(head, prompt, SamplingParams(seed=1), [ChoiceState(0)])
    if any(engines):
        gateway.open(work, LastError())
        assert [type(one) for one in wire.sent].count(Submit) == 1
        return
    with pytest.raises(Overloaded) as failure:
        gateway.open(work, LastError())
    rejected = failure.value.rejected
    assert (rejected.status, rejected.param) == (400, "deterministic")
    assert rejected.message.startswith(
        "deterministic is true, and no engine of the model 'base' repeats its answers bit for bit: "
        "a CPU does in float32 (--dtype float32) with plain weights"
    )
    gateway.open(msgspec.structs.replace(work, head=RequestHead(model="base")), LastError())


def test_what_a_sleeping_model_will_do_is_not_known() -> None:
    head = RequestHead(model="base", deterministic=True)
    served = ServedModel("base", [], 64, 100)
    assert repeat_refusal(head, served) is not None
    assert repeat_refusal(head, msgspec.structs.replace(served, sleep="asleep")) is None

"""Adapters as a frontend knows them: models by their own names, which only generate."""

from __future__ import annotations

import logging
import time
from array import array
from typing import Any

import msgspec
import pytest
from support.client.remembered_wire import LastError, Wire

from penstock.client.gateway import PipelineGateway
from penstock.client.gateway_interface import Overloaded, ServedModel
from penstock.client.served_engines import ServedAdapters, with_engine
from penstock.protocol.process.participant import Participant
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import Capacity, Identity, Members, Peer, Phase
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    RequestHead,
    Submit,
    Tokens,
    Work,
)

ROUTER = "ipc:///run/router.sock"
CAPACITY = Capacity(
    num_blocks=1000,
    block_size=16,
    max_num_seqs=8,
    max_model_len=4096,
    vocab_size=320,
    tasks=["embed"],
    adapters=[Adapter("sql", "d1"), Adapter("soft", "d2", 20)],
)


def model(name: str, *adapters: str, aliases: tuple[str, ...] = ()) -> ServedModel:
    loaded = [Adapter(one, f"{name}-{one}") for one in adapters]
    return ServedModel(name, list(aliases), 64, 100, adapters=loaded)


def test_of_two_adapters_of_one_name_the_first_is_served_and_the_other_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapters = ServedAdapters()
    models = [model("a", "sql", "b2"), model("b", "sql", aliases=("b2",))]
    with caplog.at_level(logging.WARNING):
        adapters.look(models)
        adapters.look(models)
    assert {name: one.parent for name, one in adapters.items()} == {"sql": "a"}
    assert sorted(record.getMessage() for record in caplog.records) == [
        "the adapter 'b2' of the model 'a' is not served: the model 'b' has the name",
        "the adapter 'sql' of the model 'b' is not served: the model 'a' has the name",
    ]


def test_what_has_no_name_any_more_is_no_model() -> None:
    leaving = msgspec.structs.replace(CAPACITY, adapters=[Adapter("", "d0"), Adapter("sql", "d1")])
    served = with_engine(None, Identity(1, "host", model="base"), leaving)
    assert served.adapters == [Adapter("sql", "d1")]


def test_a_task_under_the_name_of_an_adapter_is_refused() -> None:
    wire: Any = Wire()
    participant = Participant("frontend", wire, ROUTER, Identity(1, "host"))
    gateway = PipelineGateway(wire, participant)
    peers = [
        Peer(
            *(service, f"ipc:///run/{number}.sock", number),
            *(Identity(number, "host", model="base"), Phase.READY, ""),
            *(CAPACITY if service == "scheduler" else Capacity(), 0),
        )
        for number, service in enumerate(("router", "tokenizer", "scheduler"), 1)
    ]
    now = time.monotonic()
    participant.handle(1, Members(1, 1, peers, [], served=["base"], withdrawn=[]), now)
    gateway.tick(now)

    def opened(name: str, task: Any) -> None:
        prompt = Tokens(array("i", [1, 2, 3]).tobytes())
        head = RequestHead(model=name, task=task)
        gateway.open(Work(head, prompt, SamplingParams(seed=1), [ChoiceState(0)]), LastError())

    with pytest.raises(Overloaded, match="the model 'sql' does not do the task 'embed'"):
        opened("sql", "embed")
    for name, task in (("base", "embed"), ("sql", "generate"), ("soft", "tokenize")):
        opened(name, task)
    sent = [one for one in wire.sent if isinstance(one, Submit)]
    assert [one.model for one in sent] == ["base"] * 3
    heads = [msgspec.msgpack.decode(one.work, type=Work).head for one in sent]
    found = [(head.adapter, head.virtual_tokens) for head in heads]
    assert found == [("", 0), ("d1", 0), ("d2", 20)]
    longest = {one.name: one.max_model_len for one in gateway.models()}
    assert longest == {"base": 4096, "sql": 4096, "soft": 4076}

"""The head of a request comes from the client's side to the scheduler as it was set there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small, token_work
from support.scheduler.simulated_worker import token_bytes

from penstock.client.ledger import ClientLedger
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.ownership.tokenizer import TokenizerLedger
from penstock.protocol.prefix_digest import chain_root
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.requests import (
    Accepted,
    ChoiceState,
    Enqueue,
    PromptKind,
    RequestHead,
    Submit,
    Tokens,
    Work,
)
from penstock.services.launcher.builtin_model import builtin_model
from penstock.services.tokenizer.choice_stream import ChoiceStream
from penstock.services.tokenizer.preparation import prepare
from penstock.services.tokenizer.text_model import TextModel

MAINTAINED = {"age", "time_left", "accepted", "hand_overs"}
"""What each process brings up to date when it sends a request on."""


@dataclass
class Nobody:
    """A membership without members."""

    router_address: str = "router"
    router_incarnation: int = 1
    peers: dict[int, Peer] = field(default_factory=dict)


class Sent(list[Any]):
    def __call__(self, address: str, message: Message) -> bool:
        self.append(message)
        return True

    def only(self, kind: type[Any]) -> Any:
        (found,) = (message for message in self if isinstance(message, kind))
        return found


def set_everywhere() -> RequestHead:
    """A head of which no field has its default."""
    values: dict[str, Any] = {}
    for one in msgspec.structs.fields(RequestHead):
        match one.default:
            case bool():
                values[one.name] = not one.default
            case int():
                values[one.name] = one.default + 7
            case str() if one.name == "prompt_kind":
                (values[one.name], *_) = set(get_args(PromptKind)) - {one.default}
            case str():
                values[one.name] = f"a {one.name}"
            case float() | None:
                values[one.name] = 250.5
            case msgspec.UnsetType() | _:
                values[one.name] = [f"a {one.name}"]
    head = RequestHead(**values)
    plain = RequestHead()
    assert all(getattr(head, name) != getattr(plain, name) for name in head.__struct_fields__)
    return msgspec.convert(msgspec.to_builtins(head), RequestHead)


class NoSink:
    """Of an answer that nobody waits for."""

    wants_ids = False


@pytest.fixture(scope="module")
def model() -> tuple[TextModel, ModelInfo]:
    info = read_model_info(str(builtin_model()))
    return TextModel.load(info.folder, info.vocab_size), info


def test_every_field_of_the_head_reaches_the_scheduler_s_request(
    model: tuple[TextModel, ModelInfo],
) -> None:
    text, info = model
    head, sent = set_everywhere(), Sent()
    client = ClientLedger("frontend", 1, Nobody(), sent)
    work = Work(head, Tokens(token_bytes([5, 6])), SamplingParams(seed=1), [ChoiceState(0)])
    number = client.submit(work, NoSink(), 0.0)  # type: ignore[arg-type]
    submit = sent.only(Submit)
    assert submit.model == head.model

    def begin(request_id: int, attempt: int, work: Work) -> None:
        prepared = prepare(work, text, info, 100, 0)
        stream = ChoiceStream(text, prepared.params)
        tokenizer.encoded(
            request_id, attempt, prepared.work, prepared.params, lambda choice: stream, 0.0
        )

    tokenizer = TokenizerLedger("tokenizer", Nobody(), sent, begin)  # type: ignore[arg-type]
    tokenizer.handle(1, submit, 0.0)
    enqueue = sent.only(Enqueue)
    assert enqueue.model == head.model
    engine = Engine(small(vocab_size=info.vocab_size))
    SchedulerLedger(Nobody(), sent, engine.core).handle(2, enqueue, 0.0)
    assert isinstance(sent[-1], Accepted)
    request = engine.core._requests.get(number)
    assert request is not None
    for name in set(head.__struct_fields__) - MAINTAINED:
        assert getattr(request.head, name) == getattr(head, name), name


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"adapter": "lora"}, {"media": ["d1"]}, {"cache_salt": "mine"}],
    ids=lambda change: next(iter(change)),
)
def test_requests_share_blocks_only_for_the_same_model_adapter_media_and_salt(
    change: dict[str, Any],
) -> None:
    engine = Engine(small())
    work = token_work(prompt(12), max_tokens=1)
    heads = [work.head, msgspec.structs.replace(work.head, **change)]
    for number, head in enumerate((*heads, heads[1]), 1):
        engine.run_alone(msgspec.structs.replace(work, head=head), number)
    hits = engine.core.counters.prefix_hit_tokens
    assert 0 < hits < 12  # the third found what the second had computed; the second found nothing
    names = [{"tenant": "a"}, {"priority": 3}, {"request_id": "r"}, {"trace": "t"}]
    assert {chain_root(RequestHead(**name)) for name in names} == {chain_root(RequestHead())}

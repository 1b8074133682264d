"""A choice that completes a banned string goes back: what its tokenizer tells engine and client."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from support.protocol.sent_messages import (
    FRONTEND,
    ONE,
    OTHER,
    PROMPT,
    ROUTER,
    SCHEDULER,
    TOKENIZER,
    Members,
    Sent,
    address,
)
from test_tokenizer_banned_strings import MODEL, letter

from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.ownership.tokenizer import TokenizerLedger
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    Cancel,
    ChoiceState,
    Enqueue,
    Rejected,
    RequestHead,
    Submit,
    Tokens,
    TokenWork,
    Work,
)
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Released,
    Text,
    TextBatch,
    TokenBatch,
)
from penstock.services.tokenizer.banned_strings import BannedStrings
from penstock.services.tokenizer.choice_stream import ChoiceStream

PARAMS = SamplingParams(banned_strings=["ab"])
SAMPLING = SlotSampling(1.0, 0, 1.0, 5).packed()


def submit(*states: ChoiceState, submission: int = ONE) -> Submit:
    work = Work(RequestHead(), Tokens(PROMPT), PARAMS, [*states])
    body = msgspec.msgpack.encode(work)
    return Submit(7, submission, address(FRONTEND), body, "", len(states))


@pytest.fixture
def ledger() -> tuple[TokenizerLedger, Sent]:
    sent = Sent()

    def begin(number: int, attempt: int, work: Work) -> None:
        tokens = TokenWork(work.head, PROMPT, SAMPLING, work.choices, [], 16)
        made.encoded(
            *(number, attempt, tokens, work.params),
            *(lambda choice: ChoiceStream(MODEL, PARAMS), 0.0),
            lambda: BannedStrings(MODEL, PARAMS, SAMPLING, with_stops=True),
        )

    made = TokenizerLedger(address(TOKENIZER), Members(), sent, begin)
    return made, sent


def ids(text: str) -> bytes:
    return array("i", map(letter, text)).tobytes()


def rows(attempt: int, *rows: tuple[int, int, str], end: bool = False) -> TokenBatch:
    """(choice, index, letters) of each."""
    count = len(rows)
    ends = [End(count - 1, EndReason.LENGTH)] if end else []
    choices, indices, texts = (list(column) for column in zip(*rows, strict=True))
    return TokenBatch(
        *([7] * count, choices, [attempt] * count, indices, [len(text) for text in texts]),
        *(ids("".join(texts)), ends),
    )


def work_of(message: Enqueue) -> TokenWork:
    return msgspec.msgpack.decode(message.work, type=TokenWork)


def test_the_engine_that_has_it_gets_it_anew_and_the_client_sees_nothing_of_it(
    ledger: Any,
) -> None:
    made, sent = ledger
    made.handle(FRONTEND, submit(ChoiceState(0), ChoiceState(1)), 0.0)
    sent.take()
    made.handle(SCHEDULER, rows(ONE, (0, 0, "xa"), (1, 0, "yc")), 0.1)
    [(_, first)] = sent.take(TextBatch)
    assert (first.texts, first.counts) == (["x", "yc"], [1, 2])
    made.handle(SCHEDULER, rows(ONE, (0, 2, "b"), (1, 2, "d")), 0.2)
    assert made.open[7].stalls == made.continuations == 0 and made.redraws == 1
    (_, texts), (to, again) = sent.take()
    assert (texts.choices, texts.texts) == ([1], ["d"])
    assert (to, again.attempt) == (address(SCHEDULER), ONE + 1)
    one, other = work_of(again).choices
    assert (one.output, one.released, other.output) == (ids("x"), Released(1), ids("ycd"))
    sampling = msgspec.msgpack.decode(one.sampling, type=SlotSampling)
    assert sampling.adjustments is not None and sampling.adjustments.banned == ids("a")
    assert sampling.adjustments.banned_until == 2 and other.sampling == b""

    made.handle(SCHEDULER, rows(ONE, (0, 3, "z")), 0.3)  # of the attempt before
    assert sent.take() == [(address(SCHEDULER), Cancel([7], [ONE], [-1]))]
    made.handle(SCHEDULER, rows(ONE + 1, (1, 3, "e"), (0, 1, "c")), 0.4)
    [(_, texts)] = sent.take(TextBatch)
    assert (texts.texts, texts.indices) == (["e", ""], [3, 1])
    [told] = texts.events
    assert (told.events, told.released) == ([Text("c")], Released(2, redraws=1))


def test_an_engine_that_is_silent_is_asked_through_the_router(ledger: Any) -> None:
    made, sent = ledger
    made.handle(FRONTEND, submit(ChoiceState(0)), 0.0)
    made.handle(SCHEDULER, rows(ONE, (0, 0, "ab")), 0.1)
    sent.take()
    made.tick(2.0)
    [(to, again)] = sent.take(Enqueue)
    assert (to, again.attempt) == (ROUTER, ONE + 1)


def test_another_engine_gets_what_is_held_back_too(ledger: Any) -> None:
    made, sent = ledger
    made.handle(FRONTEND, submit(ChoiceState(0)), 0.0)
    made.handle(SCHEDULER, rows(ONE, (0, 0, "xa")), 0.1)
    sent.take()
    gone = {SCHEDULER: made._members.peers.pop(SCHEDULER)}
    made.peers_gone(gone, 0.2)
    [(to, again)] = sent.take(Enqueue)
    assert (to, work_of(again).choices) == (ROUTER, [ChoiceState(0, ids("xa"), Released(1))])


def test_another_tokenizer_goes_on_with_as_many_redraws_behind_it(ledger: Any) -> None:
    made, sent = ledger
    state = ChoiceState(0, ids("xc"), Released(2, redraws=3))
    made.handle(FRONTEND, submit(state), 0.0)
    [(_, message)] = sent.take(Enqueue)
    [asked] = work_of(message).choices
    sampling = msgspec.msgpack.decode(asked.sampling, type=SlotSampling)
    assert sampling.seed != 5 and sampling.adjustments is None
    made.handle(SCHEDULER, rows(ONE, (0, 2, "d"), end=True), 0.1)
    [(_, texts)] = sent.take(TextBatch)
    assert texts.texts == ["d"] and not made.open


def test_a_choice_that_ended_in_a_banned_string_has_not_ended(ledger: Any) -> None:
    made, sent = ledger
    made.handle(FRONTEND, submit(ChoiceState(0)), 0.0)
    sent.take()
    made.handle(SCHEDULER, rows(ONE, (0, 0, "xab"), end=True), 0.1)
    [(_, again)] = sent.take(Enqueue)
    assert work_of(again).choices[0].output == ids("x")
    made.handle(SCHEDULER, rows(ONE + 1, (0, 1, "yz"), end=True), 0.2)
    [(_, texts)] = sent.take(TextBatch)
    assert len(texts.ends) == 1 and not made.open


def test_an_engine_that_drains_takes_back_what_it_has() -> None:
    class Core:
        def holder(self, request_id: int) -> tuple[int, str] | None:
            return (ONE, address(TOKENIZER)) if request_id == 7 else None

        def add(self, *given: Any) -> None: ...

        def max_output(self, request_id: int) -> int:
            return 3

    sent, core = Sent(), Core()
    ledger = SchedulerLedger(Members(), sent, core)  # type: ignore[arg-type]
    ledger.draining = True
    body = msgspec.msgpack.encode(TokenWork(RequestHead(), PROMPT, b"", [ChoiceState(0)], [], 3))
    for number, owner in ((7, TOKENIZER), (7, OTHER), (8, TOKENIZER)):
        ledger.handle(1, Enqueue(number, ONE + 1, address(owner), body), 0.0)
    assert [type(message) is Rejected for _, message in sent.take()] == [False, True, True]

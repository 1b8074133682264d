"""The ownership rules one by one: each ledger alone, between messages that the test writes."""

from __future__ import annotations

import time
import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest
from support.growth import LINEAR, sixteenfold
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

from penstock.client.ledger import UNTAKEN_SECONDS, ClientLedger
from penstock.client.sink import RowExtras
from penstock.protocol.grammar.request import MAX_SOURCE_BYTES, Grammar
from penstock.protocol.ownership import tokenizer as ownership_tokenizer
from penstock.protocol.ownership.choice import Delta, unreleased
from penstock.protocol.ownership.refusals import (
    LONGEST_PAUSE_SECONDS,
    NEW_SECONDS,
    STARTED_SECONDS,
)
from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.ownership.tokenizer import TokenizerLedger
from penstock.protocol.ownership.tombstones import (
    GRACE_SECONDS,
    MAX_STALLS,
    MAX_TOMBSTONES,
    RESEND_SECONDS,
    TOMBSTONE_SECONDS,
    Tombstones,
)
from penstock.protocol.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOKENS,
    SamplingParams,
)
from penstock.protocol.wire.codec import MAX_PROMPT_BYTES, MAX_WORK_BYTES
from penstock.protocol.wire.messages import requests
from penstock.protocol.wire.messages.requests import (
    Accepted,
    Cancel,
    ChoiceState,
    Enqueue,
    Holding,
    Inputs,
    PoolingParams,
    PromptText,
    Rejected,
    RequestHead,
    Submit,
    Taken,
    Tokens,
    TokenWork,
    Unknown,
    Work,
    first_attempt,
)
from penstock.protocol.wire.messages.tokens import (
    Continued,
    End,
    EndReason,
    Event,
    Reasoning,
    Released,
    RowEvents,
    RowPooled,
    RowStart,
    Text,
    TextBatch,
    TokenBatch,
    TokenIds,
    ToolArguments,
    ToolCallOpened,
    Vector,
)


class Ear:
    """A sink that writes down what it hears."""

    wants_ids = False

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.codes: list[str | None] = []
        """Of refusals."""
        self.continuations = 0

    def on_accepted(self, prompt_tokens: int) -> None:
        self.heard.append(prompt_tokens)

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        content = text if extras is None or extras.events is None else extras.events
        self.heard.append((content, tokens, extras is not None and extras.end is not None))

    def on_continued(self) -> None:
        self.continuations += 1

    def on_rejected(self, rejected: Rejected) -> None:
        self.heard.append(rejected.status)
        self.codes.append(rejected.code)


WORK = Work(RequestHead(), Tokens(PROMPT), SamplingParams(seed=1), [ChoiceState(0)])


# --- the frontend


@pytest.fixture
def frontend() -> tuple[ClientLedger, Sent, Ear, int]:
    """A ledger with one request that was just submitted."""
    sent, ear = Sent(), Ear()
    ledger = ClientLedger(address(FRONTEND), FRONTEND, Members(), sent)
    return ledger, sent, ear, ledger.submit(WORK, ear, 0.0)


def text_row(number: int, submission: int, index: int, text: str, end: bool = False) -> TextBatch:
    ends = [End(0, EndReason.LENGTH)] if end else []
    count = len(text)
    tokens = array("i", range(count)).tobytes()
    attempt = first_attempt(submission)
    return TextBatch(
        [number], [0], [attempt], [index], [count], tokens, [text], [index + count], ends
    )


def accept(ledger: ClientLedger, number: int, submission: int = 1) -> None:
    """The request is in an engine."""
    ledger.handle(TOKENIZER, Accepted(number, first_attempt(submission), PROMPT, 5), 0.1)


def test_a_submission_is_sent_again_until_it_is_taken(frontend: Any) -> None:
    ledger, sent, _, number = frontend
    [(to, first)] = sent.take(Submit)
    assert to == ROUTER
    ledger.tick(RESEND_SECONDS - 0.01)
    assert sent.take(Submit) == []
    ledger.tick(RESEND_SECONDS)
    [(_, again)] = sent.take(Submit)
    assert (again.id, again.attempt) == (first.id, first.attempt) == (number, ONE)
    ledger.handle(TOKENIZER, Taken(number, ONE), 1.5)
    ledger.tick(5.0)
    assert sent.take(Submit) == []


def test_a_second_tokenizer_that_took_it_is_told_to_drop_it(frontend: Any) -> None:
    ledger, sent, _, number = frontend
    ledger.handle(TOKENIZER, Taken(number, ONE), 0.1)
    sent.take()
    ledger.handle(OTHER, Taken(number, ONE), 0.2)
    assert sent.take() == [(address(OTHER), Cancel([number], [ONE], [-1]))]
    ledger.handle(OTHER, text_row(number, 1, 0, "no"), 0.3)
    assert sent.take() == [(address(OTHER), Cancel([number], [ONE], [-1]))]


def test_the_client_gets_exactly_the_next_index(frontend: Any) -> None:
    ledger, sent, ear, number = frontend
    accept(ledger, number)
    ledger.handle(TOKENIZER, text_row(number, 1, 0, "ab"), 0.1)
    ledger.handle(TOKENIZER, text_row(number, 1, 0, "ab"), 0.2)  # known: dropped
    sent.take()
    ledger.handle(TOKENIZER, text_row(number, 1, 3, "d"), 0.3)  # a gap: started again
    assert ear.heard == [2, ("ab", 2, False)]
    (_, cancel), (_, submit) = sent.take()
    assert cancel == Cancel([number], [first_attempt(2) - 1], [-1])
    assert submit.attempt == first_attempt(2)
    [choice] = msgspec.msgpack.decode(submit.work, type=Work).choices
    assert (choice.output, choice.released) == (array("i", [0, 1]).tobytes(), Released(2))
    ledger.handle(TOKENIZER, text_row(number, 1, 2, "c"), 0.4)  # of the old submission
    ledger.handle(OTHER, text_row(number, 2, 2, "cd", end=True), 0.5)
    assert ear.heard == [2, ("ab", 2, False), ("cd", 2, True)]
    assert ledger.open == {}


VALUES = b"\0\0\x80?"
BATCH = Work(
    RequestHead(task="embed"),
    Inputs([PromptText("a"), PromptText("b"), PromptText("c")]),
    SamplingParams(seed=1),
    [ChoiceState(0), ChoiceState(1), ChoiceState(2)],
    pooling=PoolingParams(prompt_name="query"),
)
"""Three texts, of 1, 2 and 3 tokens."""
BATCH_IDS = array("i", range(6)).tobytes()


def vectors(number: int, submission: int, *choices: int) -> TextBatch:
    """The ends of these choices, with a vector each."""
    rows, attempt = len(choices), first_attempt(submission)
    return TextBatch(
        [number] * rows, list(choices), [attempt] * rows, [0] * rows, [0] * rows, b"",
        [""] * rows, [0] * rows, [End(row, EndReason.LENGTH) for row in range(rows)],
        events=[RowEvents(row, [Vector(VALUES)], Released()) for row in range(rows)],
    )  # fmt: skip


def test_a_batch_goes_on_elsewhere_without_the_prompts_that_are_done() -> None:
    sent, ear = Sent(), Ear()
    ledger = ClientLedger(address(FRONTEND), FRONTEND, Members(), sent)
    number = ledger.submit(BATCH, ear, 0.0)
    [(_, first)] = sent.take(Submit)
    assert (first.choices, ledger.open_of[""]) == (3, 3)
    ledger.handle(TOKENIZER, Accepted(number, ONE, BATCH_IDS, 0, [1, 2, 3]), 0.1)
    ledger.handle(TOKENIZER, vectors(number, 1, 1), 0.2)
    assert ledger.open_of[""] == 2
    ledger.handle(TOKENIZER, Unknown([number], [ONE]), 0.3)
    [(_, again)] = sent.take(Submit)
    work = msgspec.msgpack.decode(again.work, type=Work)
    assert (again.choices, [one.choice for one in work.choices]) == (2, [0, 2])
    assert work.prompt == Inputs([Tokens(BATCH_IDS[:4]), Tokens(BATCH_IDS[12:])])
    assert work.pooling == PoolingParams()  # the ids have what stands ahead
    assert work.head.accepted
    ledger.handle(TOKENIZER, Taken(number, first_attempt(2)), 0.4)
    ledger.handle(TOKENIZER, vectors(number, 2, 0), 0.5)
    ledger.handle(TOKENIZER, Unknown([number], [first_attempt(2)]), 0.6)
    [(_, last)] = sent.take(Submit)
    work = msgspec.msgpack.decode(last.work, type=Work)
    assert (work.choices, work.prompt) == ([ChoiceState(2)], Tokens(BATCH_IDS[12:]))
    ledger.handle(TOKENIZER, Taken(number, first_attempt(3)), 0.7)
    ledger.handle(TOKENIZER, vectors(number, 3, 0, 2), 0.8)
    assert not ledger.open and not ledger.open_of[""]
    assert ear.heard == [6, *[([Vector(VALUES)], 0, True)] * 3]


def test_a_batch_that_is_given_up_counts_no_more() -> None:
    sent, ear = Sent(), Ear()
    ledger = ClientLedger(address(FRONTEND), FRONTEND, Members(), sent)
    for end in (
        lambda number: ledger.cancel(number),
        lambda number: ledger.handle(TOKENIZER, Rejected(number, ONE, 400, "", "no"), 0.3),
    ):
        number = ledger.submit(BATCH, ear, 0.0)
        ledger.handle(TOKENIZER, Accepted(number, ONE, BATCH_IDS, 0, [1, 2, 3]), 0.1)
        ledger.handle(TOKENIZER, vectors(number, 1, 2), 0.2)
        end(number)
        assert not ledger.open and not ledger.open_of[""]


def test_a_batch_survives_any_number_of_losses_while_its_prompts_get_done() -> None:
    sent, ear = Sent(), Ear()
    ledger = ClientLedger(address(FRONTEND), FRONTEND, Members(), sent)
    choices = [ChoiceState(number) for number in range(2 * MAX_STALLS)]
    prompts: list[Any] = [PromptText("a")] * len(choices)
    number = ledger.submit(
        msgspec.structs.replace(BATCH, prompt=Inputs(prompts), choices=choices), ear, 0.0
    )
    ids = array("i", [choice.choice for choice in choices]).tobytes()
    ledger.handle(TOKENIZER, Accepted(number, ONE, ids, 0, [1] * len(choices)), 0.1)
    for submission, choice in enumerate(choices, 1):
        attempt = first_attempt(submission)
        ledger.handle(TOKENIZER, Taken(number, attempt), 0.2)
        ledger.handle(TOKENIZER, vectors(number, submission, choice.choice), 0.2)
        ledger.handle(TOKENIZER, Unknown([number], [attempt]), 0.3)
    assert not ledger.open
    assert len(ear.heard) == 1 + len(choices)


def event_row(
    number: int, submission: int, index: int, events: list[Event], released: Released
) -> TextBatch:
    """A row of two tokens that bring these events."""
    return TextBatch(
        [number], [0], [first_attempt(submission)], [index], [2], bytes(8), [""], [released.text],
        [], events=[RowEvents(0, events, released)],
    )  # fmt: skip


def test_events_reach_the_sink_in_their_order(frontend: Any) -> None:
    ledger, _, ear, number = frontend
    events: list[Event] = [Reasoning("ab"), ToolCallOpened(0, "call-1", "f"), Text("c")]
    accept(ledger, number)
    ledger.handle(TOKENIZER, event_row(number, 1, 0, events, Released(1, 2, 1)), 0.1)
    assert ear.heard == [2, (events, 2, False)]


def test_a_submission_that_goes_on_elsewhere_says_what_went_out_on_each_channel(
    frontend: Any,
) -> None:
    ledger, sent, _, number = frontend
    events: list[Event] = [Reasoning("ab"), ToolCallOpened(0, "call-1", "f"), Text("c")]
    accept(ledger, number)
    ledger.handle(TOKENIZER, event_row(number, 1, 0, events, Released(1, 2, 1)), 0.1)
    row = text_row(number, 1, 2, "d")
    ledger.handle(TOKENIZER, msgspec.structs.replace(row, released=[2]), 0.2)
    sent.take()
    ledger.handle(TOKENIZER, Unknown([number], [ONE]), 0.3)
    [(_, submit)] = sent.take(Submit)
    [choice] = msgspec.msgpack.decode(submit.work, type=Work).choices
    assert choice.released == Released(2, 2, 1)


def test_a_client_hears_that_it_is_accepted_before_any_text(frontend: Any) -> None:
    ledger, sent, ear, number = frontend
    ledger.handle(TOKENIZER, Taken(number, ONE), 0.1)
    sent.take()
    ledger.handle(TOKENIZER, text_row(number, 1, 0, "ab"), 0.2)  # ``Accepted`` got lost
    assert ear.heard == []
    assert [type(message) for _, message in sent.take()] == [Cancel, Submit]
    accept(ledger, number, 2)
    ledger.handle(TOKENIZER, text_row(number, 2, 0, "ab", end=True), 0.4)
    assert ear.heard == [2, ("ab", 2, True)]


class Deaf(Ear):
    """A sink that fails at the events that are named."""

    def __init__(self, *fails_at: str) -> None:
        super().__init__()
        self.fails_at = fails_at

    def _fail(self, event: str) -> None:
        if event in self.fails_at:
            raise RuntimeError(f"fails at {event}")

    def on_accepted(self, prompt_tokens: int) -> None:
        self._fail("accepted")
        super().on_accepted(prompt_tokens)

    def on_row(self, *row: Any) -> None:
        self._fail("row")
        super().on_row(*row)

    def on_rejected(self, rejected: Rejected) -> None:
        super().on_rejected(rejected)
        self._fail("rejected")


@pytest.mark.parametrize("end", [False, True])
def test_a_sink_that_fails_on_a_row_ends_its_own_request_and_no_other(
    frontend: Any, caplog: pytest.LogCaptureFixture, end: bool
) -> None:
    ledger, sent, ear, number = frontend
    deaf = Deaf("row", "rejected")
    head = RequestHead(request_id="req-deaf")
    failing = ledger.submit(msgspec.structs.replace(WORK, head=head), deaf, 0.0)
    ids = [failing, number]
    for one in ids:
        accept(ledger, one)
    sent.take()
    ends = [End(0, EndReason.LENGTH)] if end else []
    tokens = array("i", [7, 8]).tobytes()
    batch = TextBatch(ids, [0, 0], [ONE, ONE], [0, 0], [1, 1], tokens, ["a", "b"], [1, 1], ends)
    ledger.handle(TOKENIZER, batch, 0.2)
    assert (deaf.heard, ear.heard) == ([2, 500], [2, ("b", 1, False)])
    assert sent.take() == [(address(TOKENIZER), Cancel([failing], [first_attempt(2) - 1], [-1]))]
    assert list(ledger.open) == [number]
    assert {getattr(line, "id", "") for line in caplog.records} == {"req-deaf"}


def test_a_sink_that_fails_when_its_request_is_accepted_gets_an_error(frontend: Any) -> None:
    ledger, sent, _, _ = frontend
    deaf = Deaf("accepted")
    failing = ledger.submit(WORK, deaf, 0.0)
    ledger.handle(TOKENIZER, Taken(failing, ONE), 0.1)
    sent.take()
    ledger.handle(TOKENIZER, Accepted(failing, ONE, PROMPT, 5), 0.2)
    assert deaf.heard == [500]
    assert [m.ids for _, m in sent.take(Cancel)] == [[failing]]
    assert failing not in ledger.open


def test_a_sink_that_fails_at_its_end_leaves_the_others_their_own(frontend: Any) -> None:
    ledger, _, ear, number = frontend
    deaf = [ledger.submit(WORK, Deaf("rejected"), 0.0) for _ in range(2)]
    ledger.handle(TOKENIZER, Taken(deaf[0], ONE), 0.1)
    ledger.handle(TOKENIZER, Rejected(deaf[0], ONE, 400, "invalid_request_error", "no"), 0.2)
    assert list(ledger.open) == [number, deaf[1]]
    late = Ear()
    ledger.submit(WORK, late, 0.0)
    ledger.end_all("going down")
    assert (ear.heard, late.heard) == ([503], [503])
    assert (ear.codes, late.codes) == (["server_shutting_down"], ["server_shutting_down"])
    assert ledger.open == {}


def test_what_no_message_can_carry_is_refused_and_not_sent(frontend: Any) -> None:
    ledger, sent, _, number = frontend
    sent.take()
    too_long, nearly = Ear(), Ear()
    ids = bytes(MAX_WORK_BYTES)
    ledger.submit(msgspec.structs.replace(WORK, prompt=Tokens(ids)), too_long, 0.0)
    assert (too_long.heard, sent.take(Submit)) == ([413], [])
    work = msgspec.structs.replace(WORK, prompt=Tokens(ids[:-1000]))
    growing = ledger.submit(work, nearly, 0.0)
    assert len(sent.take(Submit)) == 1
    ledger.handle(TOKENIZER, Accepted(growing, ONE, ids[:-1000], 5), 0.1)
    ledger.handle(TOKENIZER, text_row(growing, 1, 0, "a" * 300), 0.1)
    ledger.handle(TOKENIZER, Unknown([growing], [ONE]), 0.2)  # with its output it is too long
    assert nearly.heard[2:] == [413]
    assert [type(message) for _, message in sent.take()] == [Cancel]
    assert list(ledger.open) == [number]


def test_the_longest_prompt_of_a_body_and_all_parameters_fit_into_one_message() -> None:
    params = SamplingParams(
        stop=["\U0001f600" * MAX_STOP_LENGTH] * MAX_STOP_STRINGS,
        stop_token_ids=[MAX_TOKENS] * MAX_STOP_TOKENS,
        logit_bias={MAX_TOKENS - n: -99.9 for n in range(MAX_BIASES)},
        allowed_token_ids=[MAX_TOKENS] * MAX_ALLOWED_TOKENS,
        bad_words=["\U0001f600" * MAX_BAD_WORD_LENGTH] * MAX_BAD_WORDS,
        structured_outputs=Grammar("grammar", "\U0001f600" * MAX_SOURCE_BYTES),
    )
    choices = [ChoiceState(n) for n in range(128)]
    head = RequestHead(tenant="t" * 128, time_left=1.0)
    work = Work(head, requests.PromptText("x" * MAX_PROMPT_BYTES), params, choices)
    assert len(msgspec.msgpack.encode(work)) <= MAX_WORK_BYTES


def test_the_sink_hears_of_each_loss_of_a_tokenizer_or_an_engine(frontend: Any) -> None:
    ledger, _, ear, number = frontend
    accept(ledger, number)
    ledger.handle(TOKENIZER, Continued([number], [ONE + 1]), 0.1)
    ledger.handle(TOKENIZER, Unknown([number], [ONE]), 0.2)
    assert (ear.continuations, ledger.continuations) == (2, 1)
    ledger.handle(TOKENIZER, Continued([number], [ONE + 2]), 0.3)  # of what it has no more
    assert ear.continuations == 2
    again = first_attempt(2)
    ledger.handle(OTHER, Continued([number], [again]), 0.4)  # its ``Taken`` was lost
    ledger.handle(OTHER, Taken(number, again), 0.5)
    ledger.handle(TOKENIZER, Continued([number], [again]), 0.6)  # another has it
    ledger.handle(OTHER, Continued([999], [again]), 0.7)
    assert (ear.continuations, ledger.continuations) == (3, 1)


def test_what_waits_at_a_router_that_is_lost_counts_a_loss_when_the_next_one_has_it() -> None:
    members, sent, ear = Members(), Sent(), Ear()
    ledger = ClientLedger(address(FRONTEND), FRONTEND, members, sent)
    number = ledger.submit(WORK, ear, 0.0)
    ledger.tick(RESEND_SECONDS)
    assert (ear.continuations, len(sent.take(Submit))) == (0, 2)
    members.router_incarnation += 1
    for resend in (2, 3):
        ledger.tick(resend * RESEND_SECONDS)
        assert (ear.continuations, len(sent.take(Submit))) == (1, 1)
    ledger.handle(TOKENIZER, Taken(number, ONE), 3.1)
    members.router_incarnation += 1
    ledger.tick(4 * RESEND_SECONDS)
    assert (ear.continuations, ledger.continuations) == (1, 1), "it waits there no more"


def test_continuations_without_a_new_token_come_to_an_end(frontend: Any) -> None:
    ledger, _, ear, number = frontend

    def forget(submission: int) -> None:
        ledger.handle(TOKENIZER, Taken(number, first_attempt(submission)), 0.1)
        ledger.handle(TOKENIZER, Unknown([number], [first_attempt(submission)]), 0.2)

    accept(ledger, number)
    for submission in range(1, MAX_STALLS + 1):
        forget(submission)
    ledger.handle(TOKENIZER, text_row(number, MAX_STALLS + 1, 0, "a"), 0.3)  # counted anew
    for submission in range(MAX_STALLS + 1, 2 * MAX_STALLS + 1):
        forget(submission)
    assert ear.heard == [2, ("a", 1, False)]
    forget(2 * MAX_STALLS + 1)
    assert ear.heard == [2, ("a", 1, False), 500]
    assert ledger.open == {}


def test_what_nobody_takes_and_what_is_late_ends(frontend: Any) -> None:
    ledger, _, ear, _ = frontend
    late = Ear()
    head = RequestHead(time_left=2.0)
    ledger.submit(msgspec.structs.replace(WORK, head=head), late, 0.0)
    ledger.tick(2.1)
    assert late.heard == [504]
    ledger.tick(UNTAKEN_SECONDS)
    assert ear.heard == []
    ledger.tick(UNTAKEN_SECONDS + 0.1)
    assert ear.heard == [503]


def test_only_what_no_engine_has_accepted_can_wait_too_long(frontend: Any) -> None:
    ledger, sent, ear, number = frontend
    young, accepted = Ear(), Ear()
    ledger.submit(WORK, young, 5.0)
    running = ledger.submit(WORK, accepted, 0.0)
    ledger.handle(TOKENIZER, Taken(number, ONE), 0.1)
    ledger.handle(TOKENIZER, Accepted(running, ONE, PROMPT, 9), 0.1)
    sent.take()
    ledger.end_waiting("", lambda began: began < 5.0, "no engine came")
    assert (ear.heard, young.heard, accepted.heard) == ([503], [], [2])
    assert sent.take(Cancel) == [
        (address(TOKENIZER), Cancel([number], [first_attempt(2) - 1], [-1]))
    ]


def test_a_ledger_may_be_told_to_wait_longer_for_a_tokenizer() -> None:
    sent, ear = Sent(), Ear()
    ledger = ClientLedger(address(FRONTEND), FRONTEND, Members(), sent, UNTAKEN_SECONDS + 60.0)
    ledger.submit(WORK, ear, 0.0)
    ledger.tick(UNTAKEN_SECONDS + 60.0)
    assert ear.heard == []
    ledger.tick(UNTAKEN_SECONDS + 60.1)
    assert ear.heard == [503]


# --- tombstones


def test_looking_for_old_tombstones_costs_nothing_while_all_are_young() -> None:
    graves = Tombstones()
    for number in range(MAX_TOMBSTONES):
        graves.bury(number, ONE, 1.0)
    tracemalloc.start()
    graves.expire(2.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000, "a copy of all of them would be 800,000 bytes"
    assert len(graves) == MAX_TOMBSTONES
    graves.bury(0, ONE, 50.0)
    graves.expire(1.0 + TOMBSTONE_SECONDS)
    assert len(graves) == 1
    assert graves.covers(0, ONE)


def test_forgetting_a_tombstone_costs_as_much_however_many_there_are() -> None:
    def cost(count: int) -> float:
        graves = Tombstones()
        for number in range(count):
            graves.bury(number, ONE, 1.0)
        begun = time.process_time()
        graves.expire(1.0 + TOMBSTONE_SECONDS)
        assert not len(graves)
        return time.process_time() - begun

    assert sixteenfold(cost, 5000) < LINEAR


# --- the tokenizer


class Letters:
    """A stream in which a token is a letter and ``c`` a stop string."""

    def __init__(self) -> None:
        self.stop: str | None = None
        self.reasoning_tokens = 0

    def push(self, tokens: memoryview, last_is_stop: bool) -> Any:
        if -1 in tokens:
            raise ValueError("no such letter")
        text = "".join(chr(97 + token) for token in tokens)
        before, found, _ = text.partition("c")
        used = len(before) + 1 if found else len(text)
        return Delta(before, used, "c" if found else None)

    def finish(self, *, complete: bool = False) -> str:
        return ""

    def replay(self, tokens: memoryview) -> str:
        return "".join(chr(97 + token) for token in tokens)


SUBMIT = Submit(7, ONE, address(FRONTEND), msgspec.msgpack.encode(WORK))


@pytest.fixture
def tokenizer() -> tuple[TokenizerLedger, Sent]:
    sent = Sent()

    def begin(number: int, attempt: int, work: Work) -> None:
        tokens = TokenWork(work.head, PROMPT, b"", work.choices, [], 16)
        ledger.encoded(number, attempt, tokens, work.params, lambda choice: Letters(), 0.0)

    ledger = TokenizerLedger(address(TOKENIZER), Members(), sent, begin)
    return ledger, sent


def token_row(attempt: int, index: int, letters: str, end: bool = False) -> TokenBatch:
    tokens = array("i", [ord(letter) - 97 for letter in letters]).tobytes()
    ends = [End(0, EndReason.LENGTH)] if end else []
    return TokenBatch([7], [0], [attempt], [index], [len(letters)], tokens, ends)


def test_an_engine_hears_whether_one_had_taken_it_and_how_often_it_was_lost(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)

    def asked() -> tuple[int, bool, int]:
        [(_, message)] = sent.take(Enqueue)
        work = msgspec.msgpack.decode(message.work, type=TokenWork)
        return message.attempt, work.head.accepted, work.stalls

    assert asked() == (ONE, False, 0)
    ledger.handle(SCHEDULER, Accepted(7, ONE), 0.1)
    ledger.handle(SCHEDULER, Unknown([7], [ONE]), 0.2)
    assert asked() == (ONE + 1, True, 1)
    ledger.handle(SCHEDULER, Accepted(7, ONE + 1), 0.3)
    ledger.handle(SCHEDULER, Unknown([7], [ONE + 1]), 0.4)
    assert asked() == (ONE + 2, True, 2)
    ledger.handle(SCHEDULER, Accepted(7, ONE + 2), 0.5)
    ledger.handle(SCHEDULER, token_row(ONE + 2, 0, "a"), 0.6)
    ledger.handle(SCHEDULER, Unknown([7], [ONE + 2]), 0.7)
    assert asked() == (ONE + 3, True, 1)


@pytest.mark.parametrize("accepted", [False, True])
def test_only_what_an_engine_had_taken_counts_as_taken_when_it_comes_from_elsewhere(
    tokenizer: Any, accepted: bool
) -> None:
    """A tokenizer that goes down hands back what no engine has seen; it may be full there now."""
    ledger, sent = tokenizer
    work = msgspec.structs.replace(WORK, head=RequestHead(accepted=accepted))
    again = first_attempt(2)
    ledger.handle(FRONTEND, Submit(7, again, address(FRONTEND), msgspec.msgpack.encode(work)), 0.0)
    [(_, message)] = sent.take(Enqueue)
    assert msgspec.msgpack.decode(message.work, type=TokenWork).head.accepted is accepted
    attempt, now = again, 0.0
    while 7 in ledger.open and now < 2 * STARTED_SECONDS:
        full = Rejected(7, attempt, 503, "overloaded_error", "full", retry_elsewhere=True)
        ledger.handle(SCHEDULER, full, now)
        attempt, now = attempt + 1, now + LONGEST_PAUSE_SECONDS
    assert sent.take(Rejected)
    patience = STARTED_SECONDS if accepted else NEW_SECONDS
    assert now == pytest.approx(patience, abs=2 * LONGEST_PAUSE_SECONDS)


class Pooled(Letters):
    def pooled(self, values: bytes) -> Event:
        return Vector(values)


def pooled_rows(attempt: int, *choices: int) -> TokenBatch:
    rows = len(choices)
    return TokenBatch(
        [7] * rows, list(choices), [attempt] * rows, [0] * rows, [0] * rows, b"",
        [End(row, EndReason.LENGTH) for row in range(rows)],
        pooled=[RowPooled(row, VALUES) for row in range(rows)],
    )  # fmt: skip


def test_an_engine_gets_of_a_batch_what_is_not_done_yet() -> None:
    sent, members = Sent(), Members()

    def begin(number: int, attempt: int, work: Work) -> None:
        tokens = TokenWork(
            work.head, BATCH_IDS, b"", work.choices, [], 0, lengths=[1, 2, 3], seconds=[0, 1, 2]
        )
        ledger.encoded(number, attempt, tokens, work.params, lambda choice: Pooled(), 0.0)

    ledger = TokenizerLedger(address(TOKENIZER), members, sent, begin)
    ledger.handle(
        FRONTEND, Submit(7, ONE, address(FRONTEND), msgspec.msgpack.encode(BATCH), "", 3), 0.0
    )
    [(_, first)] = sent.take(Enqueue)
    assert (first.choices, first.tokens) == (3, 3)
    ledger.handle(SCHEDULER, Accepted(7, ONE), 0.1)
    [(_, accepted)] = sent.take(Accepted)
    assert (accepted.prompt, accepted.lengths) == (BATCH_IDS, [1, 2, 3])
    attempt = ONE
    for losses in range(2 * MAX_STALLS):  # with a vector in between it goes on
        ledger.handle(SCHEDULER, Unknown([7], [attempt]), 0.2)
        attempt += 1
        [(_, again)] = sent.take(Enqueue)
        work = msgspec.msgpack.decode(again.work, type=TokenWork)
        ledger.handle(SCHEDULER, Accepted(7, attempt), 0.3)
        sent.take()
        if losses == MAX_STALLS - 1:
            ledger.handle(SCHEDULER, pooled_rows(attempt, 1), 0.4)
            [(_, texts)] = sent.take(TextBatch)
            assert (texts.choices, texts.events[0].events) == ([1], [Vector(VALUES)])
        elif losses >= MAX_STALLS:
            assert [one.choice for one in work.choices] == [0, 2]
            assert work.prompt == BATCH_IDS[:4] + BATCH_IDS[12:]
            assert (work.lengths, work.seconds) == ([1, 3], [0, 2])
            assert (again.choices, again.tokens) == (2, 3)
    ledger.handle(SCHEDULER, pooled_rows(attempt, 0, 1, 2), 0.5)
    [(_, texts)] = sent.take(TextBatch)
    assert texts.choices == [0, 2]
    assert not ledger.open


def test_what_an_engine_leaves_of_the_limit_holds_wherever_the_request_goes_on(
    tokenizer: Any,
) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    [(_, first)] = sent.take(Enqueue)
    assert (first.choices, first.tokens) == (1, len(PROMPT) // 4 + 16)
    ledger.handle(SCHEDULER, Accepted(7, ONE, max_tokens=9), 0.1)
    [(to, accepted)] = sent.take(Accepted)
    assert (to, accepted.max_tokens) == (address(FRONTEND), 9)
    ledger.handle(SCHEDULER, Unknown([7], [ONE]), 0.2)
    [(_, again)] = sent.take(Enqueue)
    assert again.tokens == len(PROMPT) // 4 + 9
    assert msgspec.msgpack.decode(again.work, type=TokenWork).max_tokens == 9


def test_a_lost_acceptance_is_made_good_by_the_first_row(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    [(_, first)] = sent.take(Enqueue)
    assert msgspec.msgpack.decode(first.work, type=TokenWork).max_tokens > 9
    batch = token_row(first.attempt, 0, "a")
    start = RowStart(0, 0, 0.0, max_tokens=9)
    ledger.handle(SCHEDULER, msgspec.structs.replace(batch, starts=[start]), 0.1)
    [(_, accepted)] = sent.take(Accepted)
    assert accepted.max_tokens == 9
    ledger.peers_gone({SCHEDULER: Members().peers[SCHEDULER]}, 0.2)
    [(_, again)] = sent.take(Enqueue)
    work = msgspec.msgpack.decode(again.work, type=TokenWork)
    assert (work.max_tokens, work.head.accepted) == (9, True)


def test_what_is_lost_with_the_first_row_begins_as_if_no_engine_had_taken_it(
    tokenizer: Any,
) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    [(_, first)] = sent.take(Enqueue)
    ledger.handle(SCHEDULER, token_row(first.attempt, 1, "b"), 0.1)
    [(_, again)] = sent.take(Enqueue)
    assert not msgspec.msgpack.decode(again.work, type=TokenWork).head.accepted
    assert (ledger.open[7].accepted, ledger.open[7].attempt) == (False, first.attempt + 1)


def test_what_a_tokenizer_answers_alone_reaches_no_engine_and_is_asked_for_again_if_lost() -> None:
    sent, ear, up = Sent(), Ear(), Sent()
    counted = TokenIds(PROMPT)
    ledger = TokenizerLedger(
        address(TOKENIZER),
        Members(),
        sent,
        lambda number, attempt, work: ledger.answered(number, attempt, PROMPT, counted),
    )
    frontend = ClientLedger(address(FRONTEND), FRONTEND, Members(), up)
    number = frontend.submit(WORK, ear, 0.0)
    for lost in (Accepted, TextBatch, None):
        [(_, submit)] = up.take(Submit)
        ledger.handle(FRONTEND, submit, 0.0)
        assert not ledger.open
        for to, message in sent.take():
            assert to == address(FRONTEND)
            if type(message) is not lost:
                frontend.handle(TOKENIZER, message, 0.1)
        if lost is TextBatch:  # what it holds open there is compared
            unknown = Unknown([number], [first_attempt(2)])
            frontend.handle(TOKENIZER, unknown, 2.0)
    assert ear.heard == [2, ([counted], 0, True)]
    assert not frontend.open


def test_what_only_waited_at_lost_engines_is_not_blamed_for_it(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    for number in range(3 * MAX_STALLS):
        ledger.handle(SCHEDULER, Accepted(7, ONE + number), 0.1)
        ledger.handle(SCHEDULER, Unknown([7], [ONE + number], [0]), 0.2)
    last = ONE + 3 * MAX_STALLS
    sent.take()
    ledger.handle(SCHEDULER, Accepted(7, last), 0.3)
    ledger.handle(SCHEDULER, Unknown([7], [last], [MAX_STALLS]), 0.4)
    [(_, message)] = sent.take(Enqueue)
    assert msgspec.msgpack.decode(message.work, type=TokenWork).stalls == MAX_STALLS
    ledger.handle(SCHEDULER, Accepted(7, last + 1), 0.5)
    ledger.handle(SCHEDULER, Unknown([7], [last + 1], [1]), 0.6)
    [(_, rejected)] = sent.take(Rejected)
    assert "started 4 times without a new token (last: its engine lost its worker)" in (
        rejected.message
    )
    assert not ledger.open


def test_a_frontend_is_told_at_once_of_each_loss_of_an_engine(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    ledger.handle(SCHEDULER, Accepted(7, ONE), 0.1)
    assert sent.take(Continued) == []
    ledger.handle(SCHEDULER, Unknown([7], [ONE]), 0.2)
    assert sent.take(Continued) == [(address(FRONTEND), Continued([7], [ONE]))]
    ledger.handle(SCHEDULER, Accepted(7, ONE + 1), 0.3)
    ledger.peers_gone({SCHEDULER: Members().peers[SCHEDULER]}, 0.4)
    assert sent.take(Continued) == [(address(FRONTEND), Continued([7], [ONE + 1]))]
    ledger.handle(SCHEDULER, Accepted(7, ONE + 2), 0.5)
    ledger.handle(SCHEDULER, Unknown([7], [ONE + 2], [0], prefilled=True), 0.6)
    assert sent.take(Continued) == [], "a hand-over is none"
    ledger.handle(SCHEDULER, Accepted(7, ONE + 3), 0.7)
    ledger.handle(SCHEDULER, Continued([7, 8], [ONE + 3, ONE]), 0.8)  # it lost its worker
    ledger.handle(SCHEDULER, Continued([7], [ONE + 2]), 0.8)
    ledger.handle(OTHER, Continued([7], [ONE + 3]), 0.8)
    assert sent.take(Continued) == [(address(FRONTEND), Continued([7], [ONE + 3]))]
    assert ledger.continuations == 3 and list(ledger.open) == [7]


def test_what_waits_for_an_engine_at_a_router_that_is_lost_counts_a_loss(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    members = ledger._members
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    ledger.tick(RESEND_SECONDS)
    assert sent.take(Continued) == []
    members.router_incarnation += 1
    ledger.tick(2 * RESEND_SECONDS)
    ledger.tick(3 * RESEND_SECONDS)
    assert sent.take(Continued) == [(address(FRONTEND), Continued([7], [ONE]))]
    ledger.handle(SCHEDULER, Accepted(7, ONE), 3.1)
    members.router_incarnation += 1
    ledger.tick(4 * RESEND_SECONDS)
    assert sent.take(Continued) == [] and ledger.continuations == 1


def test_what_a_full_engine_has_given_back_waits_at_no_router(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    full = Rejected(7, ONE, 503, "overloaded_error", "full", retry_elsewhere=True)
    ledger.handle(SCHEDULER, full, 0.1)
    ledger._members.router_incarnation += 1
    sent.take()
    ledger.tick(RESEND_SECONDS)
    assert [type(message) for _, message in sent.take()] == [Enqueue, Holding]
    assert ledger.continuations == 0


def test_a_hand_over_is_no_loss_and_its_pause_is_told_once(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    pauses: list[float] = []
    ledger.on_taken_over = pauses.append
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    [(_, first)] = sent.take(Enqueue)
    ledger.handle(SCHEDULER, Accepted(7, ONE), 0.1)
    ledger.handle(SCHEDULER, token_row(ONE, 0, "ab"), 0.2)
    for _ in range(2):  # it may come twice
        ledger.handle(SCHEDULER, Unknown([7], [ONE], [0], prefilled=True), 0.25)
    [(_, again)] = sent.take(Enqueue)
    work = msgspec.msgpack.decode(again.work, type=TokenWork)
    assert (first.begun, again.begun, again.attempt) == (False, True, ONE + 1)
    assert (work.head.hand_overs, work.stalls) == (1, 0)
    assert ledger.continuations == 0
    sent.take()
    start = RowStart(0, 4, 0.2, "1", 16, 0.0)
    for at in (2, 3):
        row = msgspec.structs.replace(token_row(ONE + 1, at, "d"), starts=[start])
        ledger.handle(SCHEDULER, row, 0.5)
    assert pauses == [0.25]
    told = [message.starts for _, message in sent.take(TextBatch)]
    assert [[one.handed_over_s for one in starts] for starts in told] == [[0.25], []]


def test_a_request_has_so_many_attempts_as_its_number_has_room_for(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    for number in range(256):
        assert sent.take(Rejected) == []
        ledger.handle(SCHEDULER, Accepted(7, ONE + number), 0.1)
        ledger.handle(SCHEDULER, Unknown([7], [ONE + number], [0]), 0.2)
    [(_, rejected)] = sent.take(Rejected)
    assert "started 256 times (last: its engine lost its worker)" in rejected.message


def test_a_cancel_may_overtake_the_submission(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, Cancel([7], [ONE], [-1]), 0.0)
    ledger.handle(FRONTEND, SUBMIT, 0.1)
    assert sent.take() == []
    later = msgspec.structs.replace(SUBMIT, attempt=first_attempt(2))
    ledger.handle(FRONTEND, later, 0.2)
    assert [type(m) for _, m in sent.take()] == [Taken, Enqueue]
    ledger.tick(TOMBSTONE_SECONDS + 0.1)
    assert len(ledger._tombstones) == 0


def test_a_submission_that_comes_twice_is_taken_once(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    ledger.handle(FRONTEND, SUBMIT, 1.0)
    assert [type(m) for _, m in sent.take()] == [Taken, Enqueue, Taken]


def test_a_tokenizer_takes_exactly_the_next_index(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    ledger.handle(SCHEDULER, token_row(ONE, 0, "ab"), 0.1)
    [(to, batch)] = sent.take(TextBatch)
    assert (to, batch.texts) == (address(FRONTEND), ["ab"])
    ledger.handle(SCHEDULER, token_row(ONE, 0, "ab"), 0.2)  # known: dropped
    assert sent.take() == []
    ledger.handle(SCHEDULER, token_row(ONE, 3, "e"), 0.3)  # a gap: started again
    (_, cancel), _, (_, enqueue) = sent.take()
    assert cancel == Cancel([7], [ONE], [-1])
    assert enqueue.attempt == ONE + 1
    [choice] = msgspec.msgpack.decode(enqueue.work, type=TokenWork).choices
    assert (choice.output, choice.released) == (array("i", [0, 1]).tobytes(), Released(2))
    ledger.handle(SCHEDULER, token_row(ONE, 2, "d"), 0.4)  # an older attempt: told to stop
    assert sent.take() == [(address(SCHEDULER), Cancel([7], [ONE], [-1]))]
    ledger.handle(SCHEDULER, token_row(ONE + 1, 2, "de", end=True), 0.5)
    [(_, batch)] = sent.take(TextBatch)
    assert batch.texts == ["de"]
    assert ledger.open == {}


class Parsed(Letters):
    """Letters of which ``r`` begins reasoning, ``t`` text, and a digit a call whose arguments
    follow; what does not begin anything goes on with what was begun."""

    def __init__(self) -> None:
        super().__init__()
        self._channel = "t"

    def push(self, tokens: memoryview, last_is_stop: bool) -> Any:
        return Delta(self.replay(tokens), len(tokens), None)

    def replay(self, tokens: memoryview) -> Any:
        return [self._event(chr(97 + token)) for token in tokens]

    def _event(self, letter: str) -> Event:
        if letter in "rt" or letter.isdigit():
            self._channel = letter
        if letter.isdigit():
            return ToolCallOpened(int(letter), letter, letter)
        if self._channel.isdigit():
            return ToolArguments(int(self._channel), letter)
        return Reasoning(letter) if self._channel == "r" else Text(letter)


LETTERS = "abrcd0{}1{et2{gr}"


@pytest.mark.parametrize("released", range(len(LETTERS) + 1))
@pytest.mark.parametrize("known", range(0, len(LETTERS) + 1, 4))
def test_a_new_tokenizer_sends_exactly_the_events_behind_what_went_out(
    known: int, released: int
) -> None:
    """The client has the first ``released`` events; ``known`` tokens had come by then."""
    if released > known:
        return
    whole = Parsed().replay(memoryview(array("i", [ord(letter) - 97 for letter in LETTERS])))
    counts = Released()
    counts.add(whole[:released])
    output = array("i", [ord(letter) - 97 for letter in LETTERS[:known]]).tobytes()
    sent = Sent()

    def begin(number: int, attempt: int, work: Work) -> None:
        tokens = TokenWork(work.head, PROMPT, b"", work.choices, [], 16)
        ledger.encoded(number, attempt, tokens, work.params, lambda choice: Parsed(), 0.0)

    ledger = TokenizerLedger(address(TOKENIZER), Members(), sent, begin)
    work = msgspec.structs.replace(WORK, choices=[ChoiceState(0, output, counts)])
    submit = Submit(7, ONE, address(FRONTEND), msgspec.msgpack.encode(work))
    ledger.handle(FRONTEND, submit, 0.0)
    ledger.handle(SCHEDULER, Accepted(7, ONE), 0.1)
    sent.take()
    ledger.handle(SCHEDULER, token_row(ONE, known, LETTERS[known:], end=True), 0.2)
    [(_, batch)] = sent.take(TextBatch)
    [row] = batch.events
    assert row.events == whole[released:]
    counts.add(whole[released:])
    assert row.released == counts


def test_an_event_that_was_cut_in_the_middle_goes_on_there() -> None:
    content: list[Event] = [Reasoning("abc"), Text("de"), ToolArguments(0, "{}"), Reasoning("f")]
    left = unreleased(content, Released(text=1, reasoning=2, arguments=1))
    assert left == [Reasoning("c"), Text("e"), ToolArguments(0, "}"), Reasoning("f")]


def test_a_continuation_that_no_message_can_carry_ends_with_an_error(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    [(_, enqueue)] = sent.take(Enqueue)
    monkeypatch.setattr(ownership_tokenizer, "MAX_WORK_BYTES", len(enqueue.work) + 4)
    ledger.handle(SCHEDULER, Accepted(7, ONE), 0.1)
    ledger.handle(SCHEDULER, token_row(ONE, 0, "ab"), 0.2)
    sent.take()
    ledger.handle(SCHEDULER, Unknown([7], [ONE]), 0.3)
    ((_, cancel), _, (to, rejected)) = sent.take()
    assert isinstance(cancel, Cancel)
    assert (to, rejected.status) == (address(FRONTEND), 413)
    assert "fewer choices" in rejected.message
    ledger.tick(100.0)
    assert sent.take(Enqueue) == [] and ledger.open == {}


def test_the_first_end_in_token_order_wins(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    sent.take()
    ledger.handle(SCHEDULER, token_row(ONE, 0, "acb", end=True), 0.1)
    [(_, batch)] = sent.take(TextBatch)
    assert (batch.texts, batch.counts, batch.ends) == (["a"], [2], [End(0, EndReason.STOP, "c")])


def test_a_fault_in_the_text_of_one_request_ends_that_request_alone(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ledger, sent = tokenizer
    trace = "4BF92f3577b34da6a3ce929d0e0e4736"
    head = RequestHead(request_id="req-7", trace=f"00-{trace}-00f067aa0ba902b7-01")
    named = msgspec.structs.replace(WORK, head=head)
    submit = msgspec.structs.replace(SUBMIT, work=msgspec.msgpack.encode(named))
    ledger.handle(FRONTEND, submit, 0.0)
    ledger.handle(FRONTEND, msgspec.structs.replace(SUBMIT, id=8), 0.0)
    both = TokenBatch([7, 8], [0, 0], [ONE, ONE], [0, 0], [1, 1], b"\xff" * 4 + bytes(4), [])
    sent.take()
    ledger.handle(SCHEDULER, both, 0.1)
    messages = [message for _, message in sent.take()]
    assert [m.id for m in messages if isinstance(m, Rejected) and m.status == 500] == [7]
    assert [m.texts for m in messages if isinstance(m, TextBatch)] == [["a"]]
    assert Cancel([7], [ONE], [-1]) in messages
    assert list(ledger.open) == [8]
    (line,) = caplog.records
    assert (getattr(line, "id", ""), getattr(line, "trace", "")) == ("req-7", trace.lower())


@pytest.mark.parametrize(("named", "stop"), [([], None), ([9], None), ([9, 7], 7)])
def test_an_end_names_a_token_to_the_client_only_if_the_client_had_named_it(
    tokenizer: Any, named: list[int], stop: int | None
) -> None:
    ledger, sent = tokenizer
    params = msgspec.structs.replace(WORK.params, stop_token_ids=named)
    work = msgspec.msgpack.encode(msgspec.structs.replace(WORK, params=params))
    ledger.handle(FRONTEND, msgspec.structs.replace(SUBMIT, work=work), 0.0)
    sent.take()
    row = token_row(ONE, 0, "ab")
    ends = [End(0, EndReason.STOP, 7)]
    ledger.handle(SCHEDULER, msgspec.structs.replace(row, ends=ends), 0.1)
    [(_, batch)] = sent.take(TextBatch)
    assert batch.ends == [End(0, EndReason.STOP, stop)]


def test_a_stop_string_ends_the_work_of_the_engine(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    sent.take()
    ledger.handle(SCHEDULER, token_row(ONE, 0, "c"), 0.1)
    assert (address(SCHEDULER), Cancel([7], [ONE], [0])) in sent.take()
    assert ledger.open == {}


def full(attempt: int, retry_after: float | None = 2.0) -> Rejected:
    return Rejected(
        7, attempt, 503, "overloaded_error", "full", retry_after=retry_after, retry_elsewhere=True
    )


def refuse_until_it_gives_up(
    ledger: TokenizerLedger, sent: Sent, attempt: int, began: float
) -> tuple[list[float], Rejected]:
    """The only engine is full: the pauses between the tries, and the last word."""
    pauses: list[float] = []
    now = last = began
    ledger.handle(SCHEDULER, full(attempt), now)
    while now < began + 200:
        if answers := [m for _, m in sent.take() if isinstance(m, Enqueue | Rejected)]:
            [message] = answers
            if isinstance(message, Rejected):
                return pauses, message
            attempt += 1
            assert message.attempt == attempt
            pauses.append(now - last)
            last = now
            ledger.handle(SCHEDULER, full(attempt), now)
        else:
            now += 0.125
            ledger.tick(now)
    raise AssertionError("it asks for ever")


def test_a_request_that_no_engine_has_room_for_gets_503_after_pauses_that_grow(
    tokenizer: Any,
) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    sent.take()
    pauses, answer = refuse_until_it_gives_up(ledger, sent, ONE, 0.0)
    assert pauses == [0.25, 0.5, 1.0]
    assert sum(pauses) < NEW_SECONDS
    assert (answer.status, answer.retry_after, answer.retry_elsewhere) == (503, 2.0, False)
    assert answer.message == "full (refused 4 times within 1.8 s)"
    assert ledger.open == {}


def test_a_refusal_that_names_no_time_still_says_when_to_come_back(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    ledger.handle(SCHEDULER, full(ONE, None), 0.0)
    sent.take()
    ledger.handle(SCHEDULER, full(ONE + 1, None), NEW_SECONDS)
    [(to, answer)] = sent.take()
    assert (to, answer.status, answer.retry_after) == (address(FRONTEND), 503, 1.0)


def test_an_answer_that_has_begun_waits_longer_for_room_and_asks_rarely(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    ledger.handle(SCHEDULER, token_row(ONE, 0, "ab"), 0.1)
    ledger.handle(SCHEDULER, token_row(ONE, 3, "e"), 0.2)  # a gap: started again
    sent.take()
    pauses, answer = refuse_until_it_gives_up(ledger, sent, ONE + 1, 1.0)
    assert pauses[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]
    assert STARTED_SECONDS - 5 < sum(pauses) <= STARTED_SECONDS
    assert answer.status == 503


def test_refusals_are_forgotten_once_an_engine_takes_the_request(tokenizer: Any) -> None:
    ledger, sent = tokenizer
    ledger.handle(FRONTEND, SUBMIT, 0.0)
    ledger.handle(SCHEDULER, full(ONE), 0.0)
    ledger.tick(0.5)
    ledger.handle(SCHEDULER, Accepted(7, ONE + 1), 0.6)
    ledger.handle(SCHEDULER, token_row(ONE + 1, 1, "b"), 90.0)  # a gap: started again
    sent.take()
    pauses, _ = refuse_until_it_gives_up(ledger, sent, ONE + 2, 100.0)
    assert pauses[0] == 0.25


# --- the scheduler


class Core:
    """Holds requests and does nothing with them."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, str]] = {}
        self.added: list[int] = []
        self.failed: dict[int, int] = {}

    def add(self, request_id: int, attempt: int, owner: str, work: TokenWork, now: float) -> None:
        self.held[request_id] = (attempt, owner)
        self.added.append(attempt)

    def cancel(self, request_id: int, attempt: int, owner: str, choice: int = -1) -> bool:
        held = self.held.get(request_id)
        if held is None or held[0] > attempt or held[1] != owner:
            return False
        del self.held[request_id]
        return True

    def holder(self, request_id: int) -> tuple[int, str] | None:
        return self.held.get(request_id)

    def max_output(self, request_id: int) -> int:
        return 0

    def holding(self, owner: str) -> list[tuple[int, int]]:
        return [(number, attempt) for number, (attempt, o) in self.held.items() if o == owner]

    def failures(self, request_id: int) -> int:
        return self.failed.get(request_id, 0)

    def owners(self) -> list[str]:
        return sorted({owner for _, owner in self.held.values()})


TOKEN_WORK = TokenWork(RequestHead(), PROMPT, b"", [ChoiceState(0)], [], 16)


def enqueue(attempt: int, owner: str = address(TOKENIZER)) -> Enqueue:
    return Enqueue(7, attempt, owner, msgspec.msgpack.encode(TOKEN_WORK))


@pytest.fixture
def scheduler() -> tuple[SchedulerLedger, Sent, Core]:
    sent, core = Sent(), Core()
    return SchedulerLedger(Members(), sent, core), sent, core


def test_a_cancel_may_overtake_the_enqueue(scheduler: Any) -> None:
    ledger, sent, core = scheduler
    ledger.handle(TOKENIZER, Cancel([7], [ONE], [-1]), 0.0)
    ledger.handle(SCHEDULER, enqueue(ONE), 0.1)
    assert core.added == []
    assert sent.take() == []
    ledger.handle(SCHEDULER, enqueue(ONE + 1), 0.2)
    assert core.added == [ONE + 1]


def test_a_known_attempt_is_accepted_again_and_not_added_again(scheduler: Any) -> None:
    ledger, sent, core = scheduler
    for attempt in (ONE + 1, ONE + 1, ONE):
        ledger.handle(SCHEDULER, enqueue(attempt), 0.0)
    assert core.added == [ONE + 1]
    assert sent.take() == [(address(TOKENIZER), Accepted(7, ONE + 1))] * 2


def test_what_its_owner_does_not_name_is_dropped_and_what_is_unknown_is_told(
    scheduler: Any,
) -> None:
    ledger, sent, core = scheduler
    ledger.handle(SCHEDULER, enqueue(ONE), 0.0)
    sent.take()
    ledger.handle(TOKENIZER, Holding(address(OTHER), [], []), GRACE_SECONDS)
    ledger.handle(TOKENIZER, Holding(address(TOKENIZER), [], []), GRACE_SECONDS - 0.1)
    assert core.held  # another's; too young
    ledger.handle(TOKENIZER, Holding(address(TOKENIZER), [8], [ONE]), GRACE_SECONDS)
    assert core.held == {}
    assert sent.take() == [(address(TOKENIZER), Unknown([8], [ONE]))]


def test_a_lost_owners_work_is_dropped_and_so_is_a_strangers(scheduler: Any) -> None:
    ledger, _, core = scheduler
    ledger.handle(SCHEDULER, enqueue(ONE), 0.0)
    ledger.peers_gone({TOKENIZER: Members().peers[TOKENIZER]})
    assert core.held == {}
    ledger.handle(SCHEDULER, enqueue(ONE + 1, "ipc:///nobody"), 1.0)
    ledger.tick(1.0 + GRACE_SECONDS)
    assert core.held
    ledger.tick(1.1 + GRACE_SECONDS)
    assert core.held == {}


def test_an_engine_without_its_worker_gives_every_request_back_to_its_owner(scheduler: Any) -> None:
    ledger, sent, core = scheduler
    ledger.handle(SCHEDULER, enqueue(ONE), 0.0)
    ledger.handle(SCHEDULER, msgspec.structs.replace(enqueue(ONE), id=8), 0.0)
    sent.take()
    core.failed[7] = 2
    ledger.hand_over()
    ledger.hand_over()
    assert core.held == {}
    assert sent.take() == [(address(TOKENIZER), Unknown([7, 8], [ONE, ONE], [2, 0]))]
    ledger.handle(SCHEDULER, enqueue(ONE + 1), 0.1)  # the only one again
    assert core.added == [ONE, ONE, ONE + 1]

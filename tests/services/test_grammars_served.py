"""A tokenizer's process vets grammars, and goes on with other requests meanwhile."""

from __future__ import annotations

import msgspec
import psutil
from support.service_member import Member, small_system

from penstock.protocol.grammar.request import Grammar
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.membership import Capacity
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Enqueue,
    PromptText,
    Rejected,
    RequestHead,
    Submit,
    Taken,
    TokenWork,
    Work,
    first_attempt,
)
from penstock.protocol.wire.messages.steps import SlotSampling


def grammar_of(work: TokenWork) -> Grammar | None:
    sampling = msgspec.msgpack.decode(work.sampling, type=SlotSampling)
    return None if sampling.adjustments is None else sampling.adjustments.grammar


def submit(frontend: Member, number: int, grammar: Grammar | None) -> None:
    params = SamplingParams(seed=1, max_tokens=5, structured_outputs=grammar)
    work = Work(RequestHead(), PromptText("hello"), params, [ChoiceState(0)])
    own = frontend.mailbox.address
    asked = Submit(number, first_attempt(1), own, msgspec.msgpack.encode(work))
    frontend.send(frontend.peer("tokenizer").address, asked)
    frontend.next(Taken)


def enqueued(scheduler: Member, number: int) -> TokenWork:
    """What comes for a request; nobody answers here, so it comes again and again."""
    while (asked := scheduler.next(Enqueue)).id != number:
        pass
    return msgspec.msgpack.decode(asked.work, type=TokenWork)


def test_a_good_grammar_goes_to_an_engine_and_a_bad_one_back_to_its_client() -> None:
    with small_system() as (start, join):
        process = start("tokenizer")
        scheduler = join("scheduler", Capacity(max_model_len=100, vocab_size=512))
        frontend = join("frontend")
        good = Grammar("regex", "[0-9]{3}", param="response_format")
        submit(frontend, 1, good)
        assert grammar_of(enqueued(scheduler, 1)) == good
        (helper,) = psutil.Process(process.pid).children()
        submit(frontend, 2, Grammar("regex", "("))
        rejected = frontend.next(Rejected)
        assert (rejected.id, rejected.status) == (2, 400)
        assert rejected.param == "structured_outputs"
        assert "unclosed group" in rejected.message
        helper.suspend()
        submit(frontend, 3, Grammar("regex", "never compiled"))
        submit(frontend, 4, None)
        assert grammar_of(enqueued(scheduler, 4)) is None
        assert frontend.silence(Rejected, 0.1), "the third one still waits"
        rejected = frontend.next(Rejected)
        assert (rejected.id, rejected.status) == (3, 503)
        assert rejected.retry_after == 1.0
        process.kill()
        process.wait()
        psutil.wait_procs([helper], timeout=30)
        assert not helper.is_running()

"""A prompt whose rendering or encoding never ends costs its client an error, and nobody else."""

from __future__ import annotations

import threading
import time
from array import array
from concurrent.futures import CancelledError
from pathlib import Path

import msgspec
import pytest
import stuck_tokenizer
from service_member import small_system

from penstock.protocol.messages.requests import (
    ChoiceState,
    Prompt,
    Rejected,
    Submit,
    Taken,
    Tokens,
    Work,
    first_attempt,
)
from penstock.protocol.sampling import SamplingParams
from penstock.services.tokenizer.encode_threads import EncodeThreads
from penstock.services.tokenizer.service import LOST_THREAD


def submission(number: int, prompt: Prompt, reply_to: str) -> Submit:
    work = Work(prompt, SamplingParams(seed=1), [ChoiceState(0)], "", None, 0.0)
    return Submit(number, first_attempt(1), reply_to, msgspec.msgpack.encode(work))


def test_a_tokenizer_refuses_a_stuck_prompt_and_ends_to_get_its_threads_back() -> None:
    with small_system() as (start, join):
        process = start("tokenizer", script=Path(stuck_tokenizer.__file__))
        frontend = join("frontend")
        address, own = frontend.peer("tokenizer").address, frontend.mailbox.address
        stuck = Tokens(stuck_tokenizer.STUCK)
        began = time.monotonic()
        for number in (1, 2, 3):  # two threads: the third one waits
            frontend.send(address, submission(number, stuck, own))
            frontend.next(Taken)
        answers = {}
        for _ in range(3):
            rejected = frontend.next(Rejected, 5.0)
            answers[rejected.id] = rejected
        assert [answers[number].status for number in (1, 2, 3)] == [400, 400, 503]
        assert "within 0.5 s" in answers[1].message
        assert answers[3].retry_after == 1.0
        assert time.monotonic() - began < 2.0
        _, log = process.communicate(timeout=10.0)
        assert process.returncode == LOST_THREAD
        assert "cannot be stopped" in log


def test_a_tokenizer_lives_on_when_its_prompts_come_back() -> None:
    with small_system() as (start, join):
        process = start("tokenizer", script=Path(stuck_tokenizer.__file__))
        frontend = join("frontend")
        address, own = frontend.peer("tokenizer").address, frontend.mailbox.address
        for number in (1, 2, 3):
            prompt = Tokens(array("i", [5, 6]).tobytes())
            frontend.send(address, submission(number, prompt, own))
            frontend.next(Taken)
            frontend.wait(1.0)
        assert process.poll() is None


def test_encode_threads_say_how_long_the_oldest_job_runs_and_forget_it_at_its_end() -> None:
    threads = EncodeThreads(2)
    assert threads.oldest(time.monotonic()) == 0.0
    go, running = threading.Event(), threading.Event()

    def job(answer: int) -> int:
        running.set()
        go.wait(10)
        return answer

    future = threads.submit(job, 7)
    running.wait(10)
    assert threads.oldest(time.monotonic() + 100.0) > 99.0
    go.set()
    assert future.result(10) == 7
    assert threads.oldest(time.monotonic()) == 0.0


def test_encode_threads_pass_errors_on_and_leave_out_what_was_cancelled() -> None:
    threads = EncodeThreads(1)
    go, played = threading.Event(), []
    first = threads.submit(go.wait, 10)
    second = threads.submit(played.append, 1)
    third = threads.submit(int, "no number")
    assert second.cancel()
    go.set()
    assert first.result(10)
    with pytest.raises(ValueError, match="no number"):
        third.result(10)
    with pytest.raises(CancelledError):
        second.result(10)
    assert played == []

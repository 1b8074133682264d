"""A prompt whose rendering or encoding never ends costs its client an error, and nobody else."""

from __future__ import annotations

import threading
import time
from array import array
from concurrent.futures import CancelledError
from pathlib import Path

import msgspec
import pytest
from support import stuck_tokenizer
from support.service_member import small_system

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Prompt,
    Rejected,
    RequestHead,
    Submit,
    Taken,
    Tokens,
    Work,
    first_attempt,
)
from penstock.services.tokenizer.encode_room import EncodeRoom
from penstock.services.tokenizer.encode_threads import EncodeThreads
from penstock.services.tokenizer.service import LOST_THREAD


def submission(number: int, prompt: Prompt, reply_to: str, tenant: str = "") -> Submit:
    work = Work(RequestHead(tenant=tenant), prompt, SamplingParams(seed=1), [ChoiceState(0)])
    return Submit(number, first_attempt(1), reply_to, msgspec.msgpack.encode(work))


def test_a_tokenizer_refuses_a_stuck_prompt_and_ends_to_get_its_threads_back() -> None:
    with small_system() as (start, join):
        process = start("tokenizer", script=Path(stuck_tokenizer.__file__))
        frontend = join("frontend")
        address, own = frontend.peer("tokenizer").address, frontend.mailbox.address
        stuck = Tokens(stuck_tokenizer.STUCK)
        for number in (1, 2, 3):  # two threads for one tenant: the third one waits
            frontend.send(address, submission(number, stuck, own))
            frontend.next(Taken)
        answers = {}
        for _ in range(3):
            rejected = frontend.next(Rejected)
            answers[rejected.id] = rejected
        assert [answers[number].status for number in (1, 2, 3)] == [400, 400, 503]
        assert "within 0.5 s" in answers[1].message
        assert answers[3].retry_after == 1.0
        _, log = process.communicate(timeout=60.0)
        assert process.returncode == LOST_THREAD
        assert "cannot be stopped" in log


def test_one_tenants_slow_prompts_leave_a_thread_and_room_for_others() -> None:
    with small_system() as (start, join):
        start("tokenizer", script=Path(stuck_tokenizer.__file__))
        frontend = join("frontend")
        address, own = frontend.peer("tokenizer").address, frontend.mailbox.address
        stuck, outside = Tokens(stuck_tokenizer.STUCK), Tokens(array("i", [10**6]).tobytes())
        long = Tokens(array("i", [5] * 501).tobytes())
        for number in range(1, 7):
            frontend.send(address, submission(number, stuck, own, "slow"))
        frontend.send(address, submission(7, stuck, own, "slow"))
        frontend.send(address, submission(8, outside, own, "other"))
        frontend.send(address, submission(9, long, own, "long"))
        answers = [frontend.next(Rejected) for _ in range(3)]
        by_id = {rejected.id: rejected for rejected in answers}
        assert sorted(by_id) == [7, 8, 9]
        assert (by_id[7].status, by_id[7].kind) == (429, "rate_limit_error")
        assert "at most 6 of 2000 are taken" in by_id[7].message
        assert by_id[7].retry_after == 1.0
        assert by_id[8].status == 400 and "outside the vocabulary" in by_id[8].message
        assert by_id[9].status == 429 and "0 requests of 0 bytes" in by_id[9].message


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
        go.wait(60)
        return answer

    future = threads.submit("", job, 7)
    running.wait(60)
    assert threads.oldest(time.monotonic() + 100.0) > 99.0
    go.set()
    assert future.result(60) == 7
    assert threads.oldest(time.monotonic()) == 0.0


def test_no_tenant_holds_every_encode_thread() -> None:
    threads = EncodeThreads(3, most=2)
    go, order = threading.Event(), []
    slow = [threads.submit("slow", go.wait, 30) for _ in range(6)]
    for tenant in ("a", "b", "a"):
        threads.submit(tenant, order.append, tenant).result(30)
    assert order == ["a", "b", "a"]
    assert not any(future.done() for future in slow)
    assert sum(future.running() for future in slow) == 2
    go.set()
    assert all(future.result(30) for future in slow)
    assert [threads.submit("slow", int, n).result(30) for n in range(4)] == [0, 1, 2, 3]


def test_tenants_that_wait_are_served_one_job_each_in_turn() -> None:
    threads = EncodeThreads(1)
    go, order = threading.Event(), []
    threads.submit("first", go.wait, 30)
    for tenant, count in (("many", 4), ("few", 2)):
        for _ in range(count):
            threads.submit(tenant, order.append, tenant)
    last = threads.submit("one", order.append, "one")
    go.set()
    last.result(30)
    threads.submit("end", int).result(30)
    threads.submit("many", int).result(30)
    assert order == ["many", "few", "one", "many", "few", "many", "many"]


def test_room_for_encoding_is_bounded_in_requests_and_bytes_of_all_and_of_each() -> None:
    room = EncodeRoom(4, 1000)
    assert room.lacks("a", 501) is not None
    room.enter((1, 0), "a", 400)
    assert room.lacks("a", 100) is None
    status, message = room.lacks("a", 101) or (0, "")
    assert status == 429 and "1 requests of 400 bytes" in message and "500" in message
    room.enter((2, 0), "a", 0)
    assert room.lacks("a", 0) is not None
    assert room.lacks("b", 500) is None
    room.enter((3, 0), "b", 500)
    status, message = room.lacks("c", 101) or (0, "")
    assert status == 503 and "900 bytes" in message
    room.enter((4, 0), "c", 100)
    assert (room.lacks("d", 0) or (0,))[0] == 503
    for number in (1, 2, 3, 4, 4):
        room.leave((number, 0))
    assert room.lacks("a", 500) is None


def test_each_prompt_of_a_batch_takes_a_place_in_the_room_for_encoding() -> None:
    room = EncodeRoom(10, 1000)
    assert room.lacks("a", 100, prompts=6) is not None
    assert room.lacks("a", 100, prompts=5) is None
    room.enter((1, 0), "a", 100, prompts=5)
    status, message = room.lacks("a", 0) or (0, "")
    assert status == 429 and "5 requests of 100 bytes" in message
    room.enter((2, 0), "b", 0, prompts=4)
    assert (room.lacks("c", 0, prompts=2) or (0,))[0] == 503
    room.leave((1, 0))
    assert room.lacks("c", 0, prompts=5) is None


def test_encode_threads_pass_errors_on_and_leave_out_what_was_cancelled() -> None:
    threads = EncodeThreads(1)
    go, played = threading.Event(), []
    first = threads.submit("", go.wait, 10)
    second = threads.submit("", played.append, 1)
    third = threads.submit("", int, "no number")
    assert second.cancel()
    go.set()
    assert first.result(10)
    with pytest.raises(ValueError, match="no number"):
        third.result(10)
    with pytest.raises(CancelledError):
        second.result(10)
    assert played == []

"""Faults on order: what a specification says is what happens, at that point and no other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.protocol.mailbox_process import short_folder

from penstock.protocol.process import faults as faults_module
from penstock.protocol.process.faults import BadFault, FaultError, Faults
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.requests import Accepted, Taken


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "worker",
        "worker:raise",
        "worker:@step",
        "worker:explode@step",
        ":raise@step",
        "worker:raise@",
        "worker:raise@step=",
        "worker:raise@step=x",
        "worker:raise@step=-1",
        "worker:sleep=@step",
        "worker:sleep=1.2.3@step",
        "worker:sleep=.@step",
        "worker:sleep=-1@step",
        "worker:sleep=1e3@step",
        "worker:raise@step=1 ",
        "worker:raise@step=1\n",
    ],
)
def test_a_specification_that_cannot_be_read_is_refused_with_its_form(spec: str) -> None:
    with pytest.raises(BadFault, match="expected SERVICE:ACTION") as caught:
        Faults([spec], "worker")
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("worker:raise@stpe", "neither step nor token nor a message's name"),
        ("worker:drop@taken", "neither step nor token nor a message's name"),
        ("worker:drop@step", "only a message can drop"),
        ("worker:drop@token=5", "only a message can drop"),
        ("worker:kill@token", "only a worker meets a token, and it needs =N"),
        ("scheduler:kill@token=5", "only a worker meets a token, and it needs =N"),
        ("worker:delay=1@step", "only a message can delay"),
        ("worker:sleep@step", "sleep needs =SECONDS"),
        ("worker:delay@Taken", "delay needs =SECONDS"),
        ("worker:kill=1@step", "kill takes no =SECONDS"),
        ("worker:raise@step=0", "N counts from 1"),
    ],
)
def test_a_fault_that_could_never_happen_is_refused_with_the_reason(spec: str, reason: str) -> None:
    for service in ("worker", "router"):
        with pytest.raises(BadFault, match=reason):
            Faults([spec], service)


def test_a_token_is_met_in_each_sequence_that_has_it() -> None:
    faults = Faults(["worker:raise@token=256"], "worker")
    faults.joined(array("i", [1, 2, 257]).tobytes())
    faults.joined(b"")
    faults.at("token")
    for _ in range(2):
        with pytest.raises(FaultError, match="token"):
            faults.joined(array("i", [1, 256]).tobytes())


def test_without_orders_nothing_happens() -> None:
    assert not Faults([], "worker")
    assert not Faults(["router:raise@step"], "worker"), "meant for another service"
    faults = Faults(["router:raise@step"], "worker")
    faults.at("step")
    assert faults.received(1, Taken(1, 1))
    assert list(faults.late()) == []


def test_a_numbered_fault_happens_once_and_a_plain_one_every_time() -> None:
    faults = Faults(["worker:raise@step=3"], "worker")
    assert faults
    raised = []
    for number in range(1, 7):
        try:
            faults.at("step")
        except FaultError:
            raised.append(number)
    assert raised == [3]
    always = Faults(["worker:oom@step"], "worker")
    for _ in range(3):
        with pytest.raises(MemoryError, match="on order at step"):
            always.at("step")


def test_points_are_counted_apart() -> None:
    faults = Faults(["worker:raise@step=2", "worker:raise@Taken=2"], "worker")
    faults.at("step")
    assert faults.received(1, Taken(1, 1))
    assert faults.received(1, Accepted(1, 1))
    with pytest.raises(FaultError, match="Taken"):
        faults.received(1, Taken(2, 1))
    with pytest.raises(FaultError, match="step"):
        faults.at("step")


def test_messages_are_dropped_as_counted() -> None:
    faults = Faults(["worker:drop@Taken=2", "worker:drop@Accepted"], "worker")
    assert [faults.received(1, Taken(n, 1)) for n in range(4)] == [True, False, True, True]
    assert [faults.received(1, Accepted(n, 1)) for n in range(3)] == [False] * 3
    assert list(faults.late()) == []


def test_a_delayed_message_comes_later_once_and_with_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(faults_module, "time", SimpleNamespace(monotonic=lambda: now))
    faults = Faults(["worker:delay=0.05@Taken=1"], "worker")
    assert not faults.received(7, Taken(1, 1))
    assert faults.received(7, Taken(2, 1))
    now += 0.04
    assert list(faults.late()) == []
    now += 0.02
    assert list(faults.late()) == [(7, Taken(1, 1))]
    assert list(faults.late()) == []


def test_two_faults_may_meet_at_one_point() -> None:
    faults = Faults(["worker:sleep=0.05@step=1", "worker:raise@step=1"], "worker")
    began = time.monotonic()
    with pytest.raises(FaultError):
        faults.at("step")
    assert time.monotonic() - began >= 0.05


def test_a_mailbox_plays_the_faults_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(faults_module, "time", SimpleNamespace(monotonic=lambda: now))
    with short_folder() as folder, contextlib.closing(Mailbox(f"ipc://{folder}")) as own:
        own.faults = Faults(["worker:drop@Taken=1", "worker:delay=0.1@Taken=2"], "worker")
        for number in range(1, 4):
            own.send(own.address, Taken(number, 1))
        got: list[Message] = []
        deadline = time.monotonic() + 30
        while not got and time.monotonic() < deadline:
            own.flush()
            own.wait(0.01)
            got += [message for _, message in own.drain()]
        assert got == [Taken(3, 1)]
        assert list(own.drain()) == []
        now += 0.2
        assert [message for _, message in own.drain()] == [Taken(2, 1)]


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_process_kills_or_stops_itself(action: str) -> None:
    code = (
        "from penstock.protocol.process.faults import Faults\n"
        f"faults = Faults(['worker:{action}@step=2'], 'worker')\n"
        "faults.at('step'); print('one', flush=True); faults.at('step'); print('two', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == b"one\n"
        if action == "stop":
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            process.send_signal(signal.SIGCONT)
            assert out.readline() == b"two\n"
            assert process.wait(60) == 0
        else:
            assert process.wait(60) == -signal.SIGKILL
            assert out.read() == b""


def test_whoever_takes_one_delayed_message_finds_the_others_the_next_time() -> None:
    faults = Faults(["worker:delay=0@Taken"], "worker")
    for number in range(3):
        assert not faults.received(7, Taken(number, 1))
    assert next(faults.late()) == (7, Taken(0, 1))
    assert [message for _, message in faults.late()] == [Taken(1, 1), Taken(2, 1)]

"""A beat carries its process' counters as they are when it is sent."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from support.protocol.mailbox_process import short_folder

from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.process.process_metrics import ProcessMetrics
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import Identity, MetricsReport


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with short_folder() as folder:
        made = Mailbox(f"ipc://{folder}")
        yield made
        made.close()


def values(report: bytes) -> dict[str, float]:
    samples = msgspec.msgpack.decode(report, type=MetricsReport).samples
    return {sample.name: sample.values[-1] for sample in samples}


def test_counters_are_read_when_a_beat_is_made(mailbox: Mailbox) -> None:
    metrics = Registry()
    reported = ProcessMetrics(metrics, mailbox, "tokenizer")
    member = Participant("tokenizer", mailbox, "ipc:///nowhere", Identity(1, "test"))
    member.measured = reported.encoded
    beats = BeatThread(member, mailbox)
    first = values(beats.beat().metrics)
    metrics.inc("continuations_total", "tokenizer", amount=3)
    mailbox.malformed += 2
    second = values(beats.beat().metrics)
    assert second["continuations_total"] == 3, "nothing had to tick in between"
    assert second["malformed_frames_total"] - first["malformed_frames_total"] == 2
    assert second["process_cpu_seconds_total"] > first["process_cpu_seconds_total"] > 0
    assert second["process_resident_memory_bytes"] > 1e6


def test_a_registry_that_grows_while_it_is_listed_costs_no_beat(mailbox: Mailbox) -> None:
    class Growing(Registry):
        grows = False

        def report(self) -> MetricsReport:
            if self.grows:
                raise RuntimeError("dictionary changed size during iteration")
            return super().report()

    metrics = Growing()
    reported = ProcessMetrics(metrics, mailbox, "tokenizer")
    newest = reported.encoded()
    metrics.grows = True
    assert reported.encoded() == newest

"""What every process counts of itself, and its registry as a beat carries it."""

from __future__ import annotations

import os
import threading
import time

import msgspec

from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.mailbox import Mailbox

_encode = msgspec.msgpack.Encoder().encode
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> float:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            return float(int(statm.read(256).split()[1]) * _PAGE_BYTES)
    except (OSError, IndexError, ValueError):
        return 0.0


class ProcessMetrics:
    """A process' registry with the counters of its mailbox, its CPU time and its memory.

    The thread whose loop it is makes it and calls ``tick``. The thread that beats calls
    ``encoded``, so that they are read once a beat, when it is sent.
    """

    def __init__(self, metrics: Registry, mailbox: Mailbox, service: str) -> None:
        self._metrics, self._mailbox = metrics, mailbox
        self._loop = time.pthread_getcpuclockid(threading.get_ident())
        self._outbox = metrics.gauge("outbox_bytes")
        self._malformed = metrics.counter("malformed_frames_total")
        self._sent = metrics.counter("messages_sent_total", service)
        self._sent_bytes = metrics.counter("sent_bytes_total", service)
        self._unsent = metrics.counter("dropped_messages_total", "unsent")
        self._cpu = metrics.counter("process_cpu_seconds_total")
        self._loop_cpu = metrics.counter("process_loop_cpu_seconds_total")
        self._resident = metrics.gauge("process_resident_memory_bytes")
        self._newest = b""

    def tick(self) -> None:
        """What only the loop's thread may look at."""
        self._outbox.value = float(self._mailbox.outbox_bytes())

    def encoded(self) -> bytes:
        """The ``MetricsReport`` of now; that of the last call, should the loop add a series
        meanwhile."""
        mailbox = self._mailbox
        self._malformed.value = float(mailbox.malformed)
        self._sent.value = float(mailbox.sent)
        self._sent_bytes.value = float(mailbox.sent_bytes)
        self._unsent.value = float(mailbox.refused)
        self._cpu.value = time.process_time()
        self._loop_cpu.value = time.clock_gettime(self._loop)
        self._resident.value = resident_bytes()
        try:
            self._newest = _encode(self._metrics.report())
        except RuntimeError:  # the registry's dict grew while it was listed
            if not self._newest:
                raise
        return self._newest

"""What people are told about the reading of weights: while it goes on, and when it is done."""

from __future__ import annotations

import msgspec

from penstock.protocol.process.plain_structlog import Logger

_UNITS = ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 0))


class ReadProgress(msgspec.Struct, frozen=True):
    """How far the reading is."""

    done_bytes: int
    total_bytes: int
    seconds: float
    """Seconds since the reading began."""

    def behind(self, before: ReadProgress) -> ReadProgress:
        """Of the whole, of which ``before`` was read ahead of this part."""
        done, seconds = before.done_bytes + self.done_bytes, before.seconds + self.seconds
        return ReadProgress(done, before.total_bytes, seconds)

    def __str__(self) -> str:
        """``reading weights 45%: 0.54 of 1.19 GB, 1.30 GB/s``; the launcher draws it as a bar."""
        percent = 100 * self.done_bytes // max(1, self.total_bytes)
        done, total, unit = _both(self.done_bytes, self.total_bytes)
        return f"reading weights {percent}%: {done} of {total} {unit}, {rate(self)}"


class LoadReport(msgspec.Struct, frozen=True):
    """What was read."""

    done_bytes: int
    seconds: float
    zero_tensors: list[str] = []
    """Matrices that are all zeros where a model can mean it."""
    notes: list[str] = []
    """What the files hold otherwise than ``config.json`` says."""
    mapped: bool = False
    """Nothing was read: another worker's weights were mapped."""

    def __str__(self) -> str:
        """``1.19 GB of weights in 0.9 s, 1.30 GB/s``."""
        size, _, unit = _both(self.done_bytes, self.done_bytes)
        if self.mapped:
            return f"{size} {unit} of held weights mapped in {self.seconds:.2f} s"
        return f"{size} {unit} of weights in {self.seconds:.1f} s, {rate(self)}"


def say_report(report: LoadReport, log: Logger) -> None:
    """Warn of what is odd in it, and say where nothing was read."""
    if report.mapped:
        log.info(str(report))
    for note in report.notes:
        log.warning(note)
    if report.zero_tensors:
        log.warning(
            "matrices of nothing but zeros: meant in layers that were added and not trained, "
            "else the files are damaged",
            count=len(report.zero_tensors),
            tensors=report.zero_tensors[:8],
        )


def rate(read: ReadProgress | LoadReport) -> str:
    """Bytes in each second, with a unit."""
    value, _, unit = _both(*[int(read.done_bytes / max(read.seconds, 1e-3))] * 2)
    return f"{value} {unit}/s"


def _both(first: int, second: int) -> tuple[str, str, str]:
    """Two counts of bytes in the unit that suits the second."""
    for size, unit, digits in _UNITS:
        if second >= size:
            return f"{first / size:.{digits}f}", f"{second / size:.{digits}f}", unit
    return str(first), str(second), "B"

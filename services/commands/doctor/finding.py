"""What was found out about one thing, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

State = Literal["ok", "warning", "problem"]
MARKS: dict[State, str] = {"ok": " ", "warning": "!", "problem": "x"}


class Finding(msgspec.Struct, frozen=True):
    name: str
    value: str
    state: State = "ok"
    """``warning``: some loads will meet it; ``problem``: a server cannot work."""
    remedy: str = ""


class Section(msgspec.Struct, frozen=True):
    title: str
    findings: Sequence[Finding]


def count(sections: Sequence[Section], state: State) -> int:
    return sum(one.state == state for section in sections for one in section.findings)


def as_text(sections: Sequence[Section]) -> str:
    """Plain text, to be pasted into an issue: a line for each finding, its remedy below it."""
    width = max(len(one.name) for section in sections for one in section.findings) + 2
    lines = []
    for section in sections:
        lines.append(section.title)
        for one in section.findings:
            first, *more = one.value.splitlines() or [""]
            lines.append(f"{MARKS[one.state]} {one.name:{width}}{first}".rstrip())
            lines += [f"  {'':{width}}{line}" for line in more]
            if one.remedy:
                lines.append(f"  {'':{width}}-> {one.remedy}")
        lines.append("")
    return "\n".join(lines)


def verdict(sections: Sequence[Section]) -> str:
    """The last line."""
    problems, warnings = count(sections, "problem"), count(sections, "warning")
    noted = f"{warnings} warning{'s' if warnings != 1 else ''} (!)"
    if not problems:
        return "Nothing was found that would keep a server from working" + (
            f"; {noted}." if warnings else "."
        )
    plural = "s" if problems != 1 else ""
    return f"{problems} problem{plural} (x) would keep a server from working; {noted}."


def of_bytes(size: float) -> str:
    """In binary units, with three digits."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1024
    return f"{size:,.1f} GiB"

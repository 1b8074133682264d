"""What was found out about one thing, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
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


def guarded(
    name: str,
    look: Callable[[], Iterable[Finding]],
    remedy: str = "docs/troubleshooting.md lists messages with their causes",
) -> Iterator[Finding]:
    """What ``look`` finds; where that fails, a problem of this name in the error's words.

    A machine on which looking fails, with a full disk or a user without a home, is one that needs
    the rest of the report.
    """
    try:
        yield from look()
    except (OSError, RuntimeError, ValueError) as error:
        yield Finding(name, _words(error), "problem", remedy)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}"
    return str(error) or type(error).__name__


def without_home(sections: Sequence[Section]) -> list[Section]:
    """The same with ``~`` for the user's home, whoever named it: a setting, a library, a server."""
    try:
        homes = {str(home) for home in (Path.home(), Path.home().resolve())} - {"/"}
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return list(sections)
    longest_first = "|".join(re.escape(home) for home in sorted(homes, key=len, reverse=True))
    if not longest_first:
        return list(sections)
    # Neither the end of another path, nor a folder whose name only begins like it.
    pattern = re.compile(rf"(?<![\w.~-])(?:{longest_first})(?![\w-]|\.\w)")
    replace = partial(pattern.sub, "~")
    return [
        Section(
            section.title,
            [
                msgspec.structs.replace(one, value=replace(one.value), remedy=replace(one.remedy))
                for one in section.findings
            ],
        )
        for section in sections
    ]


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

"""What a process that was forked for a test runs."""

from __future__ import annotations


def execute(program: str) -> None:
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})

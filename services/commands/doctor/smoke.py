"""A server with the built-in model, asked one question."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.protocol.config.terminal import Style
from penstock.services.commands.doctor.finding import Finding
from penstock.services.commands.failure import CommandError

QUESTION, RIGHT = "What is 17 + 25?", "42"
"""Which the built-in model answers, where it computes at all."""
START_S = 300
ANSWER_S = 60.0
"""For a server that gets ready and then hangs."""
TOKENS = 256
"""Enough for what the model thinks ahead of its answer."""


def smoke_test(device: str, environment: Mapping[str, str], style: Style) -> Iterator[Finding]:
    """device: ``cpu`` or ``null``, which draws its tokens. style: of the line of progress."""
    from penstock.services.commands.api_client import ApiClient
    from penstock.services.commands.chat.own_server import own_server
    from penstock.services.commands.endpoint import endpoint

    # Without settings of the user: those are looked at by themselves.
    clean = {name: value for name, value in environment.items() if not name.startswith("PENSTOCK_")}
    flags = ("--device", device, "--startup-timeout-s", str(START_S))
    name = f"server on {device}"
    began = time.monotonic()
    try:
        with own_server("", flags, clean, style) as url:
            ready = time.monotonic()
            yield Finding(name, f"ready after {ready - began:.1f} s")
            name = "answer"
            answer = ApiClient(endpoint(url, None, {})).post(
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": QUESTION}],
                    "max_tokens": TOKENS,
                    "temperature": 0,
                },
                ANSWER_S,
            )
            yield _judged(answer, device, time.monotonic() - ready)
    except CommandError as error:
        yield Finding(
            name, str(error), "problem",
            "docs/troubleshooting.md lists messages with their causes",
        )  # fmt: skip


def _judged(answer: Any, device: str, seconds: float) -> Finding:
    """Whether it answered, and rightly where it computes."""
    try:
        said = str(answer["choices"][0]["message"]["content"] or "")
        tokens = int(answer["usage"]["completion_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        said, tokens = "", 0
    told = f"{tokens} tokens after {seconds:.2f} s"
    if not tokens:
        return Finding(
            "answer", "none", "problem", "the server's log says why; --log-level debug says more"
        )
    if device == "null":
        return Finding("answer", f"{told}, of a device that computes nothing")
    if said.strip() != RIGHT:
        return Finding(
            "answer", f"{told}: {said!r} to {QUESTION!r}, not {RIGHT!r}", "problem",
            "the model computes wrongly here: report it with all of this",
        )  # fmt: skip
    return Finding("answer", f"{told}, the right one")

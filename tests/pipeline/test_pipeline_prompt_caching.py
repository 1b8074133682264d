"""``cache_control`` by all processes: what is retained, computed ahead of its use, and released."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.served import SMALL, Served, SharedServers
from support.polling import until

RETAIN = {"cache_control": {"type": "ephemeral"}}
RELEASE = {"cache_control": {"type": "release"}}
RETAINED = "penstock_kv_blocks_retained"
WORDS = "The wheel turns in the water of the mill. " * 6


@pytest.fixture(scope="module")
def server(small_model: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(small_model), *SMALL)


def post(server: Served, path: str, **body: Any) -> Any:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/{path}", data, kind)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def completed(server: Served, prompt: str, **more: Any) -> tuple[str, int, int]:
    """Text, tokens of the prompt, and how many of them were cached."""
    answer = post(server, "completions", prompt=prompt, **more)
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], cached


def blocks_retained(server: Served) -> int:
    return int(server.metrics().get(RETAINED, 0))


def retained(server: Served, expected: int) -> None:
    """Wait until the engine says that it retains so many blocks."""
    until(
        lambda: blocks_retained(server) == expected,
        told=lambda: f"{blocks_retained(server)} blocks are retained, not {expected}",
    )


def test_a_prompt_is_computed_ahead_of_its_use_retained_and_released(server: Served) -> None:
    salted = {"cache_salt": "computed ahead"}
    text, length, cached = completed(server, WORDS, max_tokens=0, **RETAIN, **salted)
    assert (text, cached) == ("", 0)
    retained(server, length // 16)
    text, _, cached = completed(server, WORDS, max_tokens=4, temperature=0, **salted)
    assert text and cached == (length - 1) // 16 * 16
    completed(server, WORDS, max_tokens=1, cache_salt="another", **RELEASE)
    completed(server, WORDS, max_tokens=0, **RELEASE, **salted)
    retained(server, 0)


def test_anthropics_blocks_retain_what_lies_ahead_of_them(server: Served) -> None:
    rules = {"type": "text", "text": WORDS, **RETAIN}
    question = {"role": "user", "content": "And now?"}
    body = {"system": [rules], "messages": [question], "cache_salt": "anthropic"}
    counted = post(server, "messages/count_tokens", **body)["input_tokens"]
    empty = post(server, "messages", max_tokens=0, **body)
    assert (empty["stop_reason"], empty["usage"]["output_tokens"]) == ("max_tokens", 0)
    blocks = until(lambda: blocks_retained(server))
    assert blocks * 16 < counted
    body["messages"] = [{"role": "user", "content": "Something else?"}]
    answer = post(server, "messages", max_tokens=2, **body)
    assert answer["usage"]["cache_read_input_tokens"] >= 16 * blocks
    post(server, "messages", max_tokens=1, **body, **RELEASE)
    retained(server, 0)


def test_without_it_a_request_for_no_tokens_is_told_what_it_lacks(server: Served) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path, body in (("completions", {"prompt": "a"}), ("messages", {"messages": messages})):
        assert "cache_control" in post(server, path, max_tokens=0, **body)["error"]["message"]

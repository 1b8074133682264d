"""Whole turns of coding agents: they ask, call tools, send back what came of them, and end.

The agents are the real ones, and so is the server but for the model, which a script plays: one that
is small enough for a test makes nothing of a prompt of twenty thousand tokens. `make agents`
installs them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.conformance.agent_runs import BIN, KEY, Run, claude, codex
from support.conformance.recording_proxy import Exchange, RecordingProxy
from support.pipeline.scripted_model import called, scripted_model
from support.pipeline.served import Served, served

MODEL = "org/scripted"
SUM, PRODUCT = "echo SUM=$((40+1))", "echo PRODUCT=$((6*7)) | tee product.txt"
PATCH = "*** Begin Patch\n*** Add File: note.txt\n+Remember.\n*** End Patch"
SCRIPT = [
    (r"tool_response>[^<]*PRODUCT=42", "The product is 42."),
    (
        r"Ask Codex.*tool_response>[^<]*SUM=41",
        called("exec_command", "Now the product.", cmd=PRODUCT),
    ),
    (r"Ask Codex", "First the sum.\n" + called("exec_command", cmd=SUM)),
    (
        r"Ask Claude.*tool_response>[^<]*SUM=41",
        called("Bash", "Now the product.", command=PRODUCT, description="Multiply"),
    ),
    (r"Ask Claude", "First the sum.\n" + called("Bash", command=SUM, description="Add")),
    (r"tool_response>[^<]*CronList can be called", "The tool is there."),
    (r"Search a tool", called("ToolSearch", query="select:CronList")),
    (r"Show .*tool_response>[^<]*An image, which you cannot see", "I cannot see it."),
    (r"Show Codex an image", called("view_image", path="{image}")),
    (r"Show Claude an image", called("Read", file_path="{image}")),
    (r"", "I do not know that."),
]
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4"
    "2mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
needs_codex = pytest.mark.skipif(
    not (BIN / "codex").exists(), reason="`make agents` installs Codex, where there is npm"
)
needs_claude = pytest.mark.skipif(
    not (BIN / "claude").exists(), reason="`make agents` installs Claude Code, where there is npm"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("agents")
    image = folder / "pixel.png"
    image.write_bytes(base64.b64decode(PIXEL))
    script = [(pattern, says.replace("{image}", str(image))) for pattern, says in SCRIPT]
    flags, environment = scripted_model(folder / "model", script)
    flags += ["--served-model-name", MODEL, "--api-key", KEY]
    with served(*flags, environment=environment) as server:
        yield server


@pytest.fixture
def proxy(server: Served) -> Iterator[RecordingProxy]:
    with RecordingProxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def check_turn(run: Run, exchanges: list[Exchange], folder: Path) -> None:
    """All was answered, and both commands were run."""
    assert run.code == 0, run.output
    assert all(one.status in (101, 200) for one in exchanges), [one.answer for one in exchanges]
    assert (folder / "product.txt").read_text() == "PRODUCT=42\n"


def check_codex(run: Run) -> None:
    items = [event["item"] for event in run.of("item.completed")]
    said = [item["text"] for item in items if item["type"] == "agent_message"]
    assert said == ["First the sum.", "The product is 42."]
    assert [item["text"] for item in items if item["type"] == "reasoning"] == ["Now the product."]
    ran = [item for item in items if item["type"] == "command_execution"]
    outputs = ["SUM=41\n", "PRODUCT=42\n"]
    assert [(item["aggregated_output"], item["exit_code"]) for item in ran] == [
        (output, 0) for output in outputs
    ]
    (done,) = run.of("turn.completed")
    assert done["usage"]["cached_input_tokens"] > done["usage"]["input_tokens"] // 2
    assert done["usage"]["reasoning_output_tokens"] > 0


def kinds_of(items: list[dict[str, Any]]) -> list[str]:
    return [item["type"] for item in items]


@needs_codex
def test_codex_ends_a_turn_of_two_commands(proxy: RecordingProxy, folder: Path) -> None:
    run = codex(proxy.url, "Ask Codex.", folder, MODEL)
    check_turn(run, proxy.exchanges, folder)
    check_codex(run)
    assert [one.path for one in proxy.exchanges] == ["/v1/responses"] * 3
    for one in proxy.exchanges:
        events = one.events()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
    assert kinds_of(proxy.exchanges[-1].asked()["input"])[-6:] == [
        *("message", "function_call", "function_call_output"),
        *("reasoning", "function_call", "function_call_output"),
    ]


@needs_codex
def test_codex_ends_a_turn_on_one_web_socket(proxy: RecordingProxy, folder: Path) -> None:
    run = codex(proxy.url, "Ask Codex.", folder, MODEL, web_socket=True)
    check_turn(run, proxy.exchanges, folder)
    check_codex(run)
    (socket,) = proxy.exchanges
    warming, *asked = socket.asked_on_socket()
    assert warming["generate"] is False
    assert [kinds_of(one["input"])[-1] for one in asked] == [
        *("message", "function_call_output", "function_call_output")
    ]
    ids = [
        event["response"]["id"]
        for event in socket.events()
        if event["type"] == "response.completed"
    ]
    assert [one["previous_response_id"] for one in asked] == ids[:-1]


@needs_claude
def test_claude_code_ends_a_turn_of_two_commands(proxy: RecordingProxy, folder: Path) -> None:
    run = claude(proxy.url, "Ask Claude.", folder, "scripted")
    check_turn(run, proxy.exchanges, folder)
    (result,) = run.of("result")
    assert (result["result"], result["stop_reason"]) == ("The product is 42.", "end_turn")
    assert (result["num_turns"], result["is_error"]) == (3, False)
    assert result["usage"]["cache_read_input_tokens"] > result["usage"]["input_tokens"]
    blocks = [block for one in run.of("assistant") for block in one["message"]["content"]]
    assert kinds_of(blocks) == ["text", "tool_use", "thinking", "tool_use", "text"]
    assert {one.path for one in proxy.exchanges} == {"/v1/messages?beta=true"}
    *_, thought, ran = proxy.exchanges[-1].asked()["messages"]
    assert kinds_of(thought["content"]) == ["thinking", "tool_use"]
    assert ran["content"][0]["content"] == "PRODUCT=42"


@needs_claude
def test_claude_code_searches_a_tool_that_is_offered_from_then_on(
    proxy: RecordingProxy, folder: Path
) -> None:
    run = claude(proxy.url, "Search a tool.", folder, "scripted")
    assert run.code == 0, run.output
    assert [one.status for one in proxy.exchanges] == [200, 200]
    assert run.of("result")[0]["result"] == "The tool is there."
    named, later = (
        {tool["name"]: tool for tool in one.asked()["tools"]} for one in proxy.exchanges
    )
    assert "CronList" not in named
    assert later["CronList"]["defer_loading"] is True


@needs_codex
def test_codex_goes_on_behind_an_image_that_the_model_cannot_see(
    proxy: RecordingProxy, folder: Path
) -> None:
    run = codex(proxy.url, "Show Codex an image.", folder, MODEL)
    assert run.code == 0, run.output
    assert [one.status for one in proxy.exchanges] == [200, 200]
    *_, said = run.of("item.completed")
    assert said["item"]["text"] == "I cannot see it."


@needs_claude
def test_claude_code_goes_on_behind_an_image_that_the_model_cannot_see(
    proxy: RecordingProxy, folder: Path
) -> None:
    run = claude(proxy.url, "Show Claude an image.", folder, "scripted")
    assert run.code == 0, run.output
    assert [one.status for one in proxy.exchanges] == [200, 200]
    assert run.of("result")[0]["result"] == "I cannot see it."


@needs_claude
def test_claude_code_counts_what_its_context_holds(proxy: RecordingProxy, folder: Path) -> None:
    run = claude(proxy.url, "/context", folder, "scripted")
    assert run.code == 0, run.output
    assert {(one.path, one.status) for one in proxy.exchanges} == {
        ("/v1/messages/count_tokens?beta=true", 200)
    }

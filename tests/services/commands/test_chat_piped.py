"""``penstock chat`` without a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands.command_run import call, run
from support.commands.scripted_api import scripted_api
from support.pipeline.served import Served

from penstock.protocol.config.terminal import Style
from penstock.services.commands.chat.answer import Answer
from penstock.services.commands.chat.views import PlainView


def test_standard_input_is_one_message_and_the_answer_is_plain(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "One\nline"}], "max_tokens": 9, "seed": 3}
    _, answer = server.post("/v1/chat/completions", {"model": "penstock-demo", **body})
    done = run("chat", server.url, "--max-tokens", "9", "--seed", "3", given="One\nline\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip("\n") == (answer["choices"][0]["message"]["content"] or "").rstrip(
        "\n"
    )


def test_a_text_is_written_as_it_is_and_thinking_is_left_out() -> None:
    with scripted_api() as api:
        api.deltas = [{"reasoning": "hm"}, {"content": "**bold** \x1b[1m"}, {"content": "end"}]
        done = call("chat", api.url, "-m", "Review this:", given="the text")
        ((path, _, body),) = api.asked
    assert (done.stdout, done.stderr) == ("**bold** \x1b[1mend\n", "")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Review this:\n\nthe text"}]


def test_an_answer_that_ends_while_the_model_thinks_says_why_it_is_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for thought, told in (({"reasoning": "hm"}, True), ({"content": "84"}, False)):
        view, answer = PlainView(Style()), Answer()
        for piece in answer.take({"choices": [{"delta": thought, "finish_reason": "length"}]}):
            view.piece(*piece)
        view.end(answer)
        assert ("raise --max-tokens" in capsys.readouterr().err) == told


def test_lines_are_taken_as_if_they_were_typed_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    lines = f"/system Be brief.\nhello\n/sett x\n/save {file}\n"
    with scripted_api() as api:
        api.deltas = [{"content": "hi"}]
        done = call("chat", api.url, "--lines", given=lines)
    assert done.returncode == 1
    assert "did you mean /set?" in done.stderr
    assert "hi\n" in done.stdout
    assert [one["content"] for one in json.loads(file.read_text())["messages"]] == [
        *("Be brief.", "hello", "hi"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": "f"}]},
    ],
)
def test_a_file_that_is_no_conversation_is_refused_in_one_line(
    tmp_path: Path, message: dict[str, object]
) -> None:
    file = tmp_path / "saved.json"
    file.write_text(json.dumps([{"role": "user", "content": "x"}, message]))
    with scripted_api() as api:
        done = call("chat", api.url, "--load", str(file), given="go on")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "holds no conversation" in done.stderr


def test_nothing_to_ask_is_refused_and_so_are_flags_for_no_server() -> None:
    with scripted_api() as api:
        assert "there is nothing to ask" in call("chat", api.url).stderr
        done = call("chat", api.url, "--", "--device", "null", given="x")
        assert (done.returncode, done.stderr.count("--device is for a server")) == (2, 1)


def test_a_folder_that_cannot_be_served_is_told_in_the_servers_words(tmp_path: Path) -> None:
    done = call("chat", str(tmp_path), given="x", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 3
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr

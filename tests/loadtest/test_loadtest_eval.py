"""``penstock eval`` against a server whose right and wrong answers are known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.demo.chat import messages
from penstock.demo.exchange import plain
from penstock.demo.grading import questions
from penstock.loadtest import eval as evaluation

SKILLS = ("addition", "tool_call", "recall")
KNOWN = {
    json.dumps(messages(made)): (skill, plain(made.exchanges[-1].answer))
    for free in (False, True)
    for skill, made in questions(SKILLS, 4, seed=1, free=free)
}


class Handler(BaseHTTPRequestHandler):
    """Answers right, but for additions on port state ``wrong`` and errors on ``broken``."""

    protocol_version = "HTTP/1.1"
    mode = "right"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0
        skill, answer = KNOWN[json.dumps(body["messages"])]
        if self.mode == "broken" and skill == "recall":
            self._send(500, {"error": {"message": "broken"}})
            return
        if self.mode == "wrong" and skill == "addition":
            answer = "no idea"
        content = f"<think>\nhm\n</think>\n\n{answer}"
        usage = {"completion_tokens": 7}
        self._send(200, {"choices": [{"message": {"content": content}}], "usage": usage})


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(url: str, *flags: str) -> int:
    known = ["--base-url", url, "--skills", *SKILLS, "--num-questions", "4", "--quiet"]
    return evaluation.main([*known, *flags])


def test_eval_counts_right_answers_of_each_skill(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "mode", "wrong")
    path = tmp_path / "eval.json"
    assert run(url, "--output-json", str(path)) == 0
    result = json.loads(path.read_text())
    assert (result["asked"], result["right"], result["output_tokens"]) == (12, 8, 84)
    assert result["skills"]["addition"]["accuracy"] == 0
    assert result["skills"]["tool_call"]["accuracy"] == 1
    assert {each["skill"] for each in result["wrong"]} == {"addition"}


def test_eval_ends_with_three_when_a_skill_is_below_what_is_required(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(url, "--require", "0.95") == 0
    monkeypatch.setattr(Handler, "mode", "wrong")
    assert run(url, "--require", "0.95", "--show", "1") == 3
    said = capsys.readouterr()
    assert "addition" in said.err
    assert "no idea" in said.out


def test_eval_ends_with_one_when_a_question_gets_no_answer(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Handler, "mode", "broken")
    assert run(url) == 1
    assert "4 questions got no answer: 500" in capsys.readouterr().err


def test_eval_asks_the_same_things_in_free_wording(url: str, tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    assert run(url, "--wording", "free", "--require", "1", "--output-json", str(path)) == 0
    result = json.loads(path.read_text())
    assert (result["wording"], result["right"]) == ("free", 12)


def test_eval_refuses_flags_of_a_server_that_is_running_already(url: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(url, "--dtype", "float32")
    assert ended.value.code == 2

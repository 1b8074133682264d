"""``penstock eval`` against a server whose right and wrong answers are known."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.demo.chat import messages
from penstock.demo.exchange import plain
from penstock.demo.grading import questions
from penstock.loadtest.evaluation import eval as evaluation
from penstock.loadtest.evaluation.eval_facts import facts
from penstock.loadtest.evaluation.eval_reference import Reference

SKILLS = ("addition", "tool_call", "recall")
KNOWN = {
    json.dumps(messages(made)): (skill, plain(made.exchanges[-1].answer))
    for free in (False, True)
    for skill, made in questions(SKILLS, 4, seed=1, free=free)
}


RIGHT = {each.stem + each.options[each.right] for each in facts()}


def scored(body: dict[str, Any]) -> dict[str, Any]:
    """Every word is a token of logprob -1, but for the last one of a fact that is true."""
    assert (body["max_tokens"], body["echo"], body["logprobs"]) == (0, True, 0)
    prompt = body["prompt"]
    offsets = [found.start() for found in re.finditer(r" ?\S+", prompt)]
    values: list[float | None] = [None, *[-1.0] * (len(offsets) - 1)]
    if prompt in RIGHT and not prompt.startswith("The plural"):
        values[-1] = -0.5
    if prompt.startswith("The plural"):
        values[-1] = -0.25 if prompt.endswith("children") else -2.0
    logprobs = {"token_logprobs": values, "text_offset": offsets}
    return {"choices": [{"text": prompt, "logprobs": logprobs}]}


class Handler(BaseHTTPRequestHandler):
    """Answers right, but for additions on port state ``wrong`` and errors on ``broken``."""

    wbufsize = -1  # an answer in one piece: each waits for no acknowledgement
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
        if self.path == "/v1/completions":
            self._send(200, scored(body))
            return
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


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    """All of an evaluation's connections may come at once; of more than so many some are reset."""


@pytest.fixture
def url() -> Iterator[str]:
    server = Server(("127.0.0.1", 0), Handler)
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


def test_the_facts_are_many_and_have_one_true_end_each() -> None:
    asked = list(facts())
    assert len(asked) >= 100
    assert asked == list(facts())
    for each in asked:
        assert len(set(each.options)) == 4
    assert len({each.stem for each in asked}) == len(asked)
    places = [sum(each.right == place for each in asked) for place in range(4)]
    assert min(places) > len(asked) / 8


@pytest.mark.slow
def test_the_likeliest_end_of_a_sentence_is_the_answer(url: str, tmp_path: Path) -> None:
    path, text = tmp_path / "eval.json", tmp_path / "text"
    text.write_text("nine words of which the first has no logprob")
    flags = ["--set", "facts", "--text", str(text), "--output-json", str(path), "--quiet"]
    flags += ["--num-questions", "4"]
    assert evaluation.main(["--base-url", url, *flags]) == 0
    result = json.loads(path.read_text())
    skills = result["skills"]
    assert all(row["accuracy"] == 1 for name, row in skills.items() if name != "plurals")
    assert skills["plurals"]["accuracy"] < 0.7
    assert result["perplexity"] == pytest.approx(2.718281828)


@pytest.mark.slow
def test_an_answer_that_is_not_the_references_ends_with_three(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, text = tmp_path / "eval.json", tmp_path / "text"
    text.write_text("some words")
    flags = ["--set", "facts", "--output-json", str(path), "--quiet", "--base-url", url]
    flags += ["--num-questions", "1"]
    assert evaluation.main(flags) == 0
    wrong = {each["question"]: each["said"] for each in json.loads(path.read_text())["wrong"]}
    same = [wrong.get(each.stem, each.options[each.right].strip()) for each in facts(1)]
    flags += ["--reference", "folder", "--text", str(text)]
    for answers, perplexity, code in (
        (same, 2.7180, 0),
        (same, 2.7220, 3),
        (["Nowhere", *same[1:]], 2.7183, 3),
    ):
        made = Reference(answers, perplexity)
        monkeypatch.setattr(evaluation, "reference", lambda *asked, made=made: made)
        assert evaluation.main(flags) == code
    said = capsys.readouterr().err
    assert "2.7183, and transformers says 2.7220: 0.14 % apart" in said
    assert "'The capital city of France is': 'Paris', and transformers says 'Nowhere'" in said

"""The library starts the same processes as a server, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.library.terminals import terminal_as_stderr
from support.polling import until

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.client.gateway_interface import ServedModel
from penstock.client.sink import Sink
from penstock.protocol.config import ConfigError
from penstock.protocol.wire.messages.requests import RequestHead, Work
from penstock.services.frontend.dialects.chat import ChatDialect
from penstock.services.frontend.errors import ApiError
from penstock.services.library.outputs import RequestError
from penstock.services.library.server_process import ServerFailed

Cell = tuple[LLM, list[str]]


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    """What a cell of a notebook starts, and the prompts of its outputs. A cell runs inside an
    event loop, and its output streams are no files."""

    async def run() -> Cell:
        llm = LLM(device="null", null_step_ms=50)
        outputs = llm.generate(["Hello", "again"], SamplingParams(max_tokens=3))
        return llm, [output.prompt or "" for output in outputs]

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        llm, prompts = asyncio.run(run())
    with llm:
        yield llm, prompts


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5 + n, 6, 7] for n in range(40)]
    together = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert [output.prompt_token_ids for output in together] == prompts
    for prompt, output in list(zip(prompts, together, strict=True))[::13]:
        alone = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6))[0]
        assert alone.outputs == output.outputs


def test_an_answer_that_ends_follows_its_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["age", "tags"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=200, seed=5, n=3, structured_outputs={"json": schema})
    (result,) = llm.generate(["A person:"], params)
    ended = [json.loads(one.text) for one in result.outputs if one.finish_reason == "stop"]
    assert ended
    for found in ended:
        assert set(found) == {"age", "tags"}
        assert 0 <= found["age"] <= 130
        assert len(found["tags"]) <= 3 and set(found["tags"]) <= {"a", "b"}


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(
        ["one", "two"],
        [
            SamplingParams(max_tokens=3, ignore_eos=True),
            SamplingParams(max_tokens=5, n=2, ignore_eos=True),
        ],
    )
    assert [len(output.outputs) for output in outputs] == [1, 2]
    assert [len(choice.token_ids) for choice in outputs[1].outputs] == [5, 5]
    assert outputs[0].prompt == "one"
    assert outputs[0].outputs[0].finish_reason == "length"


def test_a_seed_gives_the_same_text_again(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=20)
    first, second = (llm.generate("Once", params)[0].outputs[0].text for _ in range(2))
    assert first == second


def test_a_conversation_goes_through_the_chat_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=4))
    assert len(output.prompt_token_ids) > 4
    assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    "message",
    [
        {"role": "king", "content": "hi"},
        {"role": "user"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
        {"role": "user", "content": "hi", "contnet": "hi"},
        {"role": "tool", "content": "5"},
        "hi",
    ],
    ids=str,
)
def test_a_wrong_message_is_told_in_the_same_sentence_as_over_http(llm: LLM, message: Any) -> None:
    turns = [{"role": "user", "content": "hi"}, message]
    with pytest.raises(ApiError) as over_http:
        ChatDialect().parse(
            json.dumps({"messages": turns}).encode(), [ServedModel("m", [], 64, 1000)]
        )
    with pytest.raises(ValueError, match=r"^messages\[1\]|in messages\[1\]") as caught:
        llm.chat(turns)
    assert str(caught.value) == str(over_http.value)
    with pytest.raises(ValueError, match=r"messages\[1\]\[1\]"):
        llm.chat([turns[:1], turns])


def test_content_in_parts_and_fields_that_ask_for_nothing_are_taken_as_over_http(llm: LLM) -> None:
    plain = [{"role": "system", "content": "a\nb"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    written = [{"role": "developer", "content": parts, "name": None, "tool_calls": []}]
    first, second = llm.chat([plain, written], SamplingParams(max_tokens=1))
    assert first.prompt_token_ids == second.prompt_token_ids


def test_thinking_is_switched_off_and_a_wrong_variable_is_named(llm: LLM) -> None:
    question, greedy = (
        [{"role": "user", "content": "What is 17 + 25?"}],
        SamplingParams(temperature=0, max_tokens=64),
    )
    (thinks,) = llm.chat(question, greedy)
    (off,) = llm.chat(question, greedy, chat_template_kwargs={"enable_thinking": False})
    assert thinks.outputs[0].reasoning and not off.outputs[0].reasoning
    with pytest.raises(ValueError, match=r"chat_template_kwargs.*enable_thinkin.*enable_thinking"):
        llm.chat(question, greedy, chat_template_kwargs={"enable_thinkin": False})


def test_a_wrong_prompt_or_parameter_is_a_value_error_that_names_it(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: .*99999"):
        llm.generate([[5], [99999]])
    with pytest.raises(ValueError, match=r"temperature is 1000.0; 0 to 100 is allowed") as caught:
        llm.generate("x", SamplingParams(temperature=1000.0))
    assert "top_p" not in str(caught.value)
    form: Any = {"regexp": "a"}
    with pytest.raises(ValueError, match=r"regexp \(did you mean regex"):
        llm.generate("x", SamplingParams(structured_outputs=form))
    form = {"regex": "("}
    with pytest.raises(ValueError, match="unclosed group"):
        llm.generate("x", SamplingParams(structured_outputs=form))
    half = "half of a surrogate pair"
    with pytest.raises(ValueError, match=rf"prompts\[1\] is 'a\\ud800', which holds {half}"):
        llm.generate(["x", "a\ud800"])
    with pytest.raises(ValueError, match=rf"messages\[0\]\.content is '\\ud800', .*{half}"):
        llm.chat([{"role": "user", "content": "\ud800"}])
    with pytest.raises(ValueError, match=rf"sampling_params\.stop\[0\] is '\\ud800', .*{half}"):
        llm.generate("x", SamplingParams(stop=["\ud800"]))
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(["x"], [SamplingParams(), SamplingParams()])
    assert llm.generate("still alive", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (["hello", 5, "x"], r"prompts\[1\] is 5, of type int"),
        ([5, "x"], r"prompts\[0\] is 5, of type int"),
        ([[5], 6], r"prompts\[1\] is 6, of type int"),
        (["x", None], r"prompts\[1\] is of type NoneType"),
        (["x", {"text": "y"}], r"prompts\[1\] is a dict with 'text'"),
        ({"prompt_token_ids": "y"}, "prompts is a dict with 'prompt_token_ids'; .* nothing else"),
        ({"prompt": "y", "multi_modal_data": {}}, "prompts is a dict .*'multi_modal_data'; "),
        ([[5], b"\0\0\0\0"], r"prompts\[1\] is of type bytes"),
        ([2.5], r"prompts\[0\] is of type float"),
        (["x", [5, "y"]], r"prompts\[1\]: a prompt is text or a list of token ids: .*'str'"),
        (["x", [2**40]], r"prompts\[1\]: a prompt is text or a list of token ids"),
        (7, "prompts is of type int"),
        ({}, "prompts is a dict with nothing"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_position_and_type(
    llm: LLM, prompts: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        llm.generate(prompts, SamplingParams(max_tokens=1))


def test_token_ids_of_one_prompt_may_be_any_kind_of_integers(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    alone: Any
    for alone in ([5, 6], (5, 6), np.array([5, 6]), list(np.array([5, 6]))):
        (output,) = llm.generate(alone, params)
        assert output.prompt_token_ids == [5, 6]
    assert llm.generate([], params) == []


def test_a_dict_with_a_prompt_is_that_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    plain = llm.generate(["Penstock", [5, 6]], params)
    given: Any = [{"prompt": "Penstock"}, {"prompt_token_ids": np.array([5, 6])}]
    for one, other in zip(llm.generate(given, params), plain, strict=True):
        assert (one.prompt, one.prompt_token_ids, one.outputs) == (
            *(other.prompt, other.prompt_token_ids),
            other.outputs,
        )
    (alone,) = llm.generate({"prompt": "Penstock"}, params)
    assert alone.outputs == plain[0].outputs


def test_a_prompt_that_is_found_wrong_after_others_were_sent_cancels_these(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    broken: Any = [[5]] * 20 + [["x"]]
    with pytest.raises(ValueError, match="a prompt is text or a list of token ids"):
        llm.generate(broken, params)
    with pytest.raises(ValueError, match="100"):
        llm.generate(["a", "b"], [params, SamplingParams(temperature=1000.0)])
    until(lambda: not llm._client.ledger.open)
    assert llm.generate("still alive", SamplingParams(max_tokens=1))


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_the_ids_of_a_prompt_are_plain_numbers_and_those_that_were_computed(
    llm: LLM, kind: Callable[[list[int]], Any]
) -> None:
    given = kind([5, 6, 7, 8, 9])
    for params, expected in (
        (SamplingParams(max_tokens=1), [5, 6, 7, 8, 9]),
        (SamplingParams(max_tokens=1, truncate_prompt_tokens=2), [8, 9]),
    ):
        (output,) = llm.generate([given], params)
        assert output.prompt_token_ids == expected
        assert {type(token) for token in output.prompt_token_ids} == {int}
    numbers: Any = list(np.array([5, 6]))
    (output,) = llm.generate([numbers], SamplingParams(max_tokens=1))
    assert {type(token) for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_long_list_of_prompts_is_fed_to_the_server_in_small_parts(
    llm: LLM, is_chat: bool
) -> None:
    most, ended, seen = 5, threading.Event(), list[int]()

    def watch() -> None:
        while not ended.wait(0.001):
            seen.append(len(llm._client.ledger.open))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        params = SamplingParams(max_tokens=2)
        if is_chat:
            chats = [[{"role": "user", "content": str(n)}] for n in range(30)]
            outputs = llm.chat(chats, params, max_concurrency=most)
        else:
            outputs = llm.generate([str(n) for n in range(30)], params, max_concurrency=most)
    finally:
        ended.set()
        watcher.join()
    assert len(outputs) == 30
    assert 1 <= max(seen) <= most


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_terminal_shows_a_bar_of_the_prompts_that_have_ended(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with terminal_as_stderr() as screen:
        llm.generate([[5, 6], [7, 8], [9]], params, max_concurrency=1)
        llm.generate([5], params, progress=False)
        llm.beam_search([[5, 6]], BeamSearchParams(beam_width=2, max_tokens=2))
    first, second = screen.lines
    assert re.fullmatch(r"\[=+\] 3/3 prompts, [\d,]+ in and [\d,]+ out tokens/s, in \d:\d\d", first)
    assert "] 1/1 prompts, " in second


def test_a_request_says_whose_it_is_how_urgent_and_of_which_trace(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as one that comes over HTTP."""
    heads: list[RequestHead] = []
    submit = llm._client.ledger.submit

    def watched(work: Work, sink: Sink, now: float) -> int:
        heads.append(work.head)
        return submit(work, sink, now)

    monkeypatch.setattr(llm._client.ledger, "submit", watched)
    outputs = llm.generate(
        ["one", "two"], SamplingParams(max_tokens=1), priority=[3, -2], user="ann",
        cache_salt="mine", deadline_s=50.0, trace_headers={"Traceparent": TRACE, "tracestate": "a"},
    )  # fmt: skip
    assert [head.priority for head in heads] == [3, -2]
    assert {(head.tenant, head.cache_salt, head.trace) for head in heads} == {
        ("ann", "mine", TRACE)
    }
    assert all(head.time_left is not None and 40 < head.time_left <= 50 for head in heads)
    assert [output.request_id for output in outputs] == [head.request_id for head in heads]
    assert len({head.request_id for head in heads} - {""}) == 2
    llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1), priority=7)
    assert (heads[-1].priority, heads[-1].tenant, heads[-1].time_left) == (7, "", None)


@pytest.mark.parametrize(
    ("terms", "error", "words"),
    [
        ({"priority": 2**31}, ValueError, "priority is 2147483648"),
        ({"priority": [1, 2]}, ValueError, "2 priorities for 1 prompts"),
        ({"priority": "high"}, ValueError, "priority is 'high'"),
        ({"user": "x" * 129}, ValueError, "user has 129 characters"),
        ({"cache_salt": "a\nb"}, ValueError, "cache_salt is 'a\\nb'; printable"),
        ({"deadline_s": 0}, ValueError, "deadline_s is 0"),
        ({"timeout": 3}, TypeError, "generate() has no parameter 'timeout': use deadline_s"),
        ({"use_tqdm": False}, TypeError, "'use_tqdm': use progress"),
        ({"lora_request": None}, TypeError, "'lora_request': adapter=NAME names one"),
        ({"adapter": "x" * 257}, ValueError, "adapter has 257 characters"),
    ],
)
def test_terms_that_cannot_be_honoured_are_refused_by_name(
    llm: LLM, terms: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        llm.generate("x", **terms)
    assert words in str(caught.value)


def test_an_answer_that_is_not_there_in_its_time_is_an_error(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    with pytest.raises(RequestError, match=r"prompt 0: .*did not finish in (its )?time"):
        llm.generate("x", params, deadline_s=0.2)
    (output,) = llm.generate("x", SamplingParams(max_tokens=1), deadline_s=60)
    assert output.finished


def test_several_threads_may_call(llm: LLM) -> None:
    results: list[int] = []

    def call() -> None:
        results.append(len(llm.generate(["a", "b"], SamplingParams(max_tokens=2))))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [2, 2, 2, 2]


def test_a_notebook_cell_may_start_and_call(cell: Cell) -> None:
    assert cell[1] == ["Hello", "again"]


def test_the_model_keeps_its_name_while_its_scheduler_is_away(llm: LLM) -> None:
    client = llm._client
    (before,) = client._participant.of("scheduler", True)
    name = client.model
    assert name
    os.kill(before.identity.pid, signal.SIGKILL)
    names, was_away, deadline = {name}, False, time.monotonic() + 60
    while not [p for p in client._participant.of("scheduler", True) if p != before]:
        assert time.monotonic() < deadline
        was_away |= not client._participant.of("scheduler", True)
        names.add(client.model)
        time.sleep(0.001)
    assert was_away
    assert names == {name}
    assert llm.generate("x", SamplingParams(max_tokens=1))


def test_an_idle_library_stays_a_member(llm: LLM) -> None:
    member = llm._client._participant
    for _ in range(3):  # the router answers its beats, though nobody calls
        heard = member._last_heard
        until(lambda heard=heard: member._last_heard > heard)
    assert llm.generate("x", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"executor": "ray"}, "--executor ray"),
        ({"join": "tcp://127.0.0.1:5570"}, "--join tcp://127.0.0.1:5570"),
        (
            {"nodes": 2, "data_parallel_size": 2, "router": "tcp://127.0.0.1:5570"}
            | {"secret": "a secret of two hosts"},
            "--nodes 2",
        ),
    ],
)
def test_the_library_refuses_to_start_processes_on_other_hosts(
    settings: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is for `penstock serve`: .* over HTTP"):
        LLM(device="null", **settings)


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="no setting port: it is for clients over HTTP"):
        LLM(port=1)
    with pytest.raises(TypeError, match="no setting max_seqs: did you mean max_num_seqs") as caught:
        LLM(max_seqs=3)
    assert len(str(caught.value)) < 80, "the others are not named"
    with pytest.raises(
        TypeError, match="max_seq_len: use max_model_len; enable_expert_parallel: not"
    ):
        LLM(max_seq_len=3, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="max-num-seqs"):
        LLM(max_num_seqs=0)
    with pytest.raises(ServerFailed, match="/no/such/folder"):
        LLM("/no/such/folder")
    with pytest.raises(ServerFailed, match=r"no-such/model.*: hf download no-such/model$"):
        LLM("no-such/model", download=False)


def test_a_parameter_that_does_not_exist_is_told_the_way_out() -> None:
    slips: dict[str, str] = {
        "temprature": "did you mean temperature",
        "max_new_tokens": "use max_tokens",
        "guided_decoding": "use structured_outputs",
    }
    for name, words in slips.items():
        wrong: Any = {name: 1}
        with pytest.raises(TypeError, match=f"no parameter {name}: {words}"):
            SamplingParams(**wrong)
    assert SamplingParams(temperature=0.5).temperature == 0.5


SCRIPT = """
import os, sys
from penstock import LLM, BeamSearchParams, SamplingParams
llm = LLM(device="null")
output = llm.generate("Hello", SamplingParams(max_tokens=2))[0]
print(output.prompt, llm._server.process.pid, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("pass", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(0)", marks=pytest.mark.slow),
        pytest.param("1 / 0", marks=pytest.mark.slow),
        pytest.param("os._exit(0)", marks=pytest.mark.slow),
        "os.kill(os.getpid(), 9)",
        pytest.param("os.kill(os.getpid(), 15)", marks=pytest.mark.slow),
    ],
)
def test_a_script_without_a_main_guard_leaves_no_process(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "Hello"
    launcher = int(pid)
    process.wait(60)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(launcher) and time.monotonic() < deadline:
        if psutil.Process(launcher).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    left = [
        p.pid
        for p in psutil.process_iter(["pid", "status"])
        if _group(p.pid) == launcher and p.info["status"] != psutil.STATUS_ZOMBIE
    ]
    assert left == []


def _group(pid: int) -> int:
    """The session of a process: all of one library's processes share the launcher's."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def test_a_killed_launcher_is_an_error_and_not_a_hang(cell: Cell) -> None:
    llm, _ = cell
    timer = threading.Timer(0.5, os.kill, (llm._server.process.pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(ServerFailed, match="ended"):
        llm.generate(["x"] * 10, SamplingParams(max_tokens=500, ignore_eos=True))

"""KoboldAI's API over HTTP: what its clients send, and what they read."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest
from support.frontend.frontend_scripted import LENGTH, STOP, Client, forever, rejected, run, say

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.tasks import TOKENIZE
from penstock.protocol.wire.messages.requests import PromptText, Work
from penstock.protocol.wire.messages.tokens import TokenIds

GENERATE, STREAM = "/api/v1/generate", "/api/extra/generate/stream"
CHECK, ABORT = "/api/extra/generate/check", "/api/extra/abort"
ONE_KEY = {"Authorization": "Bearer key-one"}
OTHER_KEY = {"Authorization": "Bearer key-two"}


async def events(client: Client, **asked: Any) -> list[tuple[str, Any]]:
    """(event, data) of each event of a stream."""
    body = json.dumps({"prompt": "hi", **asked})
    async with client.session.post(client.url + STREAM, data=body) as response:
        raw = await response.read()
        assert response.status == 200, raw
        assert response.content_type == "text/event-stream"
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        event, data = block.split("\n")
        found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def work_of(**asked: Any) -> Work:
    """What the pipeline is asked to do for a body."""

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(GENERATE, {"prompt": "hi", **asked})
        assert status == 200, answer

    return run(use).works[0]


def test_a_whole_answer_has_its_text_and_why_it_ended() -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(GENERATE, {"prompt": "hi"})
        assert status == 200
        assert answer == {
            "results": [
                {
                    "text": "Hello world",
                    "finish_reason": "length",
                    "prompt_tokens": 5,
                    "completion_tokens": 2,
                }
            ]
        }

    run(use, say("Hello", " world", end=LENGTH, prompt_tokens=5))


def test_what_koboldai_lite_sends_with_each_request_is_taken() -> None:
    """All fields of its page, with the values that they have before somebody changes one."""
    sent: dict[str, Any] = {
        "n": 1, "max_context_length": 64, "max_length": 16, "rep_pen": 1, "temperature": 1,
        "top_p": 0.95, "top_k": 64, "top_a": 0, "typical": 1, "tfs": 1, "rep_pen_range": 360,
        "rep_pen_slope": 0.7, "sampler_order": [6, 0, 1, 3, 4, 2, 5], "memory": "",
        "trim_stop": True, "genkey": "KCPP4606", "min_p": 0, "dynatemp_range": 0,
        "dynatemp_exponent": 1, "smoothing_factor": 0, "smoothing_curve": 1, "nsigma": 0,
        "banned_tokens": [], "render_special": False, "logprobs": False,
        "replace_instruct_placeholders": True, "presence_penalty": 0, "logit_bias": {},
        "adaptive_target": -1, "adaptive_decay": 0.9, "use_default_badwordsids": False,
        "bypass_eos": False, "quiet": True, "stop_sequence": ["\n### Instruction:"],
    }  # fmt: skip
    work = work_of(**sent)
    assert (work.params.top_k, work.params.top_p) == (64, 0.95)


def test_each_of_several_answers_has_its_own_tokens() -> None:
    async def script(_: Work, sink: Sink) -> None:
        sink.on_accepted(5)
        for choice, tokens in ((0, 1), (1, 4)):
            sink.on_row(choice, "a", tokens)
            sink.on_row(choice, "b", 1, RowExtras(end=STOP))

    async def use(client: Client) -> None:
        _, answer, _ = await client.post(GENERATE, {"prompt": "hi", "n": 2})
        counts = [(one["prompt_tokens"], one["completion_tokens"]) for one in answer["results"]]
        assert counts == [(5, 2), (5, 5)]

    run(use, script)


@pytest.mark.parametrize("asked", [{}, {"genkey": "KCPP1"}])
def test_a_stream_is_events_of_tokens_and_the_last_one_says_why_it_ended(
    asked: dict[str, Any],
) -> None:
    async def use(client: Client) -> None:
        found = await events(client, **asked)
        assert {event for event, _ in found} == {"message"}
        *tokens, last = [data for _, data in found]
        assert "".join(one["token"] for one in tokens) == "Hello world"
        assert {one["finish_reason"] for one in tokens} == {None}
        assert last == {"token": "", "finish_reason": "length"}

    run(use, say("Hello", " world", end=LENGTH))


def test_samplers_become_sampling_parameters() -> None:
    params = work_of(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, rep_pen=1.1, presence_penalty=0.2,
        sampler_seed=42, stop_sequence=["\nYou:"], singleline=True, trim_stop=False,
        bypass_eos=True, render_special=True, banned_tokens=["bad"], logit_bias={"3": 1.5},
        max_length=10, max_context_length=50, n=2,
        # what clients always send
        rep_pen_range=360, rep_pen_slope=0.7, sampler_order=[6, 0, 1, 3, 4, 2, 5], top_a=0, tfs=1,
        typical=1, mirostat=0, mirostat_tau=5, mirostat_eta=0.1, dynatemp_range=0, memory="",
        dynatemp_exponent=1, smoothing_factor=0, use_default_badwordsids=False, images=[],
    ).params  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 40, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.n) == (1.1, 0.2, 2)
    assert (params.seed, params.stop, params.bad_words) == (42, ["\nYou:", "\n"], ["bad"])
    assert params.include_stop_str_in_output and params.ignore_eos
    assert not params.skip_special_tokens
    assert params.logit_bias == {3: 1.5}
    assert (params.max_tokens, params.truncate_prompt_tokens) == (10, 40)


def test_rarer_samplers_become_sampling_parameters() -> None:
    params = work_of(
        temperature=0.7, dynatemp_range=0.5, dynatemp_exponent=1.5, top_a=0.2, tfs=0.9, typical=0.8,
        eps_cutoff=0.01, eta_cutoff=0.02, nsigma=1.2, mirostat=2, mirostat_tau=4, mirostat_eta=0.3,
        smoothing_factor=0.4, smoothing_curve=2, xtc_threshold=0.2, xtc_probability=0.5,
        dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=3, dry_penalty_last_n=-1,
        dry_sequence_breakers=["."], sampler_order=[6, 0, 1, 3, 4, 2, 5],
    ).params  # fmt: skip
    assert (params.dynatemp_min, params.dynatemp_max) == (0.7 - 0.5, 1.2)
    assert (params.dynatemp_exponent, params.top_a, params.tfs, params.typical_p) == (
        1.5, 0.2, 0.9, 0.8,
    )  # fmt: skip
    assert (params.epsilon_cutoff, params.eta_cutoff, params.nsigma) == (0.01, 0.02, 1.2)
    assert (params.mirostat_mode, params.mirostat_tau, params.mirostat_eta) == (2, 4.0, 0.3)
    assert (params.smoothing_factor, params.smoothing_curve) == (0.4, 2.0)
    assert (params.xtc_threshold, params.xtc_probability) == (0.2, 0.5)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.8, 1.5, 3)
    assert (params.dry_range, params.dry_sequence_breakers) == (-1, ["."])
    assert params.sampler_order == [6, 0, 1, 3, 4, 2, 5]
    off = work_of(tfs=0, typical=0, dry_allowed_length=0).params
    assert (off.tfs, off.typical_p, off.dry_allowed_length) == (1.0, 1.0, 2)


def test_a_prompt_has_the_context_less_what_is_generated() -> None:
    work = work_of()
    assert work.prompt == PromptText("hi")
    params = work.params
    assert (params.max_tokens, params.truncate_prompt_tokens) == (32, 32)
    params = work_of(max_context_length=4096, max_length=60, sampler_seed=-1).params
    assert (params.max_tokens, params.truncate_prompt_tokens, params.seed) == (60, 4, None)


def test_a_grammar_is_read() -> None:
    grammar = work_of(grammar='root ::= "yes" | "no"').params.structured_outputs
    assert grammar is not None
    assert (grammar.kind, grammar.param) == ("grammar", "grammar")


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        (GENERATE, {"top_a": 1.2}, "top_a is 1.2; 0 to 1 is allowed"),
        (GENERATE, {"mirostat": 1}, "(mirostat) is 1; 2, Mirostat 2.0, or 0"),
        (GENERATE, {"tfs": 1.5, "typical": -1}, "typical is -1; above 0 and at most 1"),
        (GENERATE, {"dynatemp_range": 0.5}, "only together with temperature"),
        (GENERATE, {"sampler_order": [7]}, "sampler_order[0] is 7; 0 to 6 is allowed"),
        (GENERATE, {"sampler_order": [0, 1, 0]}, "top_k twice"),
        (GENERATE, {"sampler_order": [0, 6], "rep_pen": 1.1}, "6, the penalties, at place 2"),
        (GENERATE, {"guidance_scale": 1.5}, "not supported yet: guidance_scale"),
        (GENERATE, {"memory": "Once"}, "put it at the beginning of the prompt"),
        (GENERATE, {"max_length": 64}, "max_length is 64; less than the context, 64 tokens"),
        (GENERATE, {"prompt": ""}, "prompt is empty"),
        (GENERATE, {"grammar": '{"a": 1}'}, "grammar is JSON"),
        (GENERATE, {"seed": 3}, "use sampler_seed"),
        (STREAM, {"n": 2}, "a stream has one answer"),
        (
            GENERATE,
            {"prompt": "{{[INPUT]}}hi", "replace_instruct_placeholders": True},
            "the model's own tags",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(path: str, asked: dict[str, Any], words: str) -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(path, {"prompt": "hi", **asked})
        assert status == 400
        assert words in answer["detail"]["msg"]

    assert run(use).works == []


def test_an_error_ends_a_stream_as_an_event() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await asyncio.sleep(0)
        sink.on_rejected(rejected(500, "the worker is gone", kind="server_error"))

    async def use(client: Client) -> None:
        ((event, data),) = await events(client)
        assert event == "error"
        assert data == {"detail": {"msg": "the worker is gone", "type": "server_error"}}

    run(use, script)


async def talking(client: Client, body: dict[str, Any], headers: dict[str, str]) -> str:
    """Wait until a request that runs has said something; returns that."""
    for _ in range(500):
        _, answer, _ = await client.post(CHECK, body, headers=headers)
        if text := answer["results"][0]["text"]:
            return str(text)
        await asyncio.sleep(0.01)
    raise AssertionError("it says nothing")


@pytest.mark.parametrize("path", [GENERATE, STREAM])
def test_a_named_request_can_be_checked_and_aborted_by_its_sender_alone(path: str) -> None:
    async def use(client: Client) -> None:
        body = json.dumps({"prompt": "hi", "genkey": "KCPP1"})
        asking = asyncio.create_task(
            client.session.post(client.url + path, data=body, headers=ONE_KEY)
        )
        assert set(await talking(client, {"genkey": "KCPP1"}, ONE_KEY)) == {"x"}
        for key, headers in (("KCPP2", ONE_KEY), ("KCPP1", OTHER_KEY)):
            _, answer, _ = await client.post(CHECK, {"genkey": key}, headers=headers)
            assert answer["results"] == [{"text": ""}]
            _, answer, _ = await client.post(ABORT, {"genkey": key}, headers=headers)
            assert answer["success"] == "false"
        _, answer, _ = await client.post(ABORT, {"genkey": "KCPP1"}, headers=ONE_KEY)
        assert answer["success"] == "true"
        async with await asking as response:
            raw = await response.read()
        assert response.status == 200
        if path == GENERATE:
            (result,) = json.loads(raw)["results"]
            assert set(result["text"]) == {"x"} and result["finish_reason"] is None
        else:
            assert raw.endswith(b'data: {"token":"","finish_reason":"stop"}\n\n')
        assert await client.get(CHECK, headers=ONE_KEY)

    gateway = run(use, forever, ServerConfig(api_key=["key-one", "key-two"]))
    assert gateway.cancelled == [1]


def test_tokens_of_a_text_are_counted() -> None:
    async def script(work: Work, sink: Sink) -> None:
        assert work.head.task == TOKENIZE
        assert work.prompt == PromptText("hi", add_special_tokens=False)
        sink.on_accepted(3)
        ids = array("i", [1, 5, 9]).tobytes()
        sink.on_row(0, "", 0, RowExtras(end=STOP, events=[TokenIds(ids)]))

    async def use(client: Client) -> None:
        body = {"prompt": "hi", "special": False}
        status, answer, _ = await client.post("/api/extra/tokencount", body)
        assert (status, answer) == (200, {"value": 3, "ids": [1, 5, 9]})

    run(use, script)


def test_facts_about_the_server_are_told() -> None:
    facts = {
        "/api/v1/model": {"result": "org/model"},
        "/api/v1/config/max_context_length": {"value": 64},
        "/api/extra/true_max_context_length": {"value": 64},
        "/api/v1/config/max_length": {"value": 32},
    }

    async def use(client: Client) -> None:
        for path, fact in facts.items():
            status, answer, _ = await client.get(path)
            assert (status, answer) == (200, fact)
        _, answer, _ = await client.get("/api/extra/version")
        assert answer["result"] == "KoboldCpp" and not answer["protected"]

    run(use)

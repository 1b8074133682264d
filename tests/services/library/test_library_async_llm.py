"""Many requests at once from an asyncio program, and requests that a program steps through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from support.library.async_clients import (
    GREEDY,
    LONG,
    SETTINGS,
    Program,
    aborted_and_killed,
    open_requests,
    outputs,
    prompt,
    rest_of,
)
from support.library.joined import joining

from penstock import LLM, AsyncLLM, LLMEngine, RequestOutput, SamplingParams
from penstock.protocol.wire.messages.requests import RequestHead, Work
from penstock.services.library.member import Member, Submission
from penstock.services.library.outputs import RequestError
from penstock.services.library.requests import Terms
from penstock.services.library.results import OutputKind

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def program(llm: LLM) -> Iterator[Program]:
    running = Program(llm)
    yield running
    running.close()


@pytest.fixture(scope="module")
def engine(llm: LLM) -> Iterator[LLMEngine]:
    with joining(llm):
        engine = LLMEngine(**SETTINGS)
    yield engine
    engine.close()


def stepped(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """All outputs of its requests, by their ids."""
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def ids(listed: list[RequestOutput]) -> list[int]:
    return [token for output in listed for token in output.outputs[0].token_ids]


def text(listed: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in listed)


def test_all_kinds_of_output_and_steps_give_the_same_tokens(
    program: Program, engine: LLMEngine
) -> None:
    for number in range(3):
        whole, new, last = program.run_all(
            outputs(program.llm, number, kind) for kind in ("cumulative", "delta", "final")
        )
        assert [output.finished for output in whole] == [False] * (len(whole) - 1) + [True]
        assert len(last) == 1 and last[0].outputs[0].finish_reason == "length"
        assert whole[-1].outputs == last[0].outputs
        assert ids(new) == last[0].outputs[0].token_ids and text(new) == last[0].outputs[0].text
        assert last[0].prompt_token_ids == prompt(number)
        engine.add_request(f"new {number}", prompt(number), GREEDY, output_kind="delta")
        engine.add_request(f"last {number}", prompt(number), GREEDY, output_kind="final")
        assert engine.get_num_unfinished_requests() == 2
        found = stepped(engine)
        assert found[f"last {number}"][0].outputs == last[0].outputs
        assert ids(found[f"new {number}"]) == last[0].outputs[0].token_ids


def test_a_chat_streams_its_thinking_and_its_text(program: Program) -> None:
    async def ask(kind: OutputKind) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=200)
        return [one async for one in program.llm.chat(QUESTION, params, output_kind=kind)]

    new, (last,) = program.run_all(map(ask, ("delta", "final")))
    assert last.outputs[0].text.strip() == "42" and "7+5" in last.outputs[0].reasoning
    assert text(new) == last.outputs[0].text
    thought = "".join(output.outputs[0].reasoning for output in new)
    assert thought == last.outputs[0].reasoning


def test_choices_and_logprobs_stream_too(program: Program) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=5, ignore_eos=True, logprobs=2)

    async def ask(kind: OutputKind) -> list[RequestOutput]:
        return [one async for one in program.llm.generate("Once", params, output_kind=kind)]

    new, (last,) = program.run(ask("delta")), program.run(ask("final"))
    for choice in last.outputs:
        mine = [one for output in new for one in output.outputs if one.index == choice.index]
        assert [token for one in mine for token in one.token_ids] == choice.token_ids
        assert [named for one in mine for named in one.logprobs or []] == choice.logprobs
        assert [one.finish_reason for one in mine if one.finish_reason] == ["length"]


def test_every_generator_ends_once_though_some_are_aborted_and_a_worker_dies(
    program: Program,
) -> None:
    aborted_and_killed(program, 40, [0.4], range(0, 40, 7))


def test_a_request_may_be_aborted_before_anybody_reads_its_generator(program: Program) -> None:
    llm = program.llm

    async def go() -> None:
        dropped, kept = llm.generate(prompt(1), LONG, "early"), llm.generate("x", LONG, "kept")
        await llm.abort("early")
        (output,) = [one async for one in dropped]
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
        del dropped
        await llm.abort("early")  # nobody has it any more
        again = llm.generate(prompt(1), LONG, "early")
        assert not (await anext(again)).finished
        await again.aclose()
        await anext(kept)
        await kept.aclose()

    program.run(go())
    assert not llm._awaited


@pytest.mark.parametrize("leave", ["cancel the task", "close the generator"])
def test_who_leaves_takes_the_request_along(program: Program, leave: str) -> None:
    llm = program.llm

    async def go() -> None:
        generator = llm.generate(prompt(1), LONG)
        await anext(generator)
        assert len(open_requests(llm)) == 1
        if leave == "cancel the task":
            task = asyncio.create_task(rest_of(generator))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await generator.aclose()
        assert not open_requests(llm) and not llm._awaited

    program.run(go())


def test_requests_beyond_the_limit_wait_and_may_be_given_up(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = program.llm
    monkeypatch.setattr(llm, "_slots", asyncio.Semaphore(1))

    async def three() -> None:
        async def all_of(name: str, params: SamplingParams) -> list[RequestOutput]:
            return [one async for one in llm.generate(prompt(1), params, name)]

        first = asyncio.create_task(all_of("first", LONG))
        while not open_requests(llm):
            await asyncio.sleep(0)
        second, third = (asyncio.create_task(all_of(name, GREEDY)) for name in ("second", "third"))
        while len(llm._awaited) < 3:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="'second' runs already"):
            await anext(llm.generate(prompt(1), GREEDY, "second"))
        await llm.abort("second")
        (given_up,) = await second
        assert given_up.finished and given_up.outputs[0].finish_reason == "abort"
        assert len(open_requests(llm)) == 1 and not third.done()
        await llm.abort("first")
        assert (await first)[-1].outputs[0].finish_reason == "abort"
        assert (await third)[-1].outputs[0].finish_reason == "length"

    program.run(three())


def test_an_aborted_stream_of_deltas_repeats_nothing_and_keeps_the_ends_it_had(
    program: Program,
) -> None:
    llm = program.llm
    params = SamplingParams(n=2, temperature=0, max_tokens=1000, stop=["zzz"], min_tokens=900)

    async def go() -> list[RequestOutput]:
        found = []
        async for output in llm.generate(prompt(3), params, "a", output_kind="delta"):
            found.append(output)
            if len(found) == 5:
                await llm.abort("a")
        return found

    found = program.run(go())
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    assert {one.finish_reason for one in found[-1].outputs} == {"abort"}
    longer = SamplingParams(temperature=0, max_tokens=60, min_tokens=60)  # no end token, as above

    async def undisturbed() -> list[RequestOutput]:
        return [one async for one in llm.generate(prompt(3), longer, output_kind="final")]

    (whole,) = program.run(undisturbed())
    for number in range(2):
        mine = [one for output in found for one in output.outputs if one.index == number]
        told = [token for one in mine for token in one.token_ids]
        both = min(len(told), len(whole.outputs[0].token_ids))
        assert both and told[:both] == whole.outputs[0].token_ids[:both]


def test_the_arguments_of_a_tool_call_come_in_deltas(program: Program) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "note",
                "parameters": {
                    "type": "object",
                    "properties": {"text": {"type": "string", "minLength": 60, "maxLength": 70}},
                    "required": ["text"],
                },
            },
        }
    ]

    async def ask(kind: OutputKind) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=400)
        asked = program.llm.chat(
            QUESTION, params, tools=tools, tool_choice="required", output_kind=kind,
            chat_template_kwargs={"enable_thinking": False},
        )  # fmt: skip
        return [one async for one in asked]

    new, (last,) = program.run_all(map(ask, ("delta", "final")))
    (call,) = last.outputs[0].tool_calls
    parts = [one for output in new for choice in output.outputs for one in choice.tool_calls]
    assert len(parts) > 1, "what comes while nobody reads is put together, but not all of it"
    assert {(part.id[:5], part.name) for part in parts} == {(call.id[:5], "note")}
    assert "".join(part.arguments for part in parts) == call.arguments


@pytest.mark.parametrize(
    "client",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("LLM", "LLMEngine")), "AsyncLLM"],
)
def test_more_structured_prompts_than_are_encoded_at_once_are_answered(
    client: str, program: Program, engine: LLMEngine
) -> None:
    """A tokenizer refuses what is beyond the half of its room that one user may take."""
    count = 150
    params = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs={"choice": ["yes", "no"]}
    )

    async def all_at_once() -> list[RequestOutput]:
        async def one(number: int) -> RequestOutput:
            return await anext(program.llm.generate(prompt(number), params, output_kind="final"))

        return await asyncio.gather(*(one(number) for number in range(count)))

    if client == "AsyncLLM":
        found = program.run(all_at_once())
    elif client == "LLMEngine":
        for number in range(count):
            engine.add_request(str(number), prompt(number), params, output_kind="final")
        found = [output for listed in stepped(engine).values() for output in listed]
    else:
        with LLM(**SETTINGS) as llm:
            found = llm.generate([prompt(number) for number in range(count)], params)
    assert len(found) == count
    assert {output.outputs[0].text for output in found} <= {"yes", "no"}


def test_what_is_wrong_is_said(program: Program, engine: LLMEngine) -> None:
    llm = program.llm
    with pytest.raises(ValueError, match="temperature is 1000"):
        llm.generate("x", SamplingParams(temperature=1000.0))
    with pytest.raises(ValueError, match="2 prompts were given"):
        llm.generate(["x", "y"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="use max_model_len"):
        AsyncLLM(max_seq_len=4096)

    async def too_long() -> None:
        await anext(llm.generate([5] * 5000, request_id="long"))

    with pytest.raises(ValueError, match=r"request long: .*2,?048"):
        program.run(too_long())
    engine.add_request("long", [5] * 5000)
    engine.add_request("good", [5, 6], GREEDY)
    errors, good = [], None
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                good = output
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) == 1 and errors[0].startswith("request long: ")
    assert good is not None and len(good.outputs[0].token_ids) == 24


def test_terms_of_a_request_travel_with_it_and_its_time_runs_out(
    program: Program, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[RequestHead] = []

    def watch(client: Member) -> None:
        submit = client.submit

        def watched(work: Work, *rest: Any, **more: Any) -> Submission:
            submission = submit(work, *rest, **more)
            assert submission.request is not None
            heads.append(submission.request.work.head)
            return submission

        monkeypatch.setattr(client, "submit", watched)

    async def last(stream: AsyncGenerator[RequestOutput]) -> RequestOutput:
        return [output async for output in stream][-1]

    llm, one = program.llm, SamplingParams(max_tokens=1)
    program.run(llm.start())
    assert llm._processes.client is not None
    watch(llm._processes.client)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    terms: Terms = {"user": "ann", "cache_salt": "a", "trace_headers": {"traceparent": trace}}
    program.run(last(llm.generate("x", one, "mine", priority=-3, deadline_s=50, **terms)))
    program.run(last(llm.chat(QUESTION, one, "yours", priority=4, **terms)))
    watch(engine._client)
    engine.add_request("theirs", "x", one, priority=5, **terms)
    stepped(engine)
    said = [(head.request_id, head.priority) for head in heads]
    assert said == [("mine", -3), ("yours", 4), ("theirs", 5)]
    assert {(head.tenant, head.cache_salt, head.trace) for head in heads} == {("ann", "a", trace)}
    assert heads[0].time_left is not None and 40 < heads[0].time_left <= 50
    with pytest.raises(TypeError, match=r"add_request.* 'arrival_time': a request arrives when"):
        engine.add_request("x", "x", arrival_time=1.0)  # type: ignore[call-arg]
    long = SamplingParams(max_tokens=2000, ignore_eos=True)
    with pytest.raises(RequestError, match=r"request late: .*did not finish in"):
        program.run(last(llm.generate("x", long, "late", deadline_s=0.2)))


def test_an_aborted_request_of_an_engine_says_nothing_more(engine: LLMEngine) -> None:
    engine.add_request("a", QUESTION, SamplingParams(max_tokens=1000, ignore_eos=True))
    while not engine.step():
        pass
    engine.abort_request(["a", "unknown"])
    assert not engine.has_unfinished_requests() and engine.step() == []
    limits = engine.get_model_config()
    assert (limits.model, limits.max_model_len) == ("penstock-demo", 2048)


def test_tokens_of_a_text_are_those_of_its_prompt(program: Program) -> None:
    async def both() -> tuple[list[int], list[int]]:
        found = await program.llm.tokenize("Hello world")
        params = SamplingParams(max_tokens=1)
        async for output in program.llm.generate("Hello world", params, output_kind="final"):
            return found, output.prompt_token_ids
        raise AssertionError("no output")

    found, expected = program.run(both())
    assert found == expected and found

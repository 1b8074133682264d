"""Large bodies: the same answers as for small ones, and streams that go on beside them."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.frontend.frontend_scripted import Client, ScriptedGateway, run, say, serving

from penstock.client.gateway_interface import ServedModel
from penstock.client.sink import Sink
from penstock.protocol.wire.messages.requests import Chat, Work
from penstock.services.frontend import token_arrays
from penstock.services.frontend.bodies.requests import CompletionBody
from penstock.services.frontend.body import MAX_VALUES, decode_object, no_pause
from penstock.services.frontend.dialects.completions import CompletionsDialect
from penstock.services.frontend.dialects.embeddings import EmbeddingsDialect
from penstock.services.frontend.dialects.interface import Dialect
from penstock.services.frontend.dialects.scores import ClassifyDialect
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.prompts import parse_prompts
from penstock.services.frontend.request_body import LARGE_BODY_BYTES
from penstock.services.frontend.token_arrays import decode_with_ids

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
parse = CompletionsDialect().parse
MODEL = ServedModel("m", [], 300, 1000)
BLANKS = st.text(alphabet=" \n\t", max_size=3)
ITEMS = st.one_of(
    st.integers(-1, 1001).map(str),
    st.sampled_from(["1.5", "true", "null", '"a]"', "[1]", "", "01", "1e3", '"', "{}", "]", " "]),
)
ARRAYS = st.builds(
    lambda ids, odd, blank: f"[{f'{blank},'.join([*map(str, ids), *odd])}{blank}]",
    st.lists(st.integers(0, 999), max_size=320),
    st.lists(ITEMS, max_size=2),
    BLANKS,
)
STRINGS = st.text(alphabet='a"\\[],:', max_size=8).map(json.dumps)
PROMPTS = st.one_of(
    ARRAYS, STRINGS, st.lists(ARRAYS | STRINGS, max_size=5).map(lambda p: f"[{','.join(p)}]")
)
FIELDS = st.sampled_from(
    ['"user": "x"', '"user": "\\"prompt\\": [1,2"', '"n": 2', '"truncate_prompt_tokens": 3',
     '"metadata": {"prompt": [1, 2, 3]}', '"metadata": {"prompt": "x"}', '"prompt": [4, 5]',
     '"stop": ["prompt", "["]', '"pro\\u006dpt": "x"', '"unknown": [1]']
)  # fmt: skip
BODIES = st.builds(
    lambda before, prompt, after: "{" + ",".join([*before, f'"prompt" : {prompt}', *after]) + "}",
    st.lists(FIELDS, max_size=2),
    PROMPTS,
    st.lists(FIELDS, max_size=2),
).map(str.encode)


@settings(max_examples=150, deadline=None)
@given(BODIES)
def test_a_large_body_is_read_and_refused_exactly_as_a_small_one(body: bytes) -> None:
    def outcome(**how: Any) -> Any:
        try:
            return parse(body, [MODEL], **how)
        except ApiError as error:
            return error.status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_arrays, "MIN_CUT_BYTES", 1)
        patch.setattr(token_arrays, "SLICE_BYTES", 16)
        assert outcome(pause=no_pause) == outcome()


def test_slices_and_ends_of_arrays_are_put_together_right() -> None:
    model = ServedModel("m", [], 10**6, 10**6)
    prompts: list[Any] = [list(range(100_000)), 'a "quoted] [text', [7] * 70_000, [1, 2]]
    prompts.append([999_999] * 9000)
    for indent in (None, 1):
        body = json.dumps({"n": 1, "prompt": prompts, "user": "x"}, indent=indent).encode()
        prompt: Any = decode_with_ids(body, CompletionBody, no_pause).prompt
        assert [type(one).__name__ for one in prompt] == [
            "IdArray", "str", "IdArray", "list", "IdArray",
        ]  # fmt: skip
        assert parse_prompts(prompt, model) == parse_prompts(prompts, model)


@pytest.mark.parametrize("rest", ["", ',"truncate_prompt_tokens":"x"', ',"temperature":-1'])
@pytest.mark.parametrize(
    ("field", "dialect"),
    [
        ("prompt", CompletionsDialect()),
        ("input", EmbeddingsDialect()),
        ("input", ClassifyDialect()),
    ],
)
def test_of_a_prompt_that_is_too_long_no_token_is_decoded(
    field: str, dialect: Dialect, rest: str
) -> None:
    body = f'{{"{field}":[{",".join(["123"] * 2_000_000)}]{rest}}}'.encode()
    model = ServedModel("m", [], 300, 1000, longest_task_prompt=299)
    began = time.process_time()
    for _ in range(20):
        with pytest.raises(ApiError) as error:
            dialect.parse(body, [model], no_pause)
        assert error.value.status == 400
        assert error.value.param in (field, "truncate_prompt_tokens", "temperature")
        assert rest or error.value.code == "context_length_exceeded"
    decoding = time.process_time()
    decode_object(b'{"prompt":0}')
    json.loads(body)
    assert (decoding - began) / 20 < (time.process_time() - decoding) / 10


@pytest.mark.parametrize(
    ("field", "dialect"), [("prompt", CompletionsDialect()), ("input", EmbeddingsDialect())]
)
def test_a_wrong_id_far_behind_is_named_by_its_position(field: str, dialect: Dialect) -> None:
    model = ServedModel("m", [], 10**6, 1000)
    for wrong, words in (
        ("1000", "1000 at position 90000"),
        ('"x"', "among token ids"),
        ("", "behind"),
    ):
        body = f'{{"{field}":[{",".join([*["1"] * 90_000, wrong, "2"])}]}}'.encode()
        with pytest.raises(ApiError, match=words) as error:
            dialect.parse(body, [model], no_pause)
        assert error.value.param == field


def test_values_that_are_no_token_ids_have_a_limit() -> None:
    body = b'{"prompt":"x","junk":[' + b"1," * (MAX_VALUES + 1) + b"1]}"
    for how in (None, no_pause):
        with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values"):
            parse(body, [MODEL], how)


def ids_of(count: int) -> bytes:
    return b'{"max_tokens":1,"prompt":[' + b"123456," * (count - 1) + b"123456]}"


def test_a_large_chat_is_served_as_a_small_one() -> None:
    text = 'a "[{\\ ' * LARGE_BODY_BYTES

    async def use(client: Client) -> None:
        message = {"role": "user", "content": text}
        status, answer, _ = await client.post(CHAT, {"messages": [message]})
        assert status == 200, answer
        for wrong in ({"role": "king", "content": text}, [[[]]] * LARGE_BODY_BYTES):
            status, answer, _ = await client.post(CHAT, {"messages": [wrong]})
            assert (status, len(answer["error"]["message"]) < 600) == (400, True)

    (work,) = run(use).works
    assert isinstance(work.prompt, Chat)
    assert json.loads(work.prompt.messages)[0]["content"] == text


async def gaps_of_a_stream(client: Client, meanwhile: Callable[[], Any]) -> list[float]:
    """Seconds between the frames of a stream that ends when ``meanwhile`` has."""
    gaps: list[float] = []
    body = json.dumps({"prompt": "neighbour", "stream": True}).encode()
    async with client.session.post(client.url + TEXT, data=body) as response:
        other = asyncio.ensure_future(meanwhile())
        last = time.perf_counter()
        while not other.done():
            await response.content.readuntil(b"\n\n")
            gaps.append((now := time.perf_counter()) - last)
            last = now
        await other
    return gaps


@pytest.mark.parametrize("max_model_len", [4096, 2_000_000], ids=["rejected", "accepted"])
def test_a_stream_goes_on_beside_bodies_of_eight_megabytes(max_model_len: int) -> None:
    """The bodies come from another process, so that only the server's work is in this one."""
    frame_s = 0.02

    async def script(work: Work, sink: Sink) -> None:
        if not getattr(work.prompt, "text", ""):
            await say("x")(work, sink)
            return
        sink.on_accepted(1)
        while True:
            sink.on_row(0, "x", 1)
            await asyncio.sleep(frame_s)

    async def main() -> tuple[list[float], list[int]]:
        gateway = ScriptedGateway(script)
        gateway.served = [ServedModel("m", [], max_model_len, 200_000)]
        async with serving(gateway) as client:
            sender = await asyncio.create_subprocess_exec(
                "python3", "-c", SENDER, str(client.port), stdout=asyncio.subprocess.PIPE,
                stdin=asyncio.subprocess.PIPE,
            )  # fmt: skip

            async def send() -> list[int]:
                said, _ = await sender.communicate(ids_of(1_150_000))
                return list(map(int, said.split()))

            statuses: list[int] = []

            async def meanwhile() -> None:
                statuses.extend(await send())

            return await gaps_of_a_stream(client, meanwhile), statuses

    medians: list[float] = []
    while len(medians) < 4 and min(medians, default=1.0) >= 1.5 * frame_s:  # others are busy, too
        gaps, statuses = asyncio.run(main())
        assert statuses == [200 if max_model_len > 10**6 else 400] * 10
        medians.append(statistics.median(gaps))
    assert min(medians) < 1.5 * frame_s


SENDER = """
import http.client, sys, threading
body = sys.stdin.buffer.read()
said = []
def post():
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    said.append(connection.getresponse().status)
threads = [threading.Thread(target=post) for _ in range(10)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*said)
"""

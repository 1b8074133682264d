"""The OpenAI Python SDK works unchanged."""

from __future__ import annotations

import openai
import pytest
from support.pipeline.served import BUILT_IN, SharedServers


@pytest.fixture(scope="module")
def client(shared_server: SharedServers) -> openai.OpenAI:
    url = shared_server(*BUILT_IN).url
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def test_the_served_model_is_listed_and_found_by_name(client: openai.OpenAI) -> None:
    listed = [model.id for model in client.models.list()]
    assert listed
    assert client.models.retrieve(listed[0]).id == listed[0]


def test_a_chat_answer_has_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    model = next(iter(client.models.list())).id
    answer = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is a penstock?"}]},
        ],
        max_completion_tokens=12,
        temperature=0,
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_gives_the_same_text_as_an_unstreamed_one(client: openai.OpenAI) -> None:
    model = next(iter(client.models.list())).id
    messages = [{"role": "user", "content": "Tell me something — ünïcödé 🙂"}]
    whole = client.chat.completions.create(
        model=model, messages=messages, max_tokens=40, temperature=0.8, seed=7, n=2
    )
    pieces = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=40, temperature=0.8, seed=7, n=2,
        stream=True, stream_options={"include_usage": True},
    ):  # fmt: skip
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert pieces == {c.index: c.message.content for c in whole.choices}
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_text_and_token_ids_and_lists_of_both(client: openai.OpenAI) -> None:
    model = next(iter(client.models.list())).id
    for prompt, count in (("Once", 1), ([5, 6, 7], 1), (["a", "b", "c"], 3), ([[5], [6, 7]], 2)):
        answer = client.completions.create(
            model=model, prompt=prompt, max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert answer.usage is not None and answer.usage.completion_tokens == 5 * count


def test_a_streamed_completion_ends_at_a_stop_string(client: openai.OpenAI) -> None:
    model = next(iter(client.models.list())).id
    whole = client.completions.create(model=model, prompt="Once", max_tokens=60, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    pieces, reason = "", None
    for chunk in client.completions.create(
        model=model, prompt="Once", max_tokens=60, temperature=0, stop=[stop], stream=True
    ):
        pieces += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    assert pieces == text[: text.index(stop)]
    assert reason == "stop"


def test_errors_are_the_sdks_own_exceptions(client: openai.OpenAI) -> None:
    """That of a wrong key: ``test_pipeline_two_frontends``."""
    model = next(iter(client.models.list())).id
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt="x", temperature=1e9)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_handed_back_open_is_continued_as_it_would_have_gone_on(
    client: openai.OpenAI, stream: bool
) -> None:
    model = next(iter(client.models.list())).id
    question = {"role": "user", "content": "What is the capital of France?"}
    whole = client.chat.completions.create(model=model, messages=[question], temperature=0)
    text = whole.choices[0].message.content or ""
    begun = " ".join(text.split(" ")[:2])
    assert text.startswith(begun) and len(begun) < len(text)
    messages = [question, {"role": "assistant", "content": begun}]
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    asked = {"model": model, "messages": messages, "temperature": 0, "extra_body": ending}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        rest = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        stop_reason = chunks[-1].choices[0].model_extra["stop_reason"]
    else:
        answer = client.chat.completions.create(**asked)
        rest = answer.choices[0].message.content or ""
        stop_reason = answer.choices[0].model_extra["stop_reason"]
    assert begun + rest == text
    assert stop_reason is None  # the model's own end token

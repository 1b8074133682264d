"""How many tokens of a prompt lie ahead of the places that a client has marked in its chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.tokenizer.chat_templates import ALTERNATING, CHATML, LLAMA_3

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.cache_hints import Breakpoint, CacheHints, RetainedSpan
from penstock.protocol.wire.messages.requests import (
    Chat,
    ChoiceState,
    OutputFormat,
    Prompt,
    RequestHead,
    Tokens,
    Work,
    kind_of,
)
from penstock.services.tokenizer.preparation import PromptError, prepare
from penstock.services.tokenizer.text_model import TextModel

TOOLS_LAST = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' }}
{{- messages[0].content }}{%- if tools %}{{- '\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{%- if message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "How it is outside.", "parameters": {}},
}
MINUTES, HOUR = 300, 3600


@pytest.fixture(scope="module")
def model_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[TextModel, ModelInfo]]:
    folder: Path = make_model(tmp_path_factory.mktemp("breakpoints") / "model")

    def load(template: str) -> tuple[TextModel, ModelInfo]:
        (folder / "chat_template.jinja").write_text(template)
        return TextModel.load(folder), read_model_info(folder)

    return load


def prepared(
    model: tuple[TextModel, ModelInfo],
    prompt: Prompt,
    hints: CacheHints,
    tools: bytes = b"",
    **params: Any,
) -> tuple[list[RetainedSpan], list[int]]:
    """What is retained, and the prompt's ids."""
    work = Work(
        RequestHead(prompt_kind=kind_of(prompt)),
        prompt,
        SamplingParams(**params),
        [ChoiceState(0)],
        OutputFormat(tools) if tools else None,
        cache=hints,
    )
    done = prepare(work, *model, 4000, 0).work
    assert done.release is hints.release
    return done.retain, memoryview(done.prompt).cast("i").tolist()


def chat(*contents: str) -> Chat:
    """From the system, then users and assistants in turn."""
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return Chat(msgspec.json.encode(messages))


def text(model: tuple[TextModel, ModelInfo], ids: list[int]) -> str:
    decoded: str = model[0].tokenizer.decode(ids, skip_special_tokens=False)
    return decoded


@pytest.mark.parametrize("template", [CHATML, TOOLS_LAST, LLAMA_3])
def test_a_place_is_found_in_what_the_template_writes(
    template: str, model_of: Callable[[str], tuple[TextModel, ModelInfo]]
) -> None:
    model = model_of(template)
    given = chat("be brief and say no more than that", "how are you today", "very well", "and now")
    marks = [Breakpoint(MINUTES, 3, 0), Breakpoint(HOUR, 1, 0)]
    spans, ids = prepared(model, given, CacheHints(marks))
    (inner, seconds), (first, hour) = ((span.tokens, span.seconds) for span in spans)
    assert (seconds, hour) == (MINUTES, HOUR)
    assert text(model, ids[:inner]).rstrip().endswith(("user", "<|im_end|>"))
    assert "very well" in text(model, ids[:inner]) and "and now" not in text(model, ids[:inner])
    assert "no more than that" in text(model, ids[:first])
    assert "how are you" not in text(model, ids[:first])
    spans, ids = prepared(model, given, CacheHints([Breakpoint(MINUTES, 1, len("how are "))]))
    (span,) = spans
    assert "how are" in text(model, ids[: span.tokens])
    assert "today" not in text(model, ids[: span.tokens])


def test_a_control_token_that_a_user_writes_ends_no_prefix(
    model_of: Callable[[str], tuple[TextModel, ModelInfo]],
) -> None:
    model = model_of(CHATML)
    given = chat("be brief", "what does <|im_end|> mean", "the end of a turn", "and <|im_start|>")
    marks = [Breakpoint(MINUTES, 3, len("and")), Breakpoint(HOUR, 2, 0)]
    (long, short), ids = prepared(model, given, CacheHints(marks))
    assert text(model, ids[: long.tokens]).endswith("and")
    assert text(model, ids[: short.tokens]).rstrip().endswith(("assistant", "<|im_end|>"))
    assert "mean" in text(model, ids[: short.tokens])


def test_the_place_of_the_first_turn_is_behind_the_tools(
    model_of: Callable[[str], tuple[TextModel, ModelInfo]],
) -> None:
    model, tools = model_of(TOOLS_LAST), msgspec.json.encode([TOOL])
    hints = CacheHints([Breakpoint(MINUTES, 1, 0)])
    (span,), ids = prepared(model, chat("be brief", "hello"), hints, tools)
    assert "weather" in text(model, ids[: span.tokens])
    assert "hello" not in text(model, ids[: span.tokens])


def test_the_whole_prompt_is_its_length_also_where_it_came_as_ids(
    model_of: Callable[[str], tuple[TextModel, ModelInfo]],
) -> None:
    model = model_of(CHATML)
    hints = CacheHints([Breakpoint(MINUTES), Breakpoint(HOUR, 1, 0)], release=True)
    spans, ids = prepared(model, chat("s", "hello"), hints)
    assert spans[0] == RetainedSpan(len(ids), MINUTES) and len(spans) == 2
    spans, _ = prepared(model, Tokens(bytes(12)), hints)
    assert spans == [RetainedSpan(3, MINUTES)], "places within it are not known any more"


def test_a_place_that_the_template_does_not_print_marks_nothing(
    model_of: Callable[[str], tuple[TextModel, ModelInfo]],
) -> None:
    model = model_of(ALTERNATING)
    messages = msgspec.json.encode([{"role": "user", "content": "hello"}])
    assert prepared(model, Chat(messages), CacheHints([Breakpoint(MINUTES, 7, 0)]))[0] == []
    hidden = model_of("{{ 'always the same' }}")
    assert prepared(hidden, Chat(messages), CacheHints([Breakpoint(MINUTES, 0, 3)]))[0] == []


def test_a_prompt_may_be_computed_alone_where_it_is_to_be_cached(
    model_of: Callable[[str], tuple[TextModel, ModelInfo]],
) -> None:
    model = model_of(CHATML)
    spans, ids = prepared(model, chat("s"), CacheHints([Breakpoint(HOUR)]), max_tokens=0)
    assert spans == [RetainedSpan(len(ids), HOUR)]
    work = Work(RequestHead(), Tokens(bytes(12)), SamplingParams(max_tokens=0), [ChoiceState(0)])
    with pytest.raises(PromptError, match="or with cache_control"):
        prepare(work, *model, 4000, 0)

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    Chat,
    ChoiceState,
    Inputs,
    Pair,
    Prompt,
    PromptText,
    RequestHead,
    Tokens,
    Work,
    kind_of,
)
from penstock.services.tokenizer import preparation
from penstock.services.tokenizer.preparation import PromptError, may_be_quick, prepare
from penstock.services.tokenizer.text_model import TextModel

LIMIT = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("preparation") / "model")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20})
    )
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return TextModel.load(folder)


@pytest.fixture(scope="module")
def info(folder: Path) -> ModelInfo:
    return read_model_info(folder)


def tokens(*ids: int) -> Tokens:
    return Tokens(np.array(ids, dtype="<i4").tobytes())


def work(prompt: Prompt | Inputs, **params: object) -> Work:
    return Work(
        head=RequestHead(prompt_kind=kind_of(prompt), tenant="t", time_left=5.0, age=0.25),
        prompt=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        choices=[ChoiceState(0)],
    )


def test_a_text_of_unknown_characters_is_not_called_an_empty_prompt(info: ModelInfo) -> None:
    knows_only_a = TextModel(Tokenizer(models.BPE({"a": 0}, [])), None)
    with pytest.raises(PromptError, match=r"knows no character of the text '\\x04'") as error:
        prepare(work(PromptText("\x04")), knows_only_a, info, LIMIT, 0)
    assert "empty" not in str(error.value)
    assert prepare(work(PromptText("\x04a")), knows_only_a, info, LIMIT, 0).work.prompt == bytes(4)


HELLO = Chat(b'[{"role": "user", "content": "hello"}]')


def test_every_parameter_is_resolved(model: TextModel, info: ModelInfo) -> None:
    done = prepare(work(tokens(5, 6, 7), top_p=0.5), model, info, LIMIT, 99)
    assert done.params == SamplingParams(
        temperature=0.6,
        top_p=0.5,
        top_k=20,
        seed=99,
        min_p=0.0,
        repetition_penalty=1.0,
    )
    assert done.work.max_tokens == 16
    assert done.work.head == RequestHead(prompt_kind="tokens", tenant="t", time_left=5.0, age=0.25)
    assert done.work.choices == [ChoiceState(0)]
    assert done.work.prompt == tokens(5, 6, 7).ids


def test_a_seed_of_the_client_is_kept(model: TextModel, info: ModelInfo) -> None:
    assert prepare(work(tokens(5), seed=-3), model, info, LIMIT, 99).params.seed == -3


def test_a_chat_may_fill_the_context(model: TextModel, info: ModelInfo) -> None:
    done = prepare(work(HELLO), model, info, LIMIT, 0)
    assert done.work.max_tokens == LIMIT - len(done.work.prompt) // 4


def test_the_head_goes_on_to_the_scheduler_as_it_came(model: TextModel, info: ModelInfo) -> None:
    head = RequestHead("req-1", "m", "generate", "tokens", "a", "t", -7, "mine", 5.0, 0.25, "00-")
    done = prepare(msgspec.structs.replace(work(tokens(5)), head=head), model, info, LIMIT, 0)
    assert done.work.head == head


@pytest.mark.parametrize("prompt", [PromptText("hello"), tokens(5, 6)])
def test_a_completion_gets_sixteen_tokens(
    prompt: Prompt, model: TextModel, info: ModelInfo
) -> None:
    assert prepare(work(prompt), model, info, LIMIT, 0).work.max_tokens == 16


def test_the_default_is_cut_to_what_fits(model: TextModel, info: ModelInfo) -> None:
    done = prepare(work(tokens(*[5] * (LIMIT - 3))), model, info, LIMIT, 0)
    assert done.work.max_tokens == 3


def test_a_continuation_keeps_output_and_limit(model: TextModel, info: ModelInfo) -> None:
    state = ChoiceState(1, output=tokens(8, 9).ids, released=4)
    given = Work(RequestHead(), tokens(5, 6), SamplingParams(max_tokens=40, seed=1), [state])
    done = prepare(given, model, info, LIMIT, 0)
    assert done.work.max_tokens == 40
    assert done.work.choices == [state]


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        (work(PromptText("")), "prompt", "prompt is empty"),
        (work(tokens()), "prompt", "prompt is empty"),
        (work(Tokens(b"abc")), "prompt", "3 bytes"),
        (work(tokens(1, 512)), "prompt", "token id 512 .* 0 to 511"),
        (work(tokens(1, -1)), "prompt", "token id -1 .* 0 to 511"),
        (work(tokens(1, 2**31 - 1)), "prompt", "token id 2147483647 "),
        (work(tokens(*[5] * 100)), "prompt", "100 tokens.* length is 100 .*at most 99"),
        (work(PromptText("a b" * 500)), "prompt", "length is 100 tokens"),
        (work(Chat(b'[{"content": "' + b"a b" * 500 + b'", "role": "user"}]')), "messages", "100"),
        (work(Chat(b"[]")), "messages", "at least one message"),
        (work(tokens(5), max_tokens=100), "max_tokens", "1 token .* 100, together 101.*most 99"),
        (work(tokens(5), max_tokens=2**31 - 1), "max_tokens", "at most 99"),
        (
            work(tokens(5), max_tokens=0),
            "max_tokens",
            "is 0.* at least 1.* echo or prompt_logprobs",
        ),
        (work(tokens(5), max_tokens=0, logprobs=1), "max_tokens", "echo or prompt_logprobs"),
        (work(tokens(5), stop_token_ids=[3, 512]), "stop_token_ids", "token id 512 "),
        (work(tokens(5), stop_token_ids=[2**31 - 1]), "stop_token_ids", "token id 2147483647 "),
    ],
)
def test_what_cannot_be_served_is_named(
    asked: Work, param: str, says: str, model: TextModel, info: ModelInfo
) -> None:
    with pytest.raises(PromptError, match=says) as caught:
        prepare(asked, model, info, LIMIT, 0)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "asked",
    [work(tokens(*[5] * 100)), work(PromptText("a b" * 500)), work(tokens(5), max_tokens=100)],
)
def test_what_the_window_cannot_hold_has_the_code_by_which_clients_shorten_it(
    asked: Work, model: TextModel, info: ModelInfo
) -> None:
    with pytest.raises(PromptError) as caught:
        prepare(asked, model, info, LIMIT, 0)
    assert caught.value.code == "context_length_exceeded"
    # Many clients look at the words alone: at Anthropic's or at OpenAI's.
    assert "maximum context length" in str(caught.value)
    assert asked.params.max_tokens == 100 or "prompt is too long" in str(caught.value)


@pytest.mark.parametrize("prompt", [tokens(5), tokens(*[5] * (LIMIT + 10))])
def test_what_a_larger_engine_had_taken_keeps_its_limit_though_the_window_has_shrunk(
    prompt: Tokens, model: TextModel, info: ModelInfo
) -> None:
    asked = work(prompt, max_tokens=3 * LIMIT)
    head = msgspec.structs.replace(asked.head, accepted=True)
    done = prepare(msgspec.structs.replace(asked, head=head), model, info, LIMIT, 0)
    assert done.work.max_tokens == 3 * LIMIT


def test_the_largest_max_tokens_fits(model: TextModel, info: ModelInfo) -> None:
    done = prepare(work(tokens(5), max_tokens=LIMIT - 1), model, info, LIMIT, 0)
    assert done.work.max_tokens == LIMIT - 1


def test_max_tokens_may_be_more_than_what_fits_where_the_window_may_end_the_answer(
    model: TextModel, info: ModelInfo
) -> None:
    asked = work(tokens(*[5] * 90), max_tokens=LIMIT)
    with pytest.raises(PromptError, match="at most 10"):
        prepare(asked, model, info, LIMIT, 0)
    done = prepare(msgspec.structs.replace(asked, fits_window=True), model, info, LIMIT, 0)
    assert done.work.max_tokens == 10


def test_end_tokens_stop_unless_ignored(model: TextModel, info: ModelInfo) -> None:
    asked = {"stop_token_ids": [7, 2]}
    assert prepare(work(tokens(5), **asked), model, info, LIMIT, 0).work.stop_ids == [7, 2, 0]
    ignoring = prepare(work(tokens(5), ignore_eos=True, **asked), model, info, LIMIT, 0)
    assert ignoring.work.stop_ids == [7, 2]


def test_without_template_a_chat_is_refused(folder: Path, info: ModelInfo, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(PromptError, match="/v1/completions"):
        prepare(work(HELLO), TextModel.load(tmp_path), info, LIMIT, 0)


class Vetted:
    """Takes what it is asked about down, and refuses one source."""

    def __init__(self) -> None:
        self.asked: list[Grammar] = []

    def check(self, grammar: Grammar) -> None:
        self.asked.append(grammar)
        if grammar.source == "(":
            raise PromptError("structured_outputs: no", grammar.param)


def ask_grammar(
    given: Work, model: TextModel, info: ModelInfo, vetted: Vetted | None
) -> SamplingParams:
    return prepare(given, model, info, LIMIT, 0, vetted).params  # type: ignore[arg-type]


def test_a_grammar_is_vetted_and_goes_on(model: TextModel, info: ModelInfo) -> None:
    vetted, grammar = Vetted(), Grammar("regex", "a+")
    given = work(tokens(5), structured_outputs=grammar)
    assert ask_grammar(given, model, info, vetted).structured_outputs == grammar
    assert vetted.asked == [grammar]
    with pytest.raises(PromptError, match="no") as caught:
        ask_grammar(work(tokens(5), structured_outputs=Grammar("regex", "(")), model, info, vetted)
    assert caught.value.param == "structured_outputs"


def test_a_grammar_of_a_continuation_was_vetted_before(model: TextModel, info: ModelInfo) -> None:
    vetted, params = Vetted(), SamplingParams(structured_outputs=Grammar("regex", "a+"))
    begun = Work(RequestHead(), tokens(5), params, [ChoiceState(0, tokens(6).ids)])
    assert ask_grammar(begun, model, info, vetted).structured_outputs == params.structured_outputs
    assert vetted.asked == []


def test_a_grammar_beside_what_may_leave_no_token_is_refused(
    model: TextModel, info: ModelInfo
) -> None:
    grammar = Grammar("json_object", param="response_format")
    for other in ({"allowed_token_ids": [5]}, {"bad_words": ["a"]}):
        with pytest.raises(PromptError, match=next(iter(other))) as caught:
            ask_grammar(work(tokens(5), structured_outputs=grammar, **other), model, info, Vetted())
        assert caught.value.param == "response_format"


def test_what_is_short_and_plain_is_prepared_at_once() -> None:
    """Much text, chats and pairs, and what may wait for a verdict have threads."""
    texts = Inputs([PromptText("a" * 256), PromptText("b" * 256)])
    for prompt in (tokens(5, 6, 7), tokens(*[5] * 4096), PromptText("a" * 512), texts):
        assert may_be_quick(work(prompt, stop=["x"], logit_bias={5: 1.0}))
        assert may_be_quick(msgspec.structs.replace(work(prompt), head=RequestHead(task="embed")))
    longer = Inputs([*texts.prompts, PromptText("c")])
    long = (PromptText("a" * 513), longer, tokens(*[5] * 4097))
    for prompt in (*long, Chat(b"[]"), Pair("a", "b"), Inputs([Pair("a", "b")])):
        assert not may_be_quick(work(prompt))
    for params in (
        {"bad_words": ["x"]},
        {"banned_strings": ["x"]},
        {"dry_multiplier": 1.0},
        {"structured_outputs": Grammar("regex", "a*")},
    ):
        assert not may_be_quick(work(tokens(5, 6, 7), **params))
    task = msgspec.structs.replace(work(tokens(5)), head=RequestHead(task="tokenize"))
    assert not may_be_quick(task)


def test_a_plain_request_is_not_searched_for_thinking(
    model: TextModel, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "thinking", None)  # which cannot be called
    assert prepare(work(tokens(5, 6, 7)), model, info, LIMIT, 1).work.max_tokens == 16
    with pytest.raises(TypeError):
        ask_grammar(
            work(tokens(5), structured_outputs=Grammar("regex", "a+")), model, info, Vetted()
        )

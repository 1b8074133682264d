"""Beam search: the rules beside those of transformers, and the library beside its own logprobs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.services.library.beam_search import PromptSearch, sequences
from penstock.services.library.outputs import Logprob, RequestRefused

PROMPTS = [[3, 17, 40, 5], [9, 9, 2], [60]]
ENDS = frozenset({7, 11})


@pytest.fixture(scope="module")
def model() -> Any:
    """A model of random weights with few tokens, so that beams often end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


def searched(model: Any, prompt: list[int], params: BeamSearchParams) -> PromptSearch:
    search = PromptSearch(prompt, params, ENDS)
    while not search.done:
        with torch.no_grad():
            logits = model(torch.tensor(search.prompts())).logits[:, -1]
        top = torch.log_softmax(logits.float(), -1).topk(2 * params.beam_width)
        search.advance(
            [
                {token: Logprob(value, rank, "") for rank, (token, value) in enumerate(row, 1)}
                for row in map(zip, top.indices.tolist(), top.values.tolist())
            ]
        )
    return search


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_answers_and_scores_are_those_of_transformers(
    model: Any, width: int, length_penalty: float, early_stopping: bool
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=12, length_penalty=length_penalty,
        early_stopping=early_stopping,
    )  # fmt: skip
    for prompt in PROMPTS:
        beams = searched(model, prompt, params).finished
        found = sequences(beams, [""] * width, length_penalty)
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width, num_return_sequences=width, max_new_tokens=12, do_sample=False,
            length_penalty=length_penalty, early_stopping=early_stopping, pad_token_id=0,
            eos_token_id=sorted(ENDS), return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        rows = [row[len(prompt) :].tolist() for row in expected.sequences]
        ends = [next((i + 1 for i, t in enumerate(row) if t in ENDS), len(row)) for row in rows]
        assert [one.token_ids for one in found] == [r[:e] for r, e in zip(rows, ends, strict=True)]
        if width > 1:
            scores = expected.sequences_scores.tolist()
            assert [one.score for one in found] == pytest.approx(scores, abs=1e-4)


def test_ends_are_tokens_like_others_where_they_are_ignored(model: Any) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True)
    search = searched(model, PROMPTS[0], params)
    assert [len(beam.tokens) for beam in search.finished] == [9] * 4
    assert {one.finish_reason for one in sequences(search.finished, [""] * 4, 1.0)} == {"length"}


def test_every_answer_has_the_probability_that_the_model_gives_it(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5)
    prompts = ["What is 3 + 4?", [5, 6, 7, 8]]
    outputs = llm.beam_search(prompts, params, cache_salt="beams")
    assert [output.prompt for output in outputs] == ["What is 3 + 4?", None]
    assert outputs[1].prompt_token_ids == [5, 6, 7, 8]
    for output in outputs:
        scores = [one.score for one in output.sequences]
        assert scores == sorted(scores, reverse=True) and len(scores) == 3
        assert len({tuple(one.token_ids) for one in output.sequences}) == 3
        for one in output.sequences:
            length = len(one.token_ids)
            assert (one.finish_reason == "length") == (length == 8) or length == 8
            assert one.cum_logprob == pytest.approx(math.fsum(x.logprob for x in one.logprobs))
            assert one.score == pytest.approx(one.cum_logprob / length**0.5)
            whole = [*output.prompt_token_ids, *one.token_ids]
            judged = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (told,) = llm.generate([whole], judged)
            places = (told.prompt_logprobs or [])[-length:]
            given = [
                (place or {})[t].logprob for place, t in zip(places, one.token_ids, strict=True)
            ]
            assert [x.logprob for x in one.logprobs] == pytest.approx(given, abs=1e-3)


def test_the_likeliest_of_one_beam_is_the_greedy_answer(llm: LLM) -> None:
    (output,) = llm.beam_search("Hello", BeamSearchParams(beam_width=1, max_tokens=10))
    (greedy,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=10))
    (one,) = output.sequences
    both = itertools.zip_longest(one.token_ids, greedy.outputs[0].token_ids)
    assert all(ours == theirs for ours, theirs in both)
    assert one.text == greedy.outputs[0].text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"beam_width": 11}, "beam_width is 11; 1 to 10"),
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0"),
        ({"beam_width": 2, "length_penalty": 90.0}, "length_penalty is 90"),
        ({"beam_width": 2, "max_tokens": 10**6}, "max_tokens 1000000 that is more than"),
    ],
)
def test_what_cannot_be_searched_is_refused(llm: LLM, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.beam_search("Hello", BeamSearchParams(**wrong))


def test_a_prompt_that_the_model_cannot_read_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="vocabulary"):
        llm.beam_search([[10**8]], BeamSearchParams(beam_width=2))

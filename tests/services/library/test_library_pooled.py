"""``embed``, ``score`` and ``classify`` of ``LLM`` and ``AsyncLLM``, on the null device: vectors
are a prompt's length and last token, and logits follow from the length."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.library.async_clients import server_of
from support.library.joined import joining
from support.library.pooled_models import write_classifier

from penstock import LLM, AsyncLLM, RequestRefused


@pytest.fixture(scope="module")
def embedder() -> Iterator[LLM]:
    with LLM(device="null", task="embed") as llm:
        yield llm


@pytest.fixture(scope="module")
def ranker_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_classifier(tmp_path_factory.mktemp("models") / "ranker", ["relevant"])


@pytest.fixture(scope="module")
def ranker(ranker_folder: str) -> Iterator[LLM]:
    with LLM(ranker_folder, device="null") as llm:
        yield llm


def test_prompts_become_vectors_in_their_order(embedder: LLM) -> None:
    outputs = embedder.embed([[5, 6, 7], [8]], normalize=False)
    assert [one.outputs.embedding for one in outputs] == [[3, 7], [1, 8]]
    assert [one.prompt_token_ids for one in outputs] == [[5, 6, 7], [8]]
    (text,) = embedder.embed("a weir", truncate_prompt_tokens=1)
    assert len(text.prompt_token_ids) == 1
    assert math.hypot(*text.outputs.embedding) == pytest.approx(1)
    many = embedder.embed([[9] * (1 + n % 5) for n in range(1500)], normalize=False)
    assert [one.outputs.embedding[0] for one in many] == [1 + n % 5 for n in range(1500)]


def test_each_prompt_of_a_batch_has_its_own_id_and_its_own_error(embedder: LLM) -> None:
    outputs = embedder.embed([[5] * length for length in range(1, 80)], normalize=False)
    assert [len(one.prompt_token_ids) for one in outputs] == list(range(1, 80))
    ids = [int(one.request_id) for one in outputs]
    assert ids == list(range(ids[0], ids[0] + 79))
    wrong = [[5]] * 50
    wrong[45] = [5] * 5000
    with pytest.raises(RequestRefused, match="prompt 45: the input is too long"):
        embedder.embed(wrong)
    urgent = [index % 3 for index in range(40)]
    outputs = embedder.embed([[5, 6]] * 40, normalize=False, priority=urgent, max_concurrency=5)
    assert [one.outputs.embedding for one in outputs] == [[2, 6]] * 40


def test_pairs_are_scored_one_beside_many_or_each_beside_its_own(ranker: LLM) -> None:
    for text_1, text_2 in (("a", ["b", "b c d e"]), (["a", "a"], ["b", "b c d e"])):
        outputs = ranker.score(text_1, text_2)
        for one in outputs:
            logit = math.cos(len(one.prompt_token_ids))
            assert one.outputs.score == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)
        assert len({len(one.prompt_token_ids) for one in outputs}) == len(outputs) == 2
    (one,) = ranker.score("a", "b", use_activation=False)
    assert one.outputs.score == pytest.approx(math.cos(len(one.prompt_token_ids)), abs=1e-6)


def test_a_text_gets_its_likeliest_label(tmp_path: Path) -> None:
    labels = ["calm", "rising", "flood"]
    folder = write_classifier(tmp_path / "labels", labels)
    settings = {"device": "null", "task": "classify"}
    with asyncio.Runner() as runner:
        owner = AsyncLLM(folder, **settings)
        runner.run(owner.start())
        processes = [psutil.Process(server_of(owner).pid)]
        processes += processes[0].children(recursive=True)
        with joining(owner):
            llm = LLM(folder, **settings)
        with llm:
            found = [*llm.classify([[5] * 6, [5, 7]]), runner.run(owner.classify([5, 7, 9]))]
            for one in found:
                powers = [math.exp(math.cos(len(one.prompt_token_ids) + n)) for n in range(3)]
                shares = [power / sum(powers) for power in powers]
                assert one.outputs.probs == pytest.approx(shares, abs=1e-6)
                assert one.outputs.label == labels[shares.index(max(shares))]
            with pytest.raises(RequestRefused, match="'score'; it does: classify"):
                llm.score("a", "b")
        runner.run(owner.close())
        assert not any(one.is_running() for one in processes), "close returns when all have ended"
        with pytest.raises(RuntimeError, match="closed"):
            runner.run(owner.start())


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda llm: llm.embed("a", dimensions=0), ValueError, "dimensions is 0"),
        (lambda llm: llm.embed("a", dimensions=1), RequestRefused, "dimensions is 1"),
        (lambda llm: llm.embed("a", prompt_name="x"), RequestRefused, "prompts are: none"),
        (lambda llm: llm.embed("a", input_type="title"), ValueError, "'query' or 'document'"),
        (
            lambda llm: llm.embed("a", input_type="query", prompt_name="x"),
            ValueError,
            "one of them says",
        ),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=0), ValueError, "from 1 on"),
        (lambda llm: llm.embed("a", colour=1), TypeError, "embed.. has no parameter 'colour'"),
        (lambda llm: llm.embed([5, "a"]), ValueError, "prompts.0. is 5"),
        (lambda llm: llm.embed([[5] * 5000]), RequestRefused, "the input is too long"),
        (lambda llm: llm.score(["a", "b"], "c"), ValueError, "text_1 holds 2 texts and text_2 1"),
        (lambda llm: llm.score("a", [5]), ValueError, "text_2 must be a text"),
        (
            lambda llm: llm.score("a", "b"),
            RequestRefused,
            "not do the task 'score'; it does: embed",
        ),
        (lambda llm: llm.generate("a"), RequestRefused, "generates no text; it does: embed"),
    ],
)
def test_what_is_wrong_is_named_and_the_next_call_goes_on(
    embedder: LLM, call: Callable[[Any], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call(embedder)
    assert len(embedder.embed("a")) == 1


def test_an_event_loop_has_many_at_once(embedder: LLM, ranker: LLM, ranker_folder: str) -> None:
    @contextlib.asynccontextmanager
    async def joined(owner: LLM, llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
        with joining(owner):
            await llm.start()
        async with llm:
            yield llm

    async def main() -> None:
        async with joined(embedder, AsyncLLM(device="null", task="embed")) as llm:
            prompts = [[9] * (1 + n % 5) for n in range(200)]
            asked = (llm.embed(ids, normalize=False) for ids in prompts)
            outputs = await asyncio.gather(*asked)
            assert [one.outputs.embedding[0] for one in outputs] == [len(ids) for ids in prompts]
            named = await llm.embed([5, 6], "a name")
            assert (named.request_id, named.prompt_token_ids) == ("a name", [5, 6])
            with pytest.raises(RequestRefused, match="'classify'; it does: embed"):
                await llm.classify("a")
        async with joined(ranker, AsyncLLM(ranker_folder, device="null")) as llm:
            scored = await llm.score("a", "b")
            assert 0 < scored.outputs.score < 1
            found = await llm.classify("a b c")
            assert (found.outputs.label, len(found.outputs.probs)) == ("relevant", 1)

    asyncio.run(main())

"""What a tokenizer does for vectors and scores: prompts, pairs, truncation, activations."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.protocol.judging import JUDGED
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.pooling import Pooling
from penstock.protocol.prefix_digest import DIGEST_BYTES
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.vector_lengths import VectorLengths
from penstock.protocol.wire.messages.requests import (
    Chat,
    ChoiceState,
    Inputs,
    Pair,
    PoolingParams,
    Prompt,
    PromptText,
    RequestHead,
    Tokens,
    Work,
)
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.folder_tasks import FolderTasks
from penstock.services.tokenizer.preparation import prepare
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.text_model import TextModel

CLS, SEP = 0, 1
WORDS = ["[CLS]", "[SEP]", "[UNK]", *"abcdefgh", "query:"]


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    """Words are tokens; as BERT's tokenizer puts texts together."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return TextModel(tokenizer, None)


def tasks(**more: Any) -> FolderTasks:
    info = ModelInfo(Path("model"), "BertModel", 99, 16, "float32", [], {}, {"hidden_size": 8})
    settings: dict[str, Any] = {
        "tasks": ["embed"], "generates": False, "kind": "mean", "encoder": True, "reason": ""
    }  # fmt: skip
    return FolderTasks(Pooling(**settings | more), info)


def work(prompt: Prompt, task: str = "embed", keep: int | None = None, **asked: Any) -> Work:
    params = SamplingParams(truncate_prompt_tokens=keep)
    pooling = PoolingParams(**asked)
    return Work(RequestHead(task=task), prompt, params, [ChoiceState(0)], pooling=pooling)


def words(ids: bytes) -> str:
    return " ".join(WORDS[number] for number in struct.unpack(f"<{len(ids) // 4}i", ids))


def encoded(model: TextModel, of: Work, **more: Any) -> tuple[str, int]:
    assert not isinstance(of.prompt, Inputs)
    found = tasks(**more).encode(of.prompt, of, model, 16)
    return words(found.ids), found.second


def floats(values: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(values) // 4}f", values))


def brought(of: Work, *numbers: float, **more: Any) -> list[float]:
    payload = struct.pack(f"<{len(numbers)}f", *numbers)
    return floats(tasks(**more).task(of.head.task, of.pooling).event(payload).values)


def test_the_prompt_of_the_folder_stands_ahead_of_a_text(text_model: TextModel) -> None:
    prompts = {"query": "query: ", "document": ""}
    for asked, default, wanted in (
        ("query", "", "[CLS] query: a b [SEP]"),
        ("", "query", "[CLS] query: a b [SEP]"),
        ("document", "query", "[CLS] a b [SEP]"),
        ("", "", "[CLS] a b [SEP]"),
    ):
        more = {"prompts": prompts, "default_prompt": default}
        of = work(PromptText("a b"), prompt_name=asked)
        assert encoded(text_model, of, **more)[0] == wanted
    for prompt, said in (
        (PromptText("a"), "prompt_name is 'title'; this model's prompts are: 'query', 'document'"),
        (Tokens(b"\0\0\0\0"), "is token ids"),
    ):
        with pytest.raises(PromptError, match=said):
            encoded(text_model, work(prompt, prompt_name="title"), prompts=prompts)


def test_the_type_of_an_input_chooses_the_prompt_that_the_folder_has_for_it(
    text_model: TextModel,
) -> None:
    for asked, prompts, default, wanted in (
        ("query", {"query": "query: "}, "", "[CLS] query: a [SEP]"),
        ("document", {"query": "query: ", "document": "b "}, "", "[CLS] b a [SEP]"),
        ("document", {"corpus": "d ", "passage": "c "}, "", "[CLS] c a [SEP]"),
        ("document", {"query": "query: "}, "query", "[CLS] query: a [SEP]"),
        ("document", {"query": "query: "}, "", "[CLS] a [SEP]"),
    ):
        more = {"prompts": prompts, "default_prompt": default}
        of = work(PromptText("a"), input_type=asked)
        assert encoded(text_model, of, **more)[0] == wanted
    with pytest.raises(PromptError, match="input_type is 'query', but the input is token ids"):
        encoded(text_model, work(Tokens(b"\0\0\0\0"), input_type="query"))


def test_of_a_document_so_many_tokens_are_kept_as_are_asked_for(text_model: TextModel) -> None:
    of = work(Pair("a b", "c  d e f"), "score", document_tokens=2)
    assert encoded(text_model, of) == ("[CLS] a b [SEP] c d [SEP]", 4)
    of = work(Pair("a b", "c d e f"), "score", document_tokens=4)
    assert encoded(text_model, of) == ("[CLS] a b [SEP] c d e f [SEP]", 4)
    of = work(Pair("a", "b " * 40), "score", document_tokens=2)
    assert encoded(text_model, of) == ("[CLS] a [SEP] b b [SEP]", 3)
    with pytest.raises(PromptError, match="too long"):
        encoded(text_model, work(Pair("a " * 40, "b c"), "score", document_tokens=1))


def test_a_document_that_is_cut_is_encoded_once_and_a_long_one_not_to_its_end(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = work(Pair("a b", "c d " * 100), "score", document_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(text_model, "beginning", None)
        assert encoded(text_model, of) == ("[CLS] a b [SEP] c d c [SEP]", 4)
    for text in ("c d " * 1000, "c d", "c" + 10_000 * " " + "d e f"):
        wanted = " ".join(text.split()[:3])
        assert text_model.beginning(text, 3).split() == wanted.split()


def test_a_prompt_is_refused_where_pairs_have_none(text_model: TextModel) -> None:
    of = work(Pair("a", "b"), "score", prompt_name="query")
    with pytest.raises(PromptError, match="prompt_name is 'query', but this model takes pairs"):
        encoded(text_model, of, prompts={"query": "query: "})


def test_a_folder_may_ask_for_small_letters(text_model: TextModel) -> None:
    more = {"lowers": True, "prompts": {"q": "QUERY: "}, "default_prompt": "q"}
    assert encoded(text_model, work(PromptText("A B")), **more)[0] == "[CLS] query: a b [SEP]"
    of = work(Pair("A", "B"), "score")
    assert encoded(text_model, of, **more)[0] == "[CLS] a [SEP] b [SEP]"


def test_a_text_is_cut_at_its_end_and_keeps_its_special_tokens(text_model: TextModel) -> None:
    assert encoded(text_model, work(PromptText("a b c d e"), keep=4))[0] == "[CLS] a b [SEP]"
    assert encoded(text_model, work(PromptText("a b", False), keep=1))[0] == "a"
    ids = struct.pack("<3i", 3, 4, 5)
    assert encoded(text_model, work(Tokens(ids), keep=2))[0] == "a b"
    assert encoded(text_model, work(PromptText("a " * 40), keep=99))[0].count("a") == 14


def test_a_pair_says_where_its_second_segment_begins(text_model: TextModel) -> None:
    of = work(Pair("a b", "c d e"), "score")
    assert encoded(text_model, of) == ("[CLS] a b [SEP] c d e [SEP]", 4)
    of = work(Pair("a b", "c d e f g h"), "score", keep=8)
    assert encoded(text_model, of) == ("[CLS] a b [SEP] c d e [SEP]", 4)
    of = work(Pair("a b c d", "e"), "classify", keep=6)
    assert encoded(text_model, of) == ("[CLS] a b [SEP] e [SEP]", 4)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (work(PromptText("a " * 15)), "it has 17 tokens; this model takes at most 16"),
        (work(Pair("a", "b")), "made of one text"),
        (work(Chat(b"[]"), "score"), "takes no chats"),
        (work(PromptText("a"), dimensions=9), "vectors have 8"),
        (work(PromptText("a"), dimensions=4), "--allow-dimensions"),
    ],
)
def test_what_cannot_be_is_refused(text_model: TextModel, of: Work, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        encoded(text_model, of)


def test_vectors_are_cut_and_then_normalized(text_model: TextModel) -> None:
    of = work(PromptText("a"), dimensions=2)
    lengths = VectorLengths([2])
    encoded(text_model, of, lengths=lengths)
    assert brought(of, 3.0, 4.0, 12.0, lengths=lengths) == pytest.approx([0.6, 0.8])
    of = work(PromptText("a"), dimensions=2, normalize=False)
    assert brought(of, 3.0, 4.0, 12.0) == [3.0, 4.0]
    assert brought(work(PromptText("a")), 3.0, 4.0, normalizes=False) == [3.0, 4.0]


def test_other_lengths_than_those_of_the_training_are_refused_with_the_right_ones(
    text_model: TextModel,
) -> None:
    for lengths, asked, said in (
        (VectorLengths([2, 4]), 3, "may be cut to 2, 4, or start the server with --allow-dim"),
        (VectorLengths(least=4), 3, "may be cut to 4 or more, or start"),
        (VectorLengths(), 3, "does not say that its vectors may be cut; leave it out, or start"),
        (VectorLengths(least=4), 9, "vectors have 8"),
    ):
        with pytest.raises(PromptError, match=said):
            encoded(text_model, work(PromptText("a"), dimensions=asked), lengths=lengths)
    for dimensions in (4, 5, 8):
        of = work(PromptText("a"), dimensions=dimensions)
        encoded(text_model, of, lengths=VectorLengths(least=4))


def test_logits_become_scores_as_the_folder_says() -> None:
    classify, score = work(PromptText("a"), "classify"), work(Pair("a", "b"), "score")
    softmax = {"activations": {"classify": "softmax", "score": "sigmoid"}}
    assert brought(classify, 0.0, 0.0, **softmax) == [0.5, 0.5]
    assert brought(score, 0.0, **softmax) == [0.5]
    assert brought(score, 2.0) == [2.0]
    raw = work(Pair("a", "b"), "score", activation=False)
    assert brought(raw, 2.0, **softmax) == [2.0]
    judge = {
        "tasks": ["score"], "encoder": False, "labels": JUDGED,
        "activations": {"score": "softmax"}, "judge": "qwen3",
    }  # fmt: skip
    assert brought(score, 1.0, 1.0, **judge) == [0.5]
    assert brought(raw, 1.0, 4.0, **judge) == [3.0]


def test_a_judge_reads_a_pair_in_its_own_form_and_takes_no_control_tokens_from_it() -> None:
    control = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(control)
    model = TextModel(tokenizer, None)
    judge = {"tasks": ["score"], "encoder": False, "labels": JUDGED, "judge": "qwen3"}
    of = work(Pair("a <|im_end|> a", "b b b"), "score")
    ids = tasks(**judge).encode(of.prompt, of, model, 99).ids
    numbers = list(struct.unpack(f"<{len(ids) // 4}i", ids))
    marks = [number for number in numbers if number >= 3]
    assert marks == [3, 4, 3, 4, 3]  # those of the form alone
    assert numbers.count(1) == 3 and numbers.count(2) == 3
    cut = work(of.prompt, "score", keep=len(numbers) - 2)
    shorter = tasks(**judge).encode(cut.prompt, cut, model, 99).ids
    assert len(shorter) == len(ids) - 8 and shorter[-20:] == ids[-20:]


def test_what_an_engine_had_taken_is_neither_cut_anew_nor_refused(text_model: TextModel) -> None:
    ids = struct.pack("<20i", *[3] * 20)
    for prompt, count in ((Tokens(ids), 20), (Pair("a " * 9, "b " * 40), 52)):
        of = work(prompt, "score" if isinstance(prompt, Pair) else "embed", dimensions=9)
        new = tasks().encode
        with pytest.raises(PromptError):
            new(prompt, of, text_model, 16)
        again = msgspec.structs.replace(of, head=RequestHead(task=of.head.task, accepted=True))
        found = new(prompt, again, text_model, 16)  # a smaller engine is there now
        assert len(found.ids) == 4 * count
    cut = work(Tokens(ids), keep=18)
    cut = msgspec.structs.replace(cut, head=RequestHead(task="embed", accepted=True))
    assert tasks().encode(cut.prompt, cut, text_model, 16).ids == ids


def test_a_judge_s_own_template_renders_the_pair_and_its_end_is_cut() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}S {{ m.content }} {% endif %}"
        "{% if m.role == 'query' %}Q {{ m.content }} {% endif %}"
        "{% if m.role == 'document' %}D {{ m.content }} {% endif %}{% endfor %}E"
    )
    vocabulary = {word: at for at, word in enumerate(["[UNK]", "S", "Q", "D", "E", "a", "b", "i"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = TextModel(tokenizer, ChatTemplate(source, {}, path=Path("t")))
    judge = {
        "tasks": ["score"], "encoder": False, "labels": JUDGED, "judge": "template",
        "prompts": {"web": "i i"},
    }  # fmt: skip
    names = list(vocabulary)

    def found(keep: int | None = None, name: str = "") -> str:
        of = work(Pair("a a", "b b b b"), "score", keep, prompt_name=name)
        ids = tasks(**judge).encode(of.prompt, of, model, 99).ids
        return " ".join(names[at] for at in struct.unpack(f"<{len(ids) // 4}i", ids))

    assert found() == "Q a a D b b b b E"
    assert found(name="web") == "S i i Q a a D b b b b E"
    assert found(7) == "Q a a D b b E"
    assert found(4) in ("Q a D E", "Q a E")


@pytest.mark.parametrize(
    ("more", "is_cached"),
    [({}, False), ({"encoder": False}, False), ({"encoder": False, "kind": "last"}, True)],
)
def test_prompts_that_are_not_cached_have_no_digests(
    text_model: TextModel, more: dict[str, Any], is_cached: bool
) -> None:
    info = ModelInfo(Path("model"), "BertModel", 99, 999, "float32", [], {}, {"hidden_size": 8})
    of = work(Tokens(struct.pack("<200i", *[3] * 200)))
    found = prepare(of, text_model, info, 999, 0, folder_tasks=tasks(**more))
    assert bool(found.work.prefix) is is_cached


INFO = ModelInfo(Path("model"), "BertModel", 99, 999, "float32", [], {}, {"hidden_size": 8})


def batch(*prompts: Any, choices: int | None = None, task: str = "embed") -> Work:
    states = [ChoiceState(2 * number) for number in range(choices or len(prompts))]
    made = work(PromptText(""), task)
    return msgspec.structs.replace(made, prompt=Inputs(list(prompts)), choices=states)


def test_the_prompts_of_a_batch_stand_one_after_another(text_model: TextModel) -> None:
    of = batch(PromptText("a"), Tokens(struct.pack("<2i", 3, 4)), PromptText("b c", False))
    found = prepare(of, text_model, INFO, 16, 0, folder_tasks=tasks()).work
    assert words(found.prompt) == "[CLS] a [SEP] a b b c"
    assert (found.lengths, found.seconds, found.choices) == ([3, 2, 2], [], of.choices)
    found = prepare(
        batch(Pair("a", "b"), Pair("a b", "c"), task="score"),
        text_model, INFO, 16, 0, folder_tasks=tasks(tasks=["score"]),
    ).work  # fmt: skip
    assert words(found.prompt) == "[CLS] a [SEP] b [SEP] [CLS] a b [SEP] c [SEP]"
    assert (found.lengths, found.seconds) == ([5, 6], [3, 4])


def test_the_choice_is_named_whose_prompt_cannot_be_taken(text_model: TextModel) -> None:
    for wrong, said in (
        (PromptText("a " * 30), "too long: it has 32 tokens"),
        (Tokens(struct.pack("<i", 99)), "token id 99"),
        (Tokens(b""), "empty"),
        (Pair("a", "b"), "not of a pair"),
    ):
        of = batch(PromptText("a"), wrong, PromptText("a " * 30))
        with pytest.raises(PromptError, match=said) as refused:
            prepare(of, text_model, INFO, 16, 0, folder_tasks=tasks())
        assert (refused.value.choice, refused.value.param) == (2, "input")


def test_of_a_text_that_is_far_too_long_the_beginning_alone_is_counted(
    text_model: TextModel,
) -> None:
    begins = r"the first \d+ of 9000 characters are \d+ tokens"
    with pytest.raises(PromptError, match=f"the input is too long: {begins}; this model takes at"):
        encoded(text_model, work(PromptText("a b c " * 1500)))
    with pytest.raises(PromptError, match=f"too long to be truncated: {begins}, and"):
        text_model.encode_plain("a b c " * 1500, 16, cuts=True)


def test_a_text_may_be_truncated_however_long_it_is(text_model: TextModel) -> None:
    long, blank = "a b c " * 100_000, " " * 100_000
    for text, wanted in (
        (long, "[CLS] a b c a [SEP]"),
        (f"a b{blank}c a b", "[CLS] a b c a [SEP]"),
        (f"a{blank}b", "[CLS] a b [SEP]"),
    ):
        assert encoded(text_model, work(PromptText(text), keep=6))[0] == wanted
    assert encoded(text_model, work(PromptText(long, False), keep=4))[0] == "a b c a"
    for pair, more, wanted in (
        (Pair("a", long), {"keep": 6}, ("[CLS] a [SEP] a b [SEP]", 3)),
        (Pair(long, "c"), {"keep": 6}, ("[CLS] a b [SEP] c [SEP]", 4)),
        (Pair("a", long), {"document_tokens": 3}, ("[CLS] a [SEP] a b c [SEP]", 3)),
    ):
        assert encoded(text_model, work(pair, "score", **more)) == wanted


def test_prompts_that_are_not_as_many_as_the_choices_are_refused(text_model: TextModel) -> None:
    for of in (
        batch(PromptText("a"), choices=2),
        batch(PromptText("a"), PromptText("b"), choices=1),
    ):
        with pytest.raises(PromptError, match="prompts came for"):
            prepare(of, text_model, INFO, 16, 0, folder_tasks=tasks())
    with pytest.raises(PromptError, match="takes one prompt"):
        prepare(batch(PromptText("a"), task="generate"), text_model, INFO, 16, 0)


def test_a_batch_is_placed_by_what_all_its_prompts_begin_with(text_model: TextModel) -> None:
    causal = tasks(encoder=False, kind="last")

    def prefix(*prompts: list[int]) -> bytes:
        packed = [Tokens(struct.pack(f"<{len(ids)}i", *ids)) for ids in prompts]
        of = batch(*packed) if len(packed) > 1 else work(packed[0])
        return prepare(of, text_model, INFO, 999, 0, folder_tasks=causal).work.prefix

    alone = prefix([3] * 200)
    assert len(alone) == 3 * DIGEST_BYTES
    assert prefix([3] * 200, [3] * 150, [3] * 300) == alone[: 2 * DIGEST_BYTES]
    assert prefix([3] * 200, [*[3] * 70, 4]) == alone[:DIGEST_BYTES]
    assert prefix([3] * 200, [4] * 200) == b""


@pytest.mark.parametrize("lowers", [False, True])
def test_texts_together_are_encoded_as_one_by_one(text_model: TextModel, lowers: bool) -> None:
    folder = tasks(lowers=lowers, prompts={"q": "query: "}, default_prompt="q")
    texts: list[Prompt] = [PromptText(text) for text in ("a b", "C", "a " * 40, "h")]
    mixed = [*texts, Tokens(struct.pack("<2i", CLS, SEP))]
    for given in (texts, mixed, [PromptText("a b", add_special_tokens=False), *texts], texts[:1]):
        asked = work(Inputs(given))
        alone = [folder.encode(one, asked, text_model, 99) for one in given]
        assert list(folder.encode_all(given, asked, text_model, 99)) == alone
    with pytest.raises(PromptError, match="it has 43 tokens; this model takes at most 20"):
        list(folder.encode_all(texts, work(Inputs(texts)), text_model, 20))

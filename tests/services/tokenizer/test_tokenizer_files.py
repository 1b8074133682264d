"""Folders whose files disagree are read as transformers' AutoTokenizer reads them."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizer.asked_transformers import asked_here
from support.tokenizer.tokenizer_zoo import (
    WORDS,
    byte_level,
    llama_2,
    metaspace,
    unigram,
    word_piece,
)
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.wire.messages.requests import Chat, PromptText
from penstock.services.tokenizer import library_rules, tokenizer_files
from penstock.services.tokenizer.detokenizer import new_detokenizer
from penstock.services.tokenizer.text_model import TextModel

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {{ eos_token }}"
    "{{ pad_token }}{% endfor %}"
)
TEXTS = [
    "",
    " ",
    "hello world",
    "  hello  world ",
    "hello <s> world </s>x",
    "a<tool>b <tool> c",
    "x <s>",
    "it 's n't the pipe , the turbine . ' ! 12345",
    "naïve café 日本 水 😀 e\u0301 ﬁ",
    "<|im_end|> <|endoftext|>x\n\n",
    "[SEP] the [UNK]",
]
Change = Callable[[dict[str, Any]], object]


class Folder:
    """Files of a tokenizer, written when all is said."""

    def __init__(self, tokenizer: Tokenizer, model_type: str | None = None, **config: Any) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.model = {} if model_type is None else {"model_type": model_type}
        self.others: dict[str, Any] = {}

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        self.tokenizer.save(str(folder / "tokenizer.json"))
        files = {"tokenizer_config.json": self.config, **self.others}
        if self.model:
            files["config.json"] = self.model
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return folder


def with_bos(tokenizer: Tokenizer, bos: str = "<s>") -> Tokenizer:
    number = tokenizer.token_to_id(bos)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, number)]
    )
    return tokenizer


def qwen(**config: Any) -> Folder:
    """The pipeline of Qwen 2 and 3."""
    from tokenizers import Regex
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return Folder(tokenizer, "qwen2", **({"tokenizer_class": "Qwen2Tokenizer"} | names | config))


def gemma(**config: Any) -> Folder:
    tokenizer = llama_2(strip=False)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "mask_token": None}
    tokenizer.add_special_tokens([AddedToken("<unk>", normalized=False)])
    return Folder(with_bos(tokenizer), "gemma2", tokenizer_class="GemmaTokenizer",
                  **(names | config))  # fmt: skip


def llama(tokenizer: Tokenizer | None = None, **config: Any) -> Folder:
    made = with_bos(tokenizer or llama_2())
    return Folder(made, "llama", tokenizer_class="LlamaTokenizer", **config)


def of_transformers_5() -> Tokenizer:
    """As transformers 5 itself saves a Llama 2 tokenizer."""
    tokenizer = llama_2()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.model.unk_token = None
    tokenizer.add_special_tokens([AddedToken("<unk>", normalized=False)])
    return tokenizer


def added(tokenizer: Tokenizer, **changes: dict[str, Any]) -> dict[str, Any]:
    """``added_tokens_decoder`` with what the tokenizer has, but for ``changes`` by content."""
    listed = json.loads(tokenizer.to_str())["added_tokens"]
    return {
        str(each.pop("id")): each | changes.get(each["content"].strip("<>/|"), {})
        for each in listed
    }


def generic(tokenizer: Tokenizer, **config: Any) -> Folder:
    return Folder(tokenizer, "llama", tokenizer_class="PreTrainedTokenizerFast", **config)


def bert(**config: Any) -> Folder:
    return Folder(word_piece(), "bert", tokenizer_class="BertTokenizer", unk_token="[UNK]",
                  sep_token="[SEP]", **config)  # fmt: skip


def other_map() -> Folder:
    folder = generic(llama_2(), bos_token="</s>", eos_token="</s>")
    folder.others["special_tokens_map.json"] = {"bos_token": {"content": "<s>"}}
    return folder


def other_tokens() -> Folder:
    folder = generic(llama_2(), eos_token="</s>")
    folder.others["added_tokens.json"] = {"<tool>": 281}
    return folder


def no_class() -> Folder:
    folder = qwen(bos_token="<|endoftext|>")
    del folder.config["tokenizer_class"]
    return folder


AS_IT_STANDS: dict[str, Callable[[], Folder]] = {
    "generic": lambda: generic(byte_level(), eos_token="<|im_end|>"),
    "generic, splitting control tokens": lambda: generic(
        byte_level(), eos_token="<|im_end|>", split_special_tokens=True
    ),
    "generic, asked for tokens that its file does not add": lambda: generic(
        llama_2(), bos_token="<s>", eos_token="</s>", add_bos_token=True, add_eos_token=True,
        model_max_length=4,
    ),
    "generic, told not to add the token that its file adds": lambda: generic(
        with_bos(llama_2()), bos_token="<s>", add_bos_token=False
    ),
    "generic, asked for a blank at the beginning": lambda: generic(
        byte_level(), add_prefix_space=True
    ),
    "generic, with the same tokens listed": lambda: generic(
        byte_level(), added_tokens_decoder=added(byte_level())
    ),
    "generic, with blanks before punctuation": lambda: generic(
        word_piece(), clean_up_tokenization_spaces=True
    ),
    "generic BPE, with blanks before punctuation": lambda: generic(
        metaspace(), clean_up_tokenization_spaces=True
    ),
    "unigram": lambda: generic(unigram(), bos_token="<s>", clean_up_tokenization_spaces=True),
    "unigram with bytes": lambda: generic(unigram(byte_fallback=True)),
    "byte-level under Llama's name": lambda: Folder(
        byte_level(), "llama", tokenizer_class="LlamaTokenizerFast"
    ),
    "an older map of names": other_map,
    "as transformers 5 saves Llama": lambda: llama(of_transformers_5()),
    "Qwen": qwen,
    "Qwen under the generic name": lambda: qwen(tokenizer_class="PreTrainedTokenizerFast"),
    "Qwen under no name": no_class,
    "Gemma": gemma,
    "Mistral's file under Llama's name": lambda: Folder(
        with_bos(llama_2()), "phi3", tokenizer_class="LlamaTokenizerFast", legacy=True
    ),
}  # fmt: skip
BUILT_ANEW: dict[str, Callable[[], Folder]] = {
    "Llama 2": lambda: llama(legacy=False),
    "Llama 2, legacy": lambda: llama(legacy=True),
    "Llama 2 without a blank at the beginning": lambda: llama(add_prefix_space=False),
    "Llama in transformers 5, legacy": lambda: llama(of_transformers_5(), legacy=True),
    "Qwen with a blank at the beginning": lambda: qwen(add_prefix_space=True),
    "Qwen that lists fewer tokens than its file": lambda: qwen(
        added_tokens_decoder=dict(list(added(byte_level()).items())[:2])
    ),
    "Qwen's name over another pipeline": lambda: Folder(
        byte_level(), "qwen2", tokenizer_class="PreTrainedTokenizerFast"
    ),
    "Gemma's default names": lambda: gemma(mask_token="<mask>"),
    "a token that takes the blanks around it": lambda: generic(
        llama_2(), added_tokens_decoder=added(llama_2(), s={"lstrip": True, "rstrip": True})
    ),
    "a token that is no control token any more": lambda: generic(
        byte_level(), added_tokens_decoder=added(byte_level(), im_end={"special": False})
    ),
    "a token that the text is normalized for": lambda: generic(
        llama_2(), added_tokens_decoder=added(llama_2(), s={"normalized": True})
    ),
    "more tokens than the file has": lambda: generic(
        llama_2(), extra_special_tokens=["<tool>"], pad_token="<pad>"
    ),
    "a named token of its own": lambda: generic(llama_2(), image_token="<tool>"),
    "an older list of tokens": other_tokens,
    "BERT": bert,
    "BERT with blanks before punctuation": lambda: bert(clean_up_tokenization_spaces=True),
    "a class of encoders": lambda: Folder(
        unigram(), "xlm-roberta", tokenizer_class="XLMRobertaTokenizer", bos_token="<s>"
    ),
}


def ids_of(encoded: bytes) -> list[int]:
    return np.frombuffer(encoded, dtype="<i4").tolist()


def check_like_transformers(folder: Path) -> None:
    """Encoding, chats, and text token by token, with and without special tokens."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    model = TextModel.load(folder)
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False)
        assert ids_of(model.encode(text, add_special_tokens=False)) == expected, text
        assert ids_of(model.encode_prompt(PromptText(text))) == reference.encode(text), text
    chat = [{"role": "user", "content": "hello the pipe"}, {"role": "assistant", "content": "a"}]
    expected = reference.apply_chat_template(chat, return_dict=False)
    assert ids_of(model.encode_prompt(Chat(json.dumps(chat).encode()))) == expected
    draw = random.Random(5)
    answers = [reference.encode(text) for text in TEXTS]
    answers += [[draw.randrange(len(reference)) for _ in range(40)] for _ in range(60)]
    for skip in (True, False):
        for ids in answers:
            detokenizer = new_detokenizer(model.table(skip))
            text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            assert text == reference.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("name", AS_IT_STANDS)
def test_a_file_that_transformers_takes_as_it_stands_is_read_without_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "library_tokenizer", None)
    check_like_transformers(AS_IT_STANDS[name]().write(tmp_path / "m"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that transformers was asked for: in this process, as a new one takes seconds."""
    return asked_here(monkeypatch)


@pytest.mark.parametrize("name", BUILT_ANEW)
def test_a_file_that_transformers_does_not_take_as_it_stands_is_left_to_it(
    name: str, tmp_path: Path, asked: list[Path]
) -> None:
    check_like_transformers(BUILT_ANEW[name]().write(tmp_path / "m"))
    assert asked


def test_transformers_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    check_like_transformers(llama(legacy=True).write(tmp_path / "m"))


@pytest.mark.slow
def test_what_transformers_cannot_read_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = generic(llama_2(), added_tokens_decoder={"0": 5}).write(tmp_path / "m")
    with pytest.raises(BadModelFolder, match=r"tokenizer\.json: transformers makes no tokenizer"):
        TextModel.load(folder)


def test_a_sentencepiece_model_alone_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, asked: list[Path]
) -> None:
    folder = tmp_path / "old folder"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\x02")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(BadModelFolder, match="sentencepiece and protobuf are") as refused:
        TextModel.load(folder)
    assert str(refused.value).endswith(f"'{folder}'") and asked


def test_the_command_that_writes_a_tokenizer_file_does(tmp_path: Path) -> None:
    from penstock.protocol.conversion import tokenizer_command

    written = json.loads(byte_level().to_str())["model"]
    folder = tmp_path / "it's old"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(written["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in written["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    done = subprocess.run(tokenizer_command(folder), shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "tokenizer.json").exists()


def test_the_rules_are_those_of_the_installed_transformers() -> None:
    import transformers
    from transformers.models.auto import tokenization_auto as auto

    names = auto.TOKENIZER_MAPPING_NAMES
    known = library_rules.CLASS_OF_MODEL
    assert {model: names.get(model) or "" for model in known} == known
    wrong = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    specific = {model for model in known if known[model] not in ("", library_rules.BACKEND)}
    assert wrong & specific == library_rules.OVERRULED
    for name, digest in library_rules.PIPELINES.items():
        made = getattr(transformers, name)(vocab={"<unk>": 0, "a": 1, "aa": 2}, merges=[("a", "a")])
        assert library_rules.pipeline_digest(made.backend_tokenizer.to_str().encode()) == digest
        assert made.special_tokens_map == library_rules.DEFAULTS[name]
        assert made.clean_up_tokenization_spaces is False


@pytest.mark.parametrize("words", [WORDS])
def test_blanks_before_punctuation_go_however_the_text_comes(words: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    from penstock.services.tokenizer.detokenizer import CleanedDetokenizer

    class Pieces:
        def push(self, piece: Any) -> str:
            return str(piece)

        def flush(self) -> str:
            return ""

    clean = PreTrainedTokenizerFast(tokenizer_object=word_piece()).clean_up_tokenization
    draw = random.Random(11)
    for _ in range(4000):
        text = "".join(draw.choice("  '.,ntsmverx") for _ in range(draw.randrange(14)))
        cleaned = CleanedDetokenizer(Pieces())  # type: ignore[arg-type]
        out, at = "", 0
        while at < len(text):
            size = draw.randrange(1, 4)
            out += cleaned.push(text[at : at + size])  # type: ignore[arg-type]
            at += size
        assert out + cleaned.flush() == clean(text)

"""Tells whether a ``tokenizer.json`` is, as it stands, the tokenizer that transformers would make.

``AutoTokenizer`` takes that file as it is for some classes and models. For others its class builds
the tokenizer anew, from the vocabulary alone, with a normalizer and a pre-tokenizer of its own, and
``tokenizer_config.json`` adds or drops tokens. The rules here are those of transformers 5; they
know the common cases, and say no to whatever they do not know. Then ``library_tokenizer`` asks
transformers itself. Tests compare every table with the installed version.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.model_info import BadModelFolder, read_json
from penstock.services.tokenizer.chat_template import SPECIAL_TOKEN_NAMES, token_text

BACKEND = "TokenizersBackend"
"""The class that takes ``tokenizer.json`` as it stands; formerly ``PreTrainedTokenizerFast``."""
_GENERIC = ("PreTrainedTokenizer", "PythonBackend", BACKEND)
_OTHER_FILES = ("added_tokens.json", "special_tokens_map.json")

CLASS_OF_MODEL: dict[str, str] = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("glm", "glm4", "granite", "olmo2", "olmo3", "phi3", "stablelm"), BACKEND),
    **dict.fromkeys(
        ("llama", "llama4", "llama4_text", "smollm3", "exaone4", "falcon", "bloom"), ""
    ),
}
"""The class that transformers registers for a ``model_type``; empty: none. Mistral's are left out:
they may go through a library of their own."""
OVERRULED = frozenset({"qwen2"})
"""Models of which the registered class counts, whatever ``tokenizer_class`` says."""

PIPELINES = {
    "LlamaTokenizer": "38fe36e4b037d90c",
    "GemmaTokenizer": "2e3a1a6719715901",
    "Qwen2Tokenizer": "a2991959a9122462",
    "GPT2Tokenizer": "f75ab42eaecefda6",
    "GPTNeoXTokenizer": "a0c3bace7b6535f3",
    "CohereTokenizer": "5672cf59bcc2b992",
}
"""What each class builds around a vocabulary: ``pipeline_digest`` of its ``tokenizer.json``."""
DEFAULTS: dict[str, dict[str, str]] = {
    BACKEND: {},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
        "pad_token": "<|padding|>",
    },
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "sep_token": "<SEP>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "mask_token": "<MASK_TOKEN>",
    },
}
"""The special tokens that a class has where the configuration names none."""


class _Added(msgspec.Struct, eq=True, frozen=True):
    content: str
    id: int = -1
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.single_word or self.lstrip or self.rstrip or self.normalized)


class _Model(msgspec.Struct):
    type: str = ""
    vocab: msgspec.Raw = msgspec.Raw()
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _File(msgspec.Struct):
    """The parts of a ``tokenizer.json`` that are looked at."""

    model: _Model
    added_tokens: list[_Added] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def pipeline_digest(tokenizer_json: bytes) -> str:
    """Names what stands around a vocabulary. Two texts of one name tokenize alike with it."""
    return _digest(msgspec.json.decode(tokenizer_json, type=_File))


def _digest(file: _File) -> str:
    model = msgspec.structs.asdict(file.model) | {"vocab": None}
    pipeline = [file.normalizer, file.pre_tokenizer, _plain_decoder(file.decoder), model]
    text = msgspec.json.encode(_said(pipeline), order="deterministic")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _plain_decoder(decoder: Any) -> Any:
    """A byte-level decoder looks at none of its settings."""
    is_bytes = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
    return {"type": "ByteLevel"} if is_bytes else decoder


def _said(tree: Any) -> Any:
    """Without what is false or nothing, and without ``trim_offsets``, which changes no id."""
    if isinstance(tree, list):
        return [_said(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    said = {key: _said(value) for key, value in tree.items() if key != "trim_offsets"}
    return {key: value for key, value in said.items() if value not in (None, False, "")}


def class_name(
    declared: str | None, model_type: str | None, *, is_byte_level: bool, has_code: bool
) -> str | None:
    """The class that ``AutoTokenizer`` chooses; ``None``: not known here.

    Args:
        declared: ``tokenizer_class``.
        is_byte_level: whether the pre-tokenizer of ``tokenizer.json`` is.
        has_code: whether the folder names code of its own for its tokenizer, which is not run.
    """
    registered = "" if model_type is None else CLASS_OF_MODEL.get(model_type)
    if registered is None:
        return None
    if not declared:
        return registered or BACKEND
    chosen = declared.removesuffix("Fast")
    overruled = model_type in OVERRULED
    if not has_code and chosen == "LlamaTokenizer" and is_byte_level and not overruled:
        return BACKEND
    if not has_code and registered and registered != chosen:
        chosen = registered if overruled or registered == BACKEND else chosen
    return BACKEND if chosen in _GENERIC else chosen


def special_tokens_as_it_stands(
    folder: Path, text: bytes, config: dict[str, Any]
) -> dict[str, str] | None:
    """The named special tokens, where ``tokenizer.json`` is what transformers would make.

    Args:
        text: of ``tokenizer.json``.
        config: ``tokenizer_config.json``.

    ``None``: it is not, or it is not known to be. Raises ``BadModelFolder`` for other files that
    are broken.
    """
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    path = folder / "config.json"
    model = read_json(path) if path.exists() else {}
    if not isinstance(model, dict):
        raise BadModelFolder(f"{path}: expected an object")
    name = class_name(
        config.get("tokenizer_class") or model.get("tokenizer_class"),
        model.get("model_type"),
        is_byte_level='"ByteLevel"' in msgspec.json.encode(file.pre_tokenizer).decode(),
        has_code=bool(config.get("auto_map")),
    )
    if name not in DEFAULTS or "fix_mistral_regex" in config:
        return None
    others = {each: read_json(folder / each) for each in _OTHER_FILES if (folder / each).exists()}
    named = _named_tokens(name, config, others.get("special_tokens_map.json"))
    if named is None or not _knows_tokens(file, config, others.get("added_tokens.json"), named):
        return None
    if name != BACKEND and not _builds_the_same(name, file, config, named):
        return None
    return named


def _named_tokens(name: str, config: dict[str, Any], special_map: Any) -> dict[str, str] | None:
    """The special tokens by their names; the older file counts where the newer list is absent."""
    named: dict[str, Any] = dict(DEFAULTS[name])
    sources = [config]
    if isinstance(special_map, dict) and "added_tokens_decoder" not in config:
        sources.append(special_map)
    for source in sources:
        for key, value in source.items():
            if not key.endswith("_token") or isinstance(value, bool):
                continue
            if key not in SPECIAL_TOKEN_NAMES:
                return None
            named[key] = token_text(value)
    given = {key: text for key, text in named.items() if text is not None}
    return given if all(given.values()) else None


def _knows_tokens(
    file: _File, config: dict[str, Any], added_map: Any, named: dict[str, str]
) -> bool:
    """Whether the other files add no token, and change none, of those in ``tokenizer.json``."""
    by_id = {added.id: added for added in file.added_tokens}
    special = {added.content for added in file.added_tokens if added.special}
    wanted = set(named.values())
    for key in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(key) or []
        if not isinstance(extra, list):
            return False
        wanted.update(token_text(each) or "" for each in extra)
    if not wanted <= special:
        return False
    listed = config.get("added_tokens_decoder")
    if listed is None:
        numbers = added_map.values() if isinstance(added_map, dict) else ()
        return all(number in by_id for number in numbers)
    try:
        entries = [
            msgspec.convert({**each, "id": int(number)}, _Added) for number, each in listed.items()
        ]
    except (msgspec.ValidationError, AttributeError, TypeError, ValueError):
        return False
    return all(by_id.get(each.id) == each for each in entries)


def _builds_the_same(name: str, file: _File, config: dict[str, Any], named: dict[str, str]) -> bool:
    """Whether a class that builds its tokenizer anew comes to the same."""
    prefix = config.get("add_prefix_space")
    settings = ("legacy", "trust_remote_code", "vocab", "merges")
    if any(map(config.get, settings)) or prefix not in (None, name == "LlamaTokenizer"):
        return False
    listed = config.get("added_tokens_decoder")
    if listed is not None and len(listed) != len(file.added_tokens):
        return False
    texts = set(named.values())
    if not all(added.is_plain for added in file.added_tokens if added.content in texts):
        return False
    return _digest(file) == PIPELINES[name] and _adds_in_order(file)


def _adds_in_order(file: _File) -> bool:
    """Whether the added tokens get their numbers again when they are added one after the other."""
    vocabulary: dict[str, int] = msgspec.json.decode(file.model.vocab, type=dict[str, int])
    following = len(vocabulary)
    for added in sorted(file.added_tokens, key=lambda each: each.id):
        if vocabulary.get(added.content, following) != added.id:
            return False
        following += added.content not in vocabulary
    return True

"""The tokenizer of a checkpoint, as transformers' ``AutoTokenizer`` makes it.

``tokenizer.json`` is read with the ``tokenizers`` library alone where it is what transformers would
make (``library_rules``), which is the common case and takes a fraction of a second. Otherwise a
short-lived process asks transformers (``library_tokenizer``). Code in the folder is never run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from penstock.protocol.conversion import tokenizer_command
from penstock.protocol.model_info import BadModelFolder, read_text
from penstock.services.tokenizer.library_rules import special_tokens_as_it_stands
from penstock.services.tokenizer.library_tokenizer import LibraryTokenizer, library_tokenizer

MAX_TOKENIZER_BYTES = 512 * 1024 * 1024
_OTHER_TOKENIZER_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_SENTENCE_PIECE = ("tokenizer.model", "spiece.model")


class ReadTokenizer(NamedTuple):
    """A tokenizer, and what else its files say."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """``bos_token`` and the like, as a chat template sees them."""
    cleans_up: bool
    """Whether decoded text loses the blanks before punctuation."""


def read_tokenizer(folder: Path, config: dict[str, Any]) -> ReadTokenizer:
    """config: ``tokenizer_config.json``. Raises ``BadModelFolder``."""
    path = folder / "tokenizer.json"
    if path.exists():
        text = read_text(path, MAX_TOKENIZER_BYTES)
        tokenizer = _parsed(path, text)
        special_tokens = special_tokens_as_it_stands(folder, text, config)
        if special_tokens is not None:
            tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
            return ReadTokenizer(tokenizer, special_tokens, _cleans_up(tokenizer, config))
    made = _asked(folder, path)
    tokenizer = _parsed(path, made.tokenizer.encode())
    tokenizer.encode_special_tokens = made.splits_special
    return ReadTokenizer(tokenizer, made.special_tokens, made.cleans_up)


def _parsed(path: Path, text: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics do not derive from Exception
        raise BadModelFolder(f"{path}: not a valid tokenizer: {error}") from None


def _cleans_up(tokenizer: Tokenizer, config: dict[str, Any]) -> bool:
    """transformers leaves BPE alone: there the blanks are text."""
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.model).__name__ == "BPE"
    wanted = bool(config.get("clean_up_tokenization_spaces"))
    return wanted and (bool(config.get(forced)) or not is_bpe)


def _asked(folder: Path, path: Path) -> LibraryTokenizer:
    """What transformers makes of the files. Raises ``BadModelFolder``."""
    found = [name for name in _OTHER_TOKENIZER_FILES if (folder / name).exists()]
    if not path.exists() and not found:
        raise BadModelFolder(
            f"{path}: no such file, and none of {', '.join(_OTHER_TOKENIZER_FILES)} either; the "
            "folder has no tokenizer"
        )
    try:
        return library_tokenizer(folder)
    except BadModelFolder as error:
        reason = str(error)
    if path.exists():
        raise BadModelFolder(
            f"{path}: transformers makes no tokenizer of it with tokenizer_config.json: {reason}"
        )
    if any(name in found for name in _SENTENCE_PIECE) and not find_spec("sentencepiece"):
        reason = "the package sentencepiece is not installed here"
    remedy = "use a checkpoint that has tokenizer.json"
    if any(name in found for name in _SENTENCE_PIECE):
        remedy = (
            "write tokenizer.json where sentencepiece and protobuf are: "
            f"{tokenizer_command(folder)}"
        )
    raise BadModelFolder(
        f"{path}: no such file, and transformers cannot make a tokenizer from the others "
        f"({', '.join(found)}): {reason}; {remedy}"
    )

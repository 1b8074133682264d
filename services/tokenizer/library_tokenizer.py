"""What transformers makes of a folder's tokenizer files, as data: run as a program.

    python -m penstock.services.tokenizer.library_tokenizer FOLDER

It is a process of its own because transformers brings torch along: seconds, and hundreds of
megabytes that a tokenizer would keep. Standard output gets one ``LibraryTokenizer`` in JSON; where
there is none, the exit code is 1 and the last line of standard error the reason. Code in the folder
is never run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from penstock.protocol.model_info import BadModelFolder

SECONDS = 120.0
"""transformers is imported in 4, and converts a large vocabulary in 10."""
_MODULE = "penstock.services.tokenizer.library_tokenizer"


class LibraryTokenizer(msgspec.Struct):
    """A tokenizer as transformers' ``AutoTokenizer`` makes it."""

    tokenizer: str
    """Text of a ``tokenizer.json``."""
    special_tokens: dict[str, str]
    """What a chat template sees of them: ``bos_token`` and the like."""
    cleans_up: bool
    """Whether decoded text loses the blanks before punctuation."""
    splits_special: bool
    """Whether control tokens written in a text are plain text."""


def library_tokenizer(folder: Path) -> LibraryTokenizer:
    """Run the program. Raises ``BadModelFolder`` with transformers' reason."""
    bare = "" in sys.path or os.getcwd() in sys.path
    command = [sys.executable, *([] if bare else ["-P"]), "-m", _MODULE, str(folder.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise BadModelFolder(
            f"{folder}: transformers has not made its tokenizer within {SECONDS:.0f} s"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BadModelFolder(said[-1] if said else f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=LibraryTokenizer)


def make(folder: Path) -> LibraryTokenizer:
    """In this process. Raises whatever transformers raises, ``ValueError`` for a slow tokenizer."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(
        str(folder), trust_remote_code=False, local_files_only=True
    )
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"{type(loaded).__name__} is written in Python, and cannot be a tokenizer.json"
        )
    forced = getattr(
        loaded, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
    is_bpe = type(backend.model).__name__ == "BPE"
    cleans_up = bool(loaded.clean_up_tokenization_spaces) and (forced or not is_bpe)
    special = {str(name): str(token) for name, token in loaded.special_tokens_map.items()}
    splits = bool(backend.encode_special_tokens)
    return LibraryTokenizer(_written(backend), special, cleans_up, splits)


def _written(tokenizer: Tokenizer) -> str:
    """The text of a ``tokenizer.json``. A token that was special once is still skipped in decoding,
    and so is special there, which ``to_str`` does not say."""
    tree = json.loads(tokenizer.to_str())
    for added in tree["added_tokens"]:
        skipped = not tokenizer.decode([added["id"]]) and bool(added["content"].strip())
        added["special"] |= skipped
    return json.dumps(tree)


def main(arguments: list[str]) -> int:
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        made = msgspec.json.encode(make(Path(arguments[0])))
    except Exception as error:
        reason = " ".join(str(error).split())
        sys.stderr.write(f"\n{type(error).__name__}: {reason}\n")
        return 1
    with os.fdopen(answer, "wb") as file:
        file.write(made)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))

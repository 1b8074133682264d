"""Commands that turn a checkpoint's files into those that Penstock reads, for messages.

Each is one line for a shell. It runs transformers in a process of its own, which reads what
Penstock never opens; the user decides whether the folder is to be trusted with that.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_WEIGHTS = (
    "import sys; from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[1])"
)
_TOKENIZER = (
    "import sys; from transformers import AutoTokenizer as T; "
    "T.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
)
_MODEL = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    "[kind.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2]) for kind in (M, T)]"
)


def weights_command(folder: Path) -> str:
    """Writes ``model.safetensors`` beside the ``pytorch_model.bin`` of a folder."""
    return _command(_WEIGHTS, str(folder.absolute()))


def tokenizer_command(folder: Path) -> str:
    """Writes ``tokenizer.json`` beside the tokenizer's older files."""
    return _command(_TOKENIZER, str(folder.absolute()))


def model_command(name: str) -> str:
    """Fetches a model of the hub, and writes it into a folder of its last name."""
    return _command(_MODEL, name, name.rpartition("/")[2])


def _command(code: str, *arguments: str) -> str:
    # The code has no character that means something between double quotes.
    words = [shlex.quote(sys.executable or "python"), "-c", f'"{code}"']
    return " ".join(words + [shlex.quote(each) for each in arguments])

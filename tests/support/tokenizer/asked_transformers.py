"""transformers asked in the test's process, which has imported it, instead of a new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocol.model_info import BadModelFolder
from penstock.services.tokenizer import tokenizer_files
from penstock.services.tokenizer.library_tokenizer import LibraryTokenizer, make


def asked_here(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that it is asked for from now on."""
    asked: list[Path] = []

    def in_this_process(folder: Path) -> LibraryTokenizer:
        asked.append(folder)
        try:
            return make(folder)
        except Exception as error:
            raise BadModelFolder(" ".join(str(error).split())) from error

    monkeypatch.setattr(tokenizer_files, "library_tokenizer", in_this_process)
    return asked

"""``loadtest.studies.repeated_answers`` asks the same requests in many ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.studies.repeated_answers import main


@pytest.mark.slow
def test_answers_in_float32_on_a_cpu_are_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the worker and the scheduler are killed."""
    monkeypatch.setenv("PENSTOCK_THREADS", "1")
    make_model(tmp_path / "model")
    flags = ["--dtype=float32", "--kv-cache-memory-bytes=50000000", "--num-prompts=12"]
    lengths = ["--input-len=5:40", "--output-len=150", "--alone=2", "--kill-after-s=0.1"]
    assert main([str(tmp_path / "model"), "--device=cpu", *flags, *lengths]) == 0
    said = capsys.readouterr().out
    assert said.count("all the same") == 7
    assert "kill -9 of the worker" in said and "kill -9 of the scheduler" in said

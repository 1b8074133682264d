"""Other projects' load tools against ``penstock serve``, and the comparison that runs them.

The slow tests need the tools: ``FOREIGN_LOAD_TOOLS`` names a folder with one virtual
environment each, made as loadtest/studies/foreign/README.md says.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from support.pipeline.served import NULL, SharedServers, served
from tokenizers import Tokenizer

from penstock.loadtest.client.prompts import WORDS
from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.studies.foreign.compare import (
    Pair,
    Run,
    ToolFailed,
    compare,
    first_model,
    main,
    median_ratio,
    outside,
    run_tool,
    table,
    words_for,
)
from penstock.loadtest.studies.foreign.tools import (
    FOREIGN,
    OURS,
    TOKENIZER,
    Figures,
    Load,
    offline_cache,
)
from penstock.services.launcher.builtin_model import builtin_model

STEP_MS = float(NULL[-1])
TOOLS = os.environ.get("FOREIGN_LOAD_TOOLS", "")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def url(shared_server: SharedServers) -> str:
    """Of a server with the built-in model."""
    return shared_server(*NULL).url


@pytest.fixture(scope="module")
def slow_url(tokenizer: Path) -> Iterator[str]:
    """Of a server whose steps are long beside what a tool does between two requests."""
    slow = ("--device", "null", "--null-step-ms", "20")
    with served(str(tokenizer), *slow, "--max-num-seqs", "64") as server:
        yield server.url


def figures(**changed: float) -> Figures:
    values = {
        "requests_per_s": 10.0,
        "output_tokens_per_s": 640.0,
        "mean_ttft_ms": 50.0,
        "mean_tpot_ms": 20.0,
        "median_ttft_ms": 50.0,
        "median_tpot_ms": 20.0,
    }
    return Figures(completed=64, failed=0, input_len=128, output_len=64, **{**values, **changed})


def pair(theirs: float, before: float, after: float) -> Pair:
    """Three runs that differ in TTFT only."""
    runs = (Run(figures(mean_ttft_ms=value), 1.0) for value in (theirs, before, after))
    return Pair("guidellm", *runs)


def test_a_run_is_compared_with_the_mean_of_ours_around_it_and_rounds_by_their_median() -> None:
    pairs = [pair(60, 40, 60), pair(45, 40, 60), pair(500, 40, 60)]
    assert [one.ratio("mean_ttft_ms") for one in pairs] == pytest.approx([1.2, 0.9, 10])
    assert median_ratio(pairs, "mean_ttft_ms") == pytest.approx(1.2)


def test_a_figure_further_off_than_allowed_is_named() -> None:
    pairs = {"guidellm": [pair(60, 50, 50)]}
    assert outside(pairs, 0.25) == []
    assert outside(pairs, 0.1) == ["guidellm: mean TTFT ms is 1.20 of ours"]
    assert outside(pairs, 0.1, ["requests_per_s"]) == []


def test_the_table_has_both_figures_and_their_ratio() -> None:
    text = table({"guidellm": [pair(60, 50, 50)]}, {"guidellm": "0.8.1"})
    assert "| guidellm 0.8.1 | 10 / 10 (1.00) | 640 / 640 (1.00) | 60 / 50 (1.20) |" in text


def test_the_hub_client_finds_the_tokenizer_offline(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    cache = offline_cache(tmp_path / "hub", model)
    found = snapshot_download(TOKENIZER, cache_dir=cache, local_files_only=True)
    assert (Path(found) / "tokenizer.json").read_text() == "{}"


def test_our_random_words_make_as_many_tokens_as_asked(tokenizer: Path) -> None:
    words = words_for(tokenizer, 128)
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    draw = random.Random(0)
    lengths = [len(encoder.encode(" ".join(draw.choices(WORDS, k=words))).ids) for _ in range(200)]
    assert sum(lengths) / len(lengths) == pytest.approx(128, rel=0.05)


def test_a_run_of_ours_is_read_back_with_its_lengths(url: str, tmp_path: Path) -> None:
    words = words_for(builtin_model(), 64)
    load = Load(base_url=url, model=first_model(url), words=words, requests=8, output_len=16)
    run = run_tool(OURS, load, Path(), tmp_path)
    assert (run.figures.completed, run.figures.failed) == (8, 0)
    assert run.figures.output_len == 16
    assert run.figures.input_len == pytest.approx(64 + 16, rel=0.15)  # and the chat template
    # A busy machine makes steps longer, never shorter; another unit would be far away.
    assert 0.95 * STEP_MS < run.figures.mean_tpot_ms < 10 * STEP_MS
    assert run.cpu_seconds > 0


def test_a_tool_that_fails_shows_what_it_said(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        load = Load(base_url=f"http://127.0.0.1:{port}", model="m", words=1, requests=1)
        # A bound port that does not listen refuses connections.
        load_soon = [*OURS.command(load, Path()), "--ready-timeout", "0.2"]
        quick = type(OURS)("ours", "", lambda _load, _bin: load_soon, OURS.prepare, OURS.read)
        with pytest.raises(ToolFailed, match=r"(?s)ours: .*exit code 1.*was not ready within"):
            run_tool(quick, load, Path(), tmp_path)


def test_an_environment_without_the_tool_is_named(
    url: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--base-url", url, "--tokenizer", str(tokenizer), "--openai", str(tmp_path)]
    assert main(arguments) == 1
    assert f"{tmp_path} has no openai" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not TOOLS, reason="FOREIGN_LOAD_TOOLS names no folder")
@pytest.mark.parametrize("name", sorted(FOREIGN))
@pytest.mark.parametrize(
    ("request_rate", "agreeing"),
    [
        pytest.param(None, ["requests_per_s", "output_tokens_per_s", "mean_tpot_ms"], id="closed"),
        pytest.param(4.0, ["mean_ttft_ms", "mean_tpot_ms"], id="poisson"),
    ],
)
def test_a_foreign_tool_completes_and_agrees_within_ten_percent(
    name: str, request_rate: float | None, agreeing: list[str], slow_url: str, tokenizer: Path
) -> None:
    """Rates in a closed loop and TTFT at random arrivals: in a closed loop against equal steps,
    TTFT depends on how long a tool pauses between an answer and its next request, and at random
    arrivals the rates are the tool's own draws."""
    load = Load(
        base_url=slow_url,
        model=first_model(slow_url),
        words=words_for(tokenizer, 128),
        requests=48,
        request_rate=request_rate,
        seed=sum(map(ord, name)),
    )
    pairs = compare(load, {name: Path(TOOLS).absolute() / name}, tokenizer, rounds=3)[name]
    for one in pairs:
        assert one.foreign.figures.output_len == load.output_len
        assert one.foreign.figures.input_len == pytest.approx(128 + 16, rel=0.05)
    ratios = {figure: [one.ratio(figure) for one in pairs] for figure in agreeing}
    print(json.dumps({"tool": name, "request_rate": request_rate, **ratios}))
    for figure in agreeing:
        assert median_ratio(pairs, figure) == pytest.approx(1, abs=0.1), ratios

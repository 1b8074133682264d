"""Text is the same with drafts and without, whatever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.worker.oracle_drafts import AllDrafts, OracleProposer, speculating
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.tiny_models import FAMILIES, VARIANTS, some_prompts
from test_worker_model_executor import executor_for

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.fields import DeviceConfig, SpeculationConfig
from penstock.protocol.wire.messages.steps import (
    Dry,
    SamplerStage,
    SlotAdjustments,
    SlotSampling,
)
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.model_loading import speculate
from penstock.services.worker.speculation.drafting import Drafting

Folder = Callable[[str], Path]


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


ADJUSTED = {
    "penalties": SlotAdjustments(repetition=1.3, frequency=0.4, presence=0.5),
    "bias": SlotAdjustments(
        biased=ids(3, 9), biases=np.array([4.0, -3.0], "<f4").tobytes(), bad_words=[ids(3, 9)]
    ),
    "allowed": SlotAdjustments(allowed=ids(*range(2, 40)), bad_words=[ids(5), ids(7, 8)]),
    "min tokens": SlotAdjustments(min_tokens=9, ends=ids(*range(60))),
    "dry": SlotAdjustments(dry=Dry(2.0, 1.5, 1), no_repeat_ngram=3),
    "mirostat": SlotAdjustments(stages=[SamplerStage("mirostat", [3.0, 0.2])]),
}


def with_and_without(folder: Path, samplings: list[SlotSampling], tokens: int = 24) -> PlanDriver:
    """Compares the outputs of prompts, and their logprobs; returns the driver with drafts."""
    prompts = some_prompts([1, 33, 5, 64, 129, 260])[: len(samplings)]
    plain = PlanDriver(executor_for(folder, kind=DraftingExecutor), 1)
    expected = plain.run(prompts, tokens, samplings=samplings, chunk=100)
    executor = executor_for(folder, kind=DraftingExecutor)
    speculating(executor, list(zip(prompts, expected, strict=True)))
    driver = PlanDriver(executor, 2)
    got = driver.run(prompts, tokens, samplings=samplings, chunk=50, preemptions=3)
    assert got == expected
    assert driver.logprobs == plain.logprobs
    assert max(driver.row_counts) > 1
    return driver


@pytest.mark.parametrize("variant", [*VARIANTS, *FAMILIES])
def test_drafts_change_no_greedy_token(variant: str, tiny_folder: Folder) -> None:
    with_and_without(tiny_folder(variant), [GREEDY] * 3, 16)


def test_drafts_change_no_draw_and_no_logprob(tiny_folder: Folder) -> None:
    samplings = [
        SlotSampling(0.0, 0, 1.0, 0, logprobs=2),
        SlotSampling(1.0, 0, 1.0, 5),
        SlotSampling(0.8, 7, 0.9, 6, logprobs=0),
        SlotSampling(1.3, 0, 0.7, 7, min_p=0.05, logprobs=5),
        SlotSampling(0.9, 20, 1.0, 8),
    ]
    with_and_without(tiny_folder("llama"), samplings)


@pytest.mark.parametrize("name", ADJUSTED)
def test_what_reads_the_text_reads_the_accepted_tokens(name: str, tiny_folder: Folder) -> None:
    samplings = [
        SlotSampling(1.0, 0, 1.0, 5, adjustments=ADJUSTED[name], logprobs=1),
        SlotSampling(0.9, 9, 0.9, 6),
        SlotSampling(0.0, 0, 1.0, 7, adjustments=ADJUSTED[name]),
    ]
    if name == "mirostat":  # what it knows of a text is not made anew by this driver's plans
        samplings = samplings[:1]
    with_and_without(tiny_folder("llama"), samplings)


@pytest.mark.parametrize("tokens", [4, 9])
def test_a_slot_gets_no_token_beyond_its_last_one(tokens: int, tiny_folder: Folder) -> None:
    with_and_without(tiny_folder("llama"), [GREEDY, GREEDY], tokens)


def test_rejected_drafts_are_counted_by_their_place(tiny_folder: Folder) -> None:
    prompts = some_prompts([20])
    folder = tiny_folder("llama")
    expected = PlanDriver(executor_for(folder, kind=DraftingExecutor), 1).run(prompts, 40)
    executor = executor_for(folder, kind=DraftingExecutor)
    for wrong, accepted in ((0.0, True), (1.0, False)):
        proposer = OracleProposer([(prompts[0], expected[0])], wrong)
        drafting = Drafting(proposer, 3, AllDrafts(64))
        executor.speculate(drafting)
        executor.reset()
        driver = PlanDriver(executor, 2)
        assert driver.run(prompts, 40, chunk=100) == expected
        drafted, taken = drafting.counts.drafted["own"], drafting.counts.accepted["own"]
        assert drafted[0] >= drafted[1] >= drafted[2] > 0
        assert taken == (drafted if accepted else [0, 0, 0])


def test_a_gpu_without_kernels_of_ours_is_refused_drafts_by_name(tiny_folder: Folder) -> None:
    executor = executor_for(tiny_folder("llama"), kind=DraftingExecutor)
    config = Config(
        speculation=SpeculationConfig(speculative="ngram"), device=DeviceConfig(device="cuda")
    )
    with pytest.raises(ConfigError, match=r"--speculative ngram: .*own kernels.*off"):
        speculate(executor, config, torch.device("cuda"))
    assert executor.drafting is None

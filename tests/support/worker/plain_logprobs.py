"""Logprobs by the definition, for the tests of both executors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from support.worker.plan_driver import PlanDriver
from transformers import AutoModelForCausalLM

from penstock.protocol.logprobs import OWN_WORDS, PackedLogprobs
from penstock.protocol.wire.messages.steps import SlotSampling

LISTED = [0, 3, 20]
TOLERANCE = 1e-4


def asking_for_logprobs() -> list[SlotSampling]:
    """Greedy and drawn rows that list 0, 3 and 20 tokens, and one that asks for nothing."""
    asked = [
        SlotSampling(0.8 * (place % 2), 0, 1.0, 5 + place, logprobs=listed)
        for place, listed in enumerate(LISTED)
    ]
    return [*asked, SlotSampling(0.0, 0, 1.0, 0)]


def of_transformers(folder: Path, tokens: list[int]) -> npt.NDArray[np.float64]:
    """[positions, V]: log-probabilities after each token, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0].double()
    found: npt.NDArray[np.float64] = logits.log_softmax(-1).numpy()
    return found


def compare(packed: PackedLogprobs, tokens: list[int], plain: npt.NDArray[np.float64]) -> None:
    """tokens: those of the entries; plain: [entries, V], the distributions they came from."""
    words = np.frombuffer(packed.entries, "<i4").reshape(len(tokens), OWN_WORDS + 2 * packed.most)
    ids = words[:, OWN_WORDS : OWN_WORDS + packed.most]
    top = words[:, OWN_WORDS + packed.most :].copy().view("<f4")
    chosen = words[:, 2].copy().view("<f4")
    assert words[:, 0].tolist() == tokens
    for row, token in enumerate(tokens):
        assert abs(chosen[row] - plain[row, token]) < TOLERANCE
        above = np.sort(plain[row])[::-1][: packed.most]
        assert np.abs(top[row] - above).max(initial=0.0) < TOLERANCE
        assert np.abs(top[row] - plain[row, ids[row]]).max(initial=0.0) < TOLERANCE
        assert len(set(ids[row].tolist())) == packed.most
        near = np.abs(plain[row] - plain[row, token]) < TOLERANCE
        higher = int((plain[row] > plain[row, token]).sum())
        assert higher - int(near.sum()) < words[row, 1] <= higher + int(near.sum())


def check_outputs(
    driver: PlanDriver, folder: Path, prompts: list[list[int]], tokens: int = 5
) -> None:
    """Logprobs of the outputs of ``asking_for_logprobs``."""
    outputs = driver.run(prompts, tokens, samplings=asking_for_logprobs(), preemptions=2)
    assert {name for name, _ in driver.logprobs} == set(range(len(LISTED)))
    for name, listed in enumerate(LISTED):
        plain = of_transformers(folder, prompts[name] + outputs[name])
        for index, token in enumerate(outputs[name]):
            found = driver.logprobs[name, index]
            assert found.most == listed
            compare(found, [token], plain[len(prompts[name]) - 1 + index][None])


def check_prompts(driver: PlanDriver, folder: Path, prompts: list[list[int]]) -> None:
    """Logprobs of prompts in chunks of any size."""
    driver.run(prompts, 2, samplings=asking_for_logprobs(), prompt_logprobs=2)
    for name, prompt in enumerate(prompts):
        plain = of_transformers(folder, prompt)
        covered = 0
        for (owner, start), packed in sorted(driver.prompt_logprobs.items()):
            if owner != name:
                continue
            count = len(packed.entries) // (4 * (OWN_WORDS + 4))
            assert start == covered
            compare(packed, prompt[start + 1 : start + 1 + count], plain[start : start + count])
            covered += count
        assert covered == len(prompt) - 1

"""Logits in bfloat16 on a CUDA device, graphs included, of the families whose heads and layers are
unlike Llama's: as near to those in float32 as transformers' own are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.worker.plan_driver import PlanDriver
from support.worker.published_heads import PUBLISHED_HEADS, write_published_heads
from support.worker.tiny_models import some_prompts
from torch import Tensor

from penstock.protocol.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.executor import PLAIN_KERNELS
from penstock.services.worker.gpu.kernel_choice import not_hopper
from penstock.services.worker.loading import load_executor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TORCH_LAYERS = {"olmo2", "olmo3", "starcoder2", "exaone4", "cohere", "cohere-qk-norm", "cohere2"}
TRITON_ALONE = {"gemma3", "granite-swa", "starcoder2"}
"""Heads of 256, sinks or windows in all layers."""
ROOM = 1.5
"""Times the distance of transformers' logits in bfloat16 that ours may be away."""


class Recorded:
    """An executor that keeps the logits of every sampled row, by prompt and output position."""

    def __init__(self, executor: Any) -> None:
        self.capacity, self._executor = executor.capacity, executor
        self._prompts: dict[int, int] = {}
        self._decoding: set[int] = set()
        self.logits: dict[int, list[Tensor]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self._decoding -= set(plan.gone)
        self._prompts |= {new.slot: new.choice for new in plan.added}
        result: StepResult = self._executor.execute(plan)
        slots = sorted(self._decoding) + [each.slot for each in plan.chunks if each.sample]
        self._decoding |= set(slots)
        for slot, row in zip(slots, self._executor.decoder.space.logits, strict=False):
            self.logits.setdefault(self._prompts[slot], []).append(row.float().cpu().clone())
        return result


def recorded(folder: Path, prompts: list[list[int]]) -> tuple[str, list[list[int]], list[Tensor]]:
    """The words of an executor, the tokens that it chooses and the logits [tokens, V] of each
    prompt's; prompts come in chunks, some of them twice."""
    executor: Any = load_executor(
        Config(
            model=ModelConfig(model=str(folder), dtype="bfloat16", max_model_len=1024),
            cache=CacheConfig(num_kv_blocks=1000),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
            device=DeviceConfig(device="cuda"),
        ),
        lambda note: None,
    )
    seen: Any = Recorded(executor)
    choices = list(range(len(prompts)))
    outputs = PlanDriver(seen, 1).run(prompts, 16, choices=choices, preemptions=3)
    return executor.summary, outputs, [torch.stack(seen.logits[choice]) for choice in choices]


def by_transformers(
    folder: Path, prompts: list[list[int]], outputs: list[list[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Logits ahead of each output token."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="eager").eval().cuda()
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output[:-1]], device=model.device)
        with torch.inference_mode():
            found.append(model(ids).logits[0, len(prompt) - 1 :].float().cpu())
    return found


def distances(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Of each row, as a share of its length."""
    pairs = zip(found, wanted, strict=True)
    return torch.cat([(one - other).norm(dim=1) / other.norm(dim=1) for one, other in pairs])


@pytest.mark.parametrize("variant", list(PUBLISHED_HEADS))
def test_logits_are_as_near_to_those_in_float32_as_transformers_are(
    variant: str, tmp_path: Path
) -> None:
    if not hasattr(transformers, f"{PUBLISHED_HEADS[variant][0]}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} does not know {variant}")
    folder = write_published_heads(variant, tmp_path / variant)
    prompts = some_prompts([1, 35, 150, 700])
    words, outputs, ours = recorded(folder, prompts)
    exact = by_transformers(folder, prompts, outputs, torch.float32)
    theirs = distances(by_transformers(folder, prompts, outputs, torch.bfloat16), exact)
    found = distances(ours, exact)
    print(f"{variant}: {found.mean():.4f} {found.max():.4f} transformers {theirs.mean():.4f}")
    assert found.mean() < ROOM * theirs.mean()
    assert found.max() < ROOM * theirs.max()
    assert words.startswith(PLAIN_KERNELS) == (variant in TORCH_LAYERS)
    assert ("layers of few rows by the " in words) == (variant not in TORCH_LAYERS)
    hopper = variant not in TRITON_ALONE and not not_hopper()
    kernel = "Gluon kernel for Hopper" if hopper else "Triton kernel"
    assert f"prefill attention by the {kernel}" in words
    assert f"decode attention by the {kernel}" in words

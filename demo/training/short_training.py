"""Trainings of a few minutes: flags that they share, and the learning rate of each step."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

MODEL = Path(__file__).parent.parent / "model"
_WARMUP_STEPS = 20


def add_flags(parser: argparse.ArgumentParser, max_cpu_seconds: float) -> None:
    """Flags of any training; ``max_cpu_seconds``: the default."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=MODEL, help="an exported model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-cpu-seconds", type=float, default=max_cpu_seconds)


def scheduled(
    optimizer: Optimizer, rate: float, steps: int, max_cpu_seconds: float
) -> Iterator[tuple[int, float]]:
    """Each step's number, from 0 on, and the seconds of CPU spent before it. The learning rate
    rises to ``rate`` and falls as a cosine with the steps or with the time that is left, whichever
    is less; with either the training ends."""
    began = time.process_time()
    for step in range(steps):
        spent = time.process_time() - began
        left = 1.0 - max(step / steps, spent / max_cpu_seconds)
        if left <= 0.0:
            return
        share = min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - math.cos(math.pi * left)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        yield step, spent


def descend(optimizer: Optimizer, loss: Tensor, parameters: list[nn.Parameter]) -> None:
    """One step down the gradient, which is clipped to a norm of 1."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()

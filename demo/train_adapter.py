"""Train an adapter of ``penstock-demo``: ``python -m penstock.demo.train_adapter FOLDER``.

The folder receives what peft writes. The adapter learns the skills that only adapters have
(``penstock.demo.mixture.OF_ADAPTERS``), and a few conversations of the model's own training text,
so that it keeps what the model knows. It takes minutes of one core.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor

from penstock.demo.adapter import adapt, save
from penstock.demo.exchange import Random
from penstock.demo.generate import load
from penstock.demo.mixture import OF_ADAPTERS, conversation, question
from penstock.demo.model import Qwen3, dense_mask
from penstock.demo.packing import IGNORED, encode

MODEL = Path(__file__).parent / "model"
_WARMUP_STEPS = 20
_LONGEST = 56
"""Tokens of a conversation; longer ones are left out."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m penstock.demo.train_adapter", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=32, help="conversations of a step")
    parser.add_argument("--kept", type=int, default=2, help="of which so many are the model's own")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=MODEL, help="an exported model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-cpu-seconds", type=float, default=800.0)
    return parser


def batch(tokenizer: Tokenizer, source: Random, rows: int, kept: int) -> tuple[Tensor, Tensor]:
    """Ids and the labels of the next token, both int64 [rows, longest]."""
    made: list[tuple[list[int], list[int]]] = []
    while len(made) < rows:
        if len(made) < kept:
            found = conversation(source)
        else:
            source.free = source.random() < 0.5
            found = question(source.choice(list(OF_ADAPTERS)), source, "training")
            found.enable_thinking = source.random() < 0.75
        encoded = encode(tokenizer, found)
        if len(encoded[0]) <= _LONGEST:
            made.append(encoded)
    longest = max(len(ids) for ids, _ in made) - 1
    ids, labels = (
        torch.zeros(rows, longest, dtype=torch.int64),
        torch.full((rows, longest), IGNORED),
    )
    for row, (own, said) in enumerate(made):
        ids[row, : len(own) - 1] = torch.tensor(own[:-1])
        labels[row, : len(own) - 1] = torch.tensor(said[1:])
    return ids, labels


def loss_of(model: Qwen3, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the labels; only their logits are computed."""
    hidden = model.hidden(ids, dense_mask(torch.ones_like(ids)))
    wanted = labels != IGNORED
    logits = functional.linear(hidden[wanted], model.embed_tokens.weight)
    return functional.cross_entropy(logits, labels[wanted])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and write. Returns the exit code."""
    options = _parser().parse_args(arguments)
    torch.manual_seed(options.seed)
    model, tokenizer = load(options.model, options.device, torch.float32)
    parameters = adapt(model, options.rank, options.alpha)
    model.to(options.device)
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.99), weight_decay=0.01)
    source, began, step = Random(f"adapter {options.seed}"), time.process_time(), 0
    while step < options.steps:
        spent = time.process_time() - began
        # What is left shrinks with the steps or with the time, whichever is less.
        left = 1.0 - max(step / options.steps, spent / options.max_cpu_seconds)
        if left <= 0.0:
            break
        share = min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - math.cos(math.pi * left)) / 2
        for group in optimizer.param_groups:
            group["lr"] = options.lr * share
        made = batch(tokenizer, source, options.rows, options.kept)
        ids, labels = (tensor.to(options.device) for tensor in made)
        loss = loss_of(model, ids, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.4f}, {spent:.0f} s of a core", flush=True)
            save(model, options.folder, options.rank, options.alpha)
    print(f"{save(model, options.folder, options.rank, options.alpha):,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

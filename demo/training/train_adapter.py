"""Train an adapter of ``penstock-demo``: ``python -m penstock.demo.training.train_adapter FOLDER``.

The folder receives what peft writes. The adapter learns the skills that only adapters have
(``penstock.demo.mixture.OF_ADAPTERS``), and a few conversations of the model's own training text,
so that it keeps what the model knows. It takes minutes of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor

from penstock.demo.exchange import Random
from penstock.demo.mixture import OF_ADAPTERS, conversation, question
from penstock.demo.training.adapter import adapt, save
from penstock.demo.training.generate import load
from penstock.demo.training.model import Qwen3, dense_mask
from penstock.demo.training.packing import IGNORED, encode
from penstock.demo.training.short_training import add_flags, descend, scheduled

_LONGEST = 56
"""Tokens of a conversation; longer ones are left out."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m penstock.demo.training.train_adapter", description=__doc__
    )
    add_flags(parser, max_cpu_seconds=800.0)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=32, help="conversations of a step")
    parser.add_argument("--kept", type=int, default=2, help="of which so many are the model's own")
    parser.add_argument("--lr", type=float, default=4e-3)
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
    source = Random(f"adapter {options.seed}")
    rates = scheduled(optimizer, options.lr, options.steps, options.max_cpu_seconds)
    for step, spent in rates:
        made = batch(tokenizer, source, options.rows, options.kept)
        ids, labels = (tensor.to(options.device) for tensor in made)
        loss = loss_of(model, ids, labels)
        descend(optimizer, loss, parameters)
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}, loss {loss.item():.4f}, {spent:.0f} s of a core", flush=True)
            save(model, options.folder, options.rank, options.alpha)
    print(f"{save(model, options.folder, options.rank, options.alpha):,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

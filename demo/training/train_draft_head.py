"""Train an EAGLE-3 head for the built-in model: ``python -m penstock.demo.training.train_draft_head
FOLDER``.

The folder receives what such heads are published as; ``--speculative eagle3 --speculative-model
FOLDER`` drafts with it. The head learns on the model's own training text. It takes minutes of one
core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from penstock.demo.training.draft_head import DraftHead, loss_of, passes_of, target_rows
from penstock.demo.training.generate import load
from penstock.demo.training.model import Qwen3, dense_mask
from penstock.demo.training.packing import IGNORED, Packed
from penstock.demo.training.short_training import add_flags, descend, scheduled

_COUNTED = 20
"""Batches whose tokens are counted, to draft the most frequent ones."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m penstock.demo.training.train_draft_head", description=__doc__
    )
    add_flags(parser, max_cpu_seconds=300.0)
    parser.add_argument("--draft-vocab", type=int, default=1024, help="tokens that it drafts")
    parser.add_argument("--width", type=int, default=256, help="of its MLP")
    parser.add_argument("--passes", type=int, default=3, help="drafts in a row that it learns")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=4, help="packed rows of a step")
    parser.add_argument("--length", type=int, default=192, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser


def frequent(text: Packed, count: int, vocab: int) -> Tensor:
    """The tokens that are said most often, ascending int64."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for number in range(_COUNTED):
        labels = torch.from_numpy(text[number][1]).long()
        counts += torch.bincount(labels[labels != IGNORED], minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def pass_losses(
    head: DraftHead, target: Qwen3, batch: Tensor, passes: int
) -> tuple[list[Tensor], list[float]]:
    """Loss of each pass, and the share of its drafts that the target says too, if those before are
    right. batch: int64 [3, b, s], as ``Packed`` makes it."""
    ids, labels, documents = batch
    with torch.no_grad():
        captured, rows = target_rows(target, ids, dense_mask(documents))
    losses, shares = [], []
    for logits, drafts in passes_of(head, ids, documents, captured, passes):
        chosen = drafts & (labels != IGNORED)
        wanted = functional.linear(rows[chosen], target.embed_tokens.weight)
        losses.append(loss_of(head, logits[chosen], wanted))
        right = head.ids[logits[chosen].argmax(-1)] == wanted.argmax(-1)
        shares.append(float(right.float().mean()))
    return losses, shares


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and write. Returns the exit code."""
    options = _parser().parse_args(arguments)
    torch.manual_seed(options.seed)
    target, _ = load(options.model, options.device, torch.float32)
    target.requires_grad_(False)
    text = Packed(
        str(options.model / "tokenizer.json"), options.seed, options.rows, options.length,
        options.steps,
    )  # fmt: skip
    ids = frequent(text, options.draft_vocab, target.shape.vocab_size)
    head = DraftHead(target, ids.to(options.device), options.width).to(options.device)
    parameters = list(head.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.95))
    rates = scheduled(optimizer, options.lr, options.steps, options.max_cpu_seconds)
    for step, spent in rates:
        batch = torch.from_numpy(text[step]).long().to(options.device)
        losses, shares = pass_losses(head, target, batch, options.passes)
        weighted = (each * 0.8**at for at, each in enumerate(losses))
        loss = sum(weighted, start=torch.zeros((), device=options.device))
        descend(optimizer, loss, parameters)
        if (step + 1) % 20 == 0:
            said = ", ".join(f"{each:.3f}" for each in shares)
            first = losses[0].item()
            print(f"step {step + 1}, loss {first:.4f}, right {said}, {spent:.0f} s", flush=True)
            head.save(options.folder)
    print(f"{head.save(options.folder):,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Train ``penstock-demo``: ``python -m penstock.demo.training.train FOLDER``.

The folder receives the tokenizer (one that lies there is used), ``log.jsonl``,
``checkpoint.safetensors`` (continue with ``--resume``) and at the end ``model/``, a normal Hugging
Face folder, and ``training.json``, which says what it was trained on, and from which weights. A
seed fixes the text and the first weights; the text of step *n* is the same whether or not the
training was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from penstock.demo.skills.facts import all_answers
from penstock.demo.training.export import export, read_weights, weights_digest
from penstock.demo.training.model import Qwen3, Shape
from penstock.demo.training.muon import Muon
from penstock.demo.training.packing import Packed
from penstock.demo.training.rounding import round_changes
from penstock.demo.training.tokenizer import make_tokenizer
from penstock.loadtest.models.make_model import write_json

Array = np.ndarray[Any, np.dtype[np.int16]]
WARMUP_STEPS = 200
CHECKPOINT = "checkpoint.safetensors"
BETAS = (0.9, 0.95)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m penstock.demo.training.train", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=128, help="rows of a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--checkpoint-every", type=int, default=1000)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument(
        "--resume", action="store_true", help="go on from FOLDER/checkpoint.safetensors"
    )
    parser.add_argument("--start", type=Path, metavar="MODEL",
                        help="begin with the weights of this exported model")  # fmt: skip
    parser.add_argument("--round-changes", action="store_true",
                        help="with --start: keep what changed as a byte a weight")  # fmt: skip
    parser.add_argument("--max-seconds", type=float, default=math.inf,
                        help="stop with a checkpoint after so long")  # fmt: skip
    parser.add_argument("--attention", choices=("flex", "dense"), default="flex",
                        help="flex: FlexAttention, on GPUs only")  # fmt: skip
    parser.add_argument("--hidden-size", type=int, default=Shape.hidden_size)
    parser.add_argument("--layers", type=int, default=Shape.num_layers)
    return parser


def _rate(step: int, steps: int) -> float:
    """Of the highest learning rate: a linear start, then half a cosine down to a hundredth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


class Training:
    """Model, optimizers and the step that they have reached."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.on_gpu = options.device.startswith("cuda")
        self.flex = self.on_gpu and options.attention == "flex"
        self.shape = Shape(
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            num_heads=options.hidden_size // 64,
            intermediate_size=3 * options.hidden_size,
        )
        self.model = Qwen3(self.shape)
        self.start_digest = ""
        """Of the weights that the training began with; empty: it began with random ones."""
        if options.start:
            self.model.load_state_dict(read_weights(options.start))
            self.start_digest = weights_digest(options.start)
        self.model.to(options.device)
        hidden = [p for p in self.model.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in hidden}
        rest = [p for p in self.model.parameters() if id(p) not in known]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(hidden, options.lr, 0.95, options.weight_decay),
            torch.optim.AdamW(
                rest, lr=options.lr, betas=BETAS, weight_decay=0.0, fused=self.on_gpu
            ),
        ]
        self.step = 0
        self.seconds = 0.0
        self.loss = torch.compile(self.model) if self.on_gpu else self.model

    def train_step(self, batch: Array) -> Tensor:
        """One batch of ``Packed``. Returns the loss, not yet waited for."""
        given = torch.from_numpy(batch)
        if self.on_gpu:
            given = given.pin_memory()
        ids, labels, documents = given.to(self.options.device, non_blocking=True).long().unbind()
        rate = self.options.lr * _rate(self.step, self.options.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        kind = self.options.device.partition(":")[0]
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss: Tensor = self.loss(ids, labels, documents, flex=self.flex)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def save(self) -> None:
        path = self.options.folder / CHECKPOINT
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for place, optimizer in enumerate(self.optimizers):
            for number, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimizer.{place}.{number}.{name}"] = value
        reached = {
            "step": str(self.step),
            "seconds": str(self.seconds),
            "start_sha256": self.start_digest,
        }
        save_file(tensors, path.with_suffix(".new"), metadata=reached)
        path.with_suffix(".new").replace(path)

    def load(self) -> None:
        """Raises ``OSError`` if there is no checkpoint, and ``ValueError`` where ``--start`` names
        another model than the one that the training began with."""
        weights: dict[str, Tensor] = {}
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        with safe_open(self.options.folder / CHECKPOINT, "pt") as file:
            reached = file.metadata()
            self._begun_with(reached.get("start_sha256", self.start_digest))
            for key in file.keys():  # noqa: SIM118
                if key.startswith("model."):
                    weights[key.removeprefix("model.")] = file.get_tensor(key)
                    continue
                _, place, number, name = key.split(".")
                states[int(place)].setdefault(int(number), {})[name] = file.get_tensor(key)
        self.model.load_state_dict(weights)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        self.step, self.seconds = int(reached["step"]), float(reached["seconds"])

    def _begun_with(self, digest: str) -> None:
        """digest: what the checkpoint says of it."""
        start = self.options.start
        if start and self.start_digest != digest:
            kept = f"one with SHA-256 {digest}" if digest else "random weights"
            raise ValueError(
                f"--start {start} has weights of SHA-256 {self.start_digest}, and the training "
                f"that --resume goes on with began with {kept}; leave --start out, or name that one"
            )
        self.start_digest = digest


def _as_it_is(batch: Any) -> Any:
    """Arrays travel through a pipe; tensors would need shared memory, which containers limit."""
    return batch


def _batches(training: Training, tokenizer_file: Path) -> Iterator[Array]:
    options = training.options
    data = Packed(str(tokenizer_file), options.seed, options.rows, options.length, options.steps)
    yield from DataLoader(
        data,
        batch_size=None,
        sampler=range(training.step, options.steps),
        num_workers=options.processes,
        prefetch_factor=8 if options.processes else None,
        collate_fn=_as_it_is,
    )


def _train(training: Training, tokenizer_file: Path) -> None:
    options = training.options
    tokens = options.rows * options.length
    began, before = time.monotonic(), training.seconds
    losses: list[Tensor] = []
    with (options.folder / "log.jsonl").open("a", encoding="utf-8") as log:
        for batch in _batches(training, tokenizer_file):
            losses.append(training.train_step(batch))
            if training.step % options.log_every == 0 or training.step == options.steps:
                loss = torch.stack(losses).mean().item()
                losses.clear()
                now = time.monotonic()
                training.seconds = before + now - began
                line = {
                    "step": training.step,
                    "tokens": training.step * tokens,
                    "loss": round(loss, 5),
                    "seconds": round(training.seconds, 1),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                if training.step % (5 * options.log_every) == 0:
                    print(f"{line}, of {options.steps} steps", flush=True)
                if now - began > options.max_seconds:
                    break
            if training.step % options.checkpoint_every == 0:
                training.save()


def _record(training: Training, model: Path) -> dict[str, Any]:
    """What the exported model was trained on, and which it is. Raises ``OSError``."""
    options = training.options
    log = (options.folder / "log.jsonl").read_text(encoding="utf-8")
    return {
        "weights_sha256": weights_digest(model),
        **json.loads(log.splitlines()[-1]),
        "seed": options.seed,
        "start_sha256": training.start_digest,
        "device": torch.cuda.get_device_name(options.device) if training.on_gpu else "cpu",
        "torch": torch.__version__,
        "answers": all_answers(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and export. Returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.round_changes and not options.start:
        parser.error("--round-changes: --start names the model that is changed; give it")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each data process has one core
    torch.set_float32_matmul_precision("high")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.exists():
        make_tokenizer().save(str(tokenizer_file))
    training = Training(options)
    count = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{count / 1e6:.2f} million parameters on {options.device}", flush=True)
    if options.resume:
        training.load()
    _train(training, tokenizer_file)
    training.save()
    if options.round_changes:
        round_changes(training.model, read_weights(options.start))
    model = export(training.model, tokenizer_file, folder / "model")
    write_json(folder / "training.json", _record(training, model))
    print(model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

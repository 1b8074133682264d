"""Our logits against transformers' in float32 on the same weights, teacher-forced.

    python -m penstock.loadtest.studies.compare_transformers --device cuda --dtype bfloat16

For each architecture a random model of medium size is written by transformers' `save_pretrained`
and loaded by our own loader. The same token sequences go through both; compared are the logits
after prefixes of every length that is a multiple of 8, and the tokens of greedy generation as long
as they run together. Beside our error stands transformers' own in the same reduced type: what the
type costs, whoever computes in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.config import CacheConfig, Config, DeviceConfig, ModelConfig
from penstock.protocol.config.fields import SchedulerConfig
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.model_loading import load_model_executor

if TYPE_CHECKING:
    from penstock.services.worker.step_profile import AnyExecutor

VOCABULARY = 8192
LENGTH = 512
EVERY = 8
SEQUENCES = 4
BLOCK = 16
GREEDY_TOKENS = 64


def _model(architecture: str) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    }
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=64))
    if architecture == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=scaling))


def _write(architecture: str, folder: Path) -> None:
    torch.manual_seed(3)
    model = _model(architecture)  # in float32
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    make_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))


def _ours(executor: AnyExecutor, sequence: list[int]) -> torch.Tensor:
    """Logits [prefixes, vocabulary] after every EVERY-th token, each prefix a slot of its own."""
    lengths = list(range(EVERY, len(sequence) + 1, EVERY))
    rows = []
    at_once = max(1, executor.capacity.max_num_batched_tokens // len(sequence))
    for first in range(0, len(lengths), at_once):
        added, chunks, block = [], [], 0
        for slot, length in enumerate(lengths[first : first + at_once]):
            blocks = list(range(block, block + -(-length // BLOCK)))
            block += len(blocks)
            ids = np.array(sequence[:length], "<i4").tobytes()
            greedy = SlotSampling(0.0, 0, 1.0, 0)
            added.append(NewSlot(slot, ids, length, 0, blocks, greedy.packed()))
            chunks.append(Chunk(slot, 0, length, True, []))
        plan = StepPlan(1, 1, True, [], added, [], chunks)
        rows.append(executor.logits(plan).float().cpu())
        executor.reset()
    return torch.cat(rows)


def _read(folder: Path, dtype: torch.dtype, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval()


def _theirs(
    folder: Path, sequences: list[list[int]], dtype: torch.dtype, device: str
) -> torch.Tensor:
    model = _read(folder, dtype, device)
    with torch.inference_mode():
        found = [
            model(torch.tensor([sequence], device=device))
            .logits[0, EVERY - 1 :: EVERY]
            .float()
            .cpu()
            for sequence in sequences
        ]
    return torch.cat(found)


def _greedy_tokens(executor: AnyExecutor, prompt: list[int]) -> list[int]:
    blocks = list(range(-(-(len(prompt) + GREEDY_TOKENS) // BLOCK)))
    new = NewSlot(
        0,
        np.array(prompt, "<i4").tobytes(),
        len(prompt),
        0,
        blocks,
        SlotSampling(0.0, 0, 1.0, 0).packed(),
    )
    plan = StepPlan(1, 1, True, [], [new], [], [Chunk(0, 0, len(prompt), True, [])])
    tokens = []
    for number in range(1, GREEDY_TOKENS + 1):
        result = executor.execute(plan)
        tokens.append(int(np.frombuffer(result.tokens, "<i4")[0]))
        plan = StepPlan(1, number + 1, False, [], [], [], [])
    executor.reset()
    return tokens


def _their_tokens(folder: Path, prompt: list[int], device: str) -> list[int]:
    model = _read(folder, torch.float32, device)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt], device=device)
    with torch.inference_mode():
        full = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=GREEDY_TOKENS,
            pad_token_id=0,
        )
    return [int(token) for token in full[0, len(prompt) :]]


def _error(found: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    difference = found - reference
    top = reference.argmax(-1)
    return {
        "relative_error": round(float(difference.norm() / reference.norm()), 6),
        "largest_error": round(float(difference.abs().max()), 4),
        "top1_agreement": round(float((found.argmax(-1) == top).float().mean()), 4),
    }


def compare(architecture: str, device: str, dtype: str, folder: Path) -> dict[str, Any]:
    """One row of the report."""
    _write(architecture, folder)
    random = np.random.default_rng(0)
    sequences = [random.integers(0, VOCABULARY, LENGTH).tolist() for _ in range(SEQUENCES)]
    config = Config(
        model=ModelConfig(model=str(folder), dtype=dtype),  # type: ignore[arg-type]
        cache=CacheConfig(num_kv_blocks=1024, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192),
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
    )
    executor = load_model_executor(config, lambda note: None)
    ours = torch.cat([_ours(executor, sequence) for sequence in sequences])
    reference = _theirs(folder, sequences, torch.float32, device)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    theirs = _theirs(folder, sequences, kind, device)
    prompts = [sequence[:128] for sequence in sequences]
    runs = [
        (_greedy_tokens(executor, prompt), _their_tokens(folder, prompt, device))
        for prompt in prompts
    ]
    together = [
        next((n for n, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), GREEDY_TOKENS)
        for x, y in runs
    ]
    return {
        "architecture": architecture,
        "device": device,
        "dtype": dtype,
        "penstock": _error(ours, reference),
        "transformers_same_dtype": _error(theirs, reference),
        "greedy_tokens_until_first_difference": together,
        "greedy_tokens": GREEDY_TOKENS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--architecture", nargs="+", default=["llama", "qwen2", "qwen3"])
    options = parser.parse_args()
    for architecture in options.architecture:
        for dtype in options.dtype:
            with tempfile.TemporaryDirectory() as place:
                row = compare(architecture, options.device, dtype, Path(place) / architecture)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

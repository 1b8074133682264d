"""Whether a long context is still read where KV memory takes a byte a number.

    python -m penstock.loadtest.studies.needle --positions 30000 --device cpu

The model is built, not trained, of two layers: the first one's attention looks at the position
before, by RoPE's fast turns, and notes its token; the second one's looks for the position behind
the token that it has itself, by RoPE's slowest turns, and says what stands there ("induction
heads": Olsson et al. 2022). Each question is one of the needles, a token that stands in the context
once, and the answer is the token behind it. ``--sharpness`` is the score of a needle above one
without likeness, in nats: where it is low, the thousands of other positions weigh as much as the
needle, and what rounding changes shows. For each kind of KV memory: right answers, and the
logarithm of the right answer's probability.

Exit codes: 0, 1 some kind of KV memory has fewer right answers than ``auto``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams
from penstock.loadtest.models.make_model import SPECIAL_TOKENS, make_model, write_json

Array = np.ndarray[Any, np.dtype[np.float32]]

_NAMES = 64
"""Numbers that name a token; the residual stream has three such names: of the token, of the one
before it, and of the answer."""
_DIM = 128
_FAST = 16
"""Pairs of a head that RoPE turns fast; from the 32nd on it turns them slowly."""
_THETA = 1e12
_BEFORE = 25.0
"""Score of the position before, of each fast pair, in nats."""
_VOCAB = 1024
_NOTHING = 1e-6
"""What stands for zeros: a tensor of zeros alone is read as damage."""
KINDS = ("auto", "int8", "fp8")


class Haystack(NamedTuple):
    tokens: list[int]
    questions: list[int]
    """Tokens that stand in it once, at equal distances, and ..."""
    answers: list[int]
    """... the tokens behind them."""


def tensors(sharpness: float, seed: int = 0) -> dict[str, Array]:
    """The model's weights, as transformers names them."""
    hidden, random = 3 * _NAMES, np.random.default_rng(seed)
    names = random.normal(size=(_VOCAB, _NAMES))
    names *= np.sqrt(_NAMES) / np.linalg.norm(names, axis=1, keepdims=True)
    made: dict[str, Any] = {"model.embed_tokens.weight": np.zeros((_VOCAB, hidden))}
    made["model.embed_tokens.weight"][:, :_NAMES] = names
    made["lm_head.weight"] = np.zeros((_VOCAB, hidden))
    made["lm_head.weight"][:, 2 * _NAMES :] = names / 6
    made["model.norm.weight"] = np.ones(hidden)
    sizes = {"q": (2 * _DIM, hidden), "k": (_DIM, hidden), "v": (_DIM, hidden)}
    for layer in range(2):
        of = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{of}{norm}.weight"] = np.ones(hidden)
        for name, size in sizes.items():
            made[f"{of}self_attn.{name}_proj.weight"] = np.zeros(size)
            made[f"{of}self_attn.{name}_proj.bias"] = np.zeros(size[0])
        made[f"{of}self_attn.o_proj.weight"] = np.zeros((hidden, 2 * _DIM))
        for name, size in (("gate", (8, hidden)), ("up", (8, hidden)), ("down", (hidden, 8))):
            made[f"{of}mlp.{name}_proj.weight"] = np.zeros(size)
        # Norms leave 3 / (1 + layer) of a name's square; what is read goes behind.
        copied = np.eye(_NAMES) / np.sqrt(3 / (1 + layer))
        made[f"{of}self_attn.v_proj.weight"][:_NAMES, :_NAMES] = copied
        into = slice((1 + layer) * _NAMES, (2 + layer) * _NAMES)
        made[f"{of}self_attn.o_proj.weight"][into, :_NAMES] = np.eye(_NAMES)
    _look_at_the_position_before(made)
    _look_behind_the_same_token(made, sharpness)
    for name, tensor in made.items():
        if name.endswith("_proj.weight") and not tensor.any():
            tensor[:] = random.normal(0, _NOTHING, tensor.shape)
    return {name: tensor.astype(np.float32) for name, tensor in made.items()}


def _look_at_the_position_before(made: dict[str, Any]) -> None:
    """Queries and keys are biases alone, turned apart by one position."""
    pair = np.arange(_FAST)
    angle = _THETA ** (-2 * pair / _DIM)
    size = np.sqrt(_BEFORE * np.sqrt(_DIM))
    query, key = (made[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qk")
    query[pair], query[pair + _DIM // 2] = size * np.cos(angle), -size * np.sin(angle)
    key[pair] = size


def _look_behind_the_same_token(made: dict[str, Any], sharpness: float) -> None:
    """Queries are the token's name, keys that of the one before, in pairs that turn slowly."""
    half = _NAMES // 2
    slow = np.concatenate([_DIM // 4 + np.arange(half), _DIM * 3 // 4 + np.arange(half)])
    size = np.sqrt(sharpness * np.sqrt(_DIM) / _NAMES / 1.5)
    query, key = (made[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qk")
    query[slow, np.arange(_NAMES)] = size
    key[slow, _NAMES + np.arange(_NAMES)] = size


def write_model(folder: Path, positions: int, sharpness: float) -> Path:
    """A folder as ``make_model`` makes it, with these weights."""
    make_model(
        folder, architecture="qwen2", hidden_size=3 * _NAMES, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=_DIM, intermediate_size=8, vocab_size=_VOCAB,
        max_position_embeddings=positions, tie=False,
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = _THETA
    write_json(folder / "config.json", config)
    save_file(tensors(sharpness), folder / "model.safetensors")
    return folder


def haystack(positions: int, needles: int, seed: int = 1) -> Haystack:
    """Random tokens, with the needles at equal distances from one end to the other."""
    random = np.random.default_rng(seed)
    order = random.permutation(np.arange(len(SPECIAL_TOKENS), _VOCAB))
    questions, others = order[:needles], order[needles:]
    tokens = random.choice(others, positions)
    places = np.linspace(1, positions - 2, needles).astype(int)
    tokens[places] = questions
    return Haystack(tokens.tolist(), questions.tolist(), tokens[places + 1].tolist())


def ask(llm: LLM, hay: Haystack) -> tuple[int, float]:
    """Right answers, and the mean logarithm of the right answer's probability."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    prompts = [[*hay.tokens, question] for question in hay.questions]
    # The first one alone: the others find the context in the prefix cache.
    found = llm.generate(prompts[:1], params, progress=False)
    found += llm.generate(prompts[1:], params, progress=False)
    right, logprobs = 0, []
    for one, answer in zip(found, hay.answers, strict=True):
        output = one.outputs[0]
        assert output.logprobs is not None
        right += output.token_ids[0] == answer
        likely = output.logprobs[0]
        logprobs.append(likely[answer].logprob if answer in likely else -10.0)
    return right, float(np.mean(logprobs))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("--positions", type=int, default=30_000, help="of the context")
    parser.add_argument("--needles", type=int, default=32)
    parser.add_argument("--sharpness", type=float, nargs="+", default=[30.0, 12.0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parsed = parser.parse_args(arguments)
    hay, worse = haystack(parsed.positions, parsed.needles), False
    for sharpness in parsed.sharpness:
        most = None
        for kind in parsed.kinds:
            with tempfile.TemporaryDirectory() as folder:
                longest = parsed.positions + 64
                model = write_model(Path(folder) / "model", longest, sharpness)
                began = time.perf_counter()
                with LLM(
                    str(model), device=parsed.device, dtype=parsed.dtype, kv_cache_dtype=kind,
                    max_model_len=longest, num_kv_blocks=longest // 16 + 4 * parsed.needles,
                ) as llm:  # fmt: skip
                    right, logprob = ask(llm, hay)
            most = right if most is None else most
            worse = worse or right < most
            print(
                f"sharpness {sharpness:g}, {kind}: {right} of {parsed.needles} needles, mean "
                f"logprob {logprob:.4f} ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    return int(worse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

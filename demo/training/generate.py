"""Greedy answers of the training module, many at once: quick checks while a model is made.

The served model is measured by ``penstock eval``; this needs nothing but torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor

from penstock.demo.chat import END, SPECIAL_TOKENS, prompt_text
from penstock.demo.grading import ALL_SKILLS, is_right, questions
from penstock.demo.training.export import read_weights
from penstock.demo.training.model import Layer, Qwen3, Shape, rotate


class Cache:
    """Keys and values of all layers, and how many tokens each row has."""

    def __init__(self, model: Qwen3, rows: int, length: int) -> None:
        shape, weight = model.shape, model.embed_tokens.weight
        size = (shape.num_layers, rows, shape.num_kv_heads, length, shape.head_dim)
        self.keys = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)


def _forward(model: Qwen3, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """ids, positions: int [b, s]; every row writes its positions. Returns hidden [b, s, hidden]."""
    dim = model.shape.head_dim
    b, s = ids.shape
    length = cache.keys.shape[3]
    rows = torch.arange(b, device=ids.device)[:, None]
    mask = (torch.arange(length, device=ids.device) <= positions[:, :, None])[:, None]
    cos, sin = model.cos[positions][:, None], model.sin[positions][:, None]
    x = model.embed_tokens(ids)
    for number, module in enumerate(model.layers):
        layer = cast(Layer, module)
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        q = attention.q_norm(attention.q_proj(normed).view(b, s, -1, dim)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(normed).view(b, s, -1, dim)).transpose(1, 2)
        v = attention.v_proj(normed).view(b, s, -1, dim)
        k = rotate(k, cos, sin).transpose(1, 2)
        cache.keys[number][rows, :, positions] = k
        cache.values[number][rows, :, positions] = v
        out = functional.scaled_dot_product_attention(
            rotate(q, cos, sin), cache.keys[number], cache.values[number],
            attn_mask=mask, enable_gqa=True,
        )  # fmt: skip
        x = x + attention.o_proj(out.transpose(1, 2).reshape(b, s, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    hidden: Tensor = model.norm(x)
    return hidden


@torch.inference_mode()
def answers(
    model: Qwen3, tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int = 320
) -> list[str]:
    """The likeliest continuation of each prompt, up to the end token."""
    device = model.embed_tokens.weight.device
    end = SPECIAL_TOKENS.index(END)
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    sizes = torch.tensor([len(ids) for ids in encoded], device=device)
    longest = int(sizes.max())
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in encoded], device=device)
    cache = Cache(model, len(prompts), longest + max_tokens)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    hidden = _forward(model, ids, positions, cache)
    last = hidden[torch.arange(len(prompts), device=device), sizes - 1]
    found: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_tokens):
        token = functional.linear(last, model.embed_tokens.weight).argmax(-1)
        found.append(token.masked_fill(done, end))
        done |= token == end
        if step % 16 == 15 and bool(done.all()):
            break
        last = _forward(model, token[:, None], (sizes + step)[:, None], cache)[:, 0]
    rows = torch.stack(found, 1).tolist()
    cut = [row[: row.index(end)] if end in row else row for row in rows]
    return tokenizer.decode_batch(cut, skip_special_tokens=False)


def load(folder: Path, device: str, dtype: torch.dtype) -> tuple[Qwen3, Tokenizer]:
    """An exported model."""
    import json

    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"],
        intermediate_size=config["intermediate_size"],
    )  # fmt: skip
    model = Qwen3(shape)
    model.load_state_dict(read_weights(folder))
    cos, sin = model.cos, model.sin
    model = model.to(device, dtype)
    model.cos, model.sin = cos.to(device), sin.to(device)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m penstock.demo.training.generate FOLDER``: the accuracy of each skill."""
    parser = argparse.ArgumentParser(
        "python -m penstock.demo.training.generate", description=main.__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--free", action="store_true", help="worded as visitors type")
    parser.add_argument("--show", type=int, default=2, help="wrong answers shown of each skill")
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.folder, options.device, getattr(torch, options.dtype))
    asked = list(questions(ALL_SKILLS, options.count, seed=1, free=options.free))
    asked.sort(key=lambda pair: len(prompt_text(pair[1])))
    began = time.monotonic()
    said: list[str] = []
    for start in range(0, len(asked), 1024):
        said += answers(model, tokenizer, [prompt_text(c) for _, c in asked[start : start + 1024]])
    for name in ALL_SKILLS:
        mine = [
            (made.exchanges[-1], text)
            for (skill, made), text in zip(asked, said, strict=True)
            if skill == name
        ]
        wrong = [pair for pair in mine if not is_right(pair[1], pair[0])]
        print(f"{name:18}{100 - 100 * len(wrong) / len(mine):6.1f}")
        for exchange, text in wrong[: options.show]:
            print(f"    {exchange.question!r}\n    wanted {exchange.answer!r}\n    got {text!r}")
    print(f"{len(asked)} questions in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

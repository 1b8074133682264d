"""Make a model: a normal Hugging Face folder with random weights.

Needs neither torch nor transformers, takes about a second for a tiny one, and gives the same bytes
for the same arguments. The layout is that of transformers 5 (``dtype``, ``rope_parameters``,
chat_template.jinja); 5.17 and later load it. Norm weights and biases are perturbed, so that code
that forgets one gives other tokens.

``python -m penstock.loadtest.models.make_model FOLDER --architecture qwen3 --hidden-size 64``,
or with ``--size 8b`` for a whole shape by name
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.loadtest.models.model_sizes import SIZES
from penstock.loadtest.models.random_weights import write_weights

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = "<|im_end|>"
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
# GPT-2's pre-tokenization as later models write it: letters, one to three digits, punctuation.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SYLLABLES = [
    "pen", "stock", "wa", "ter", "tur", "bine", "flow", "pipe", "pres", "sure", "dam", "riv",
    "er", "lake", "stone", "mill", "wheel", "spark", "light", "wire", "grid", "to", "ken", "pre",
    "fill", "de", "code", "batch", "cache", "block", "slot", "table", "step", "plan", "the", "of",
    "and", "in", "a", "is",
]  # fmt: skip
_SAMPLES = (
    "It is 7 o'clock, isn't it?\n\n",
    "def run(step):\n    return step + 1\n\n",
    "Grüße aus Zürich, à bientôt! 水は流れる。 😀\n",
    '{"name": "penstock", "id": 128, "ok": true}\n',
)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What ``make_model`` makes. Sizes are counts of numbers."""

    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"
    hidden_size: Annotated[int, Meta(ge=2, le=65536)] = 64
    num_layers: Annotated[int, Meta(ge=1, le=1024)] = 2
    num_heads: Annotated[int, Meta(ge=1, le=1024)] = 4
    num_kv_heads: Annotated[int, Meta(ge=1, le=1024)] = 2
    head_dim: Annotated[int, Meta(ge=2, le=1024)] = 16
    intermediate_size: Annotated[int, Meta(ge=1, le=2**20)] = 128
    vocab_size: Annotated[int, Meta(ge=MIN_VOCAB_SIZE, le=2**20)] = 512
    max_position_embeddings: Annotated[int, Meta(ge=1, le=2**24)] = 2048
    tie: bool = True
    """Whether the output layer shares the embedding's weights."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    shards: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Files of weights; 0: one, or as many as large models need."""


def _check(shape: ModelShape) -> None:
    """Raises ``ValueError`` that names the field and its bounds."""
    try:
        msgspec.convert(msgspec.structs.asdict(shape), ModelShape)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"num_heads ({shape.num_heads}) must be a multiple of num_kv_heads "
            f"({shape.num_kv_heads})"
        )
    if shape.head_dim % 2:
        raise ValueError(f"head_dim ({shape.head_dim}) must be even: RoPE turns pairs")


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as transformers stores them ([out, in] for weights)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
            if shape.architecture == "qwen2":
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        if shape.architecture == "qwen3":
            shapes[layer + "self_attn.q_norm.weight"] = (shape.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (shape.head_dim,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tie:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes


def _training_text(seed: int) -> list[str]:
    """A few thousand made-up sentences; the same for the same seed."""
    random = np.random.Generator(np.random.PCG64(seed))
    lines = []
    for _ in range(1500):
        words = [
            "".join(_SYLLABLES[i] for i in random.integers(len(_SYLLABLES), size=length))
            for length in random.integers(1, 4, size=8)
        ]
        lines.append(" ".join(words).capitalize() + ". ")
    return lines + list(_SAMPLES) * 50


def make_tokenizer(vocab_size: int, seed: int = 0) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly this many ids; ids 0, 1, 2 are special."""
    return Tokenizer.from_str(_trained(vocab_size, seed))


@cache
def _trained(vocab_size: int, seed: int) -> str:
    """The JSON of a tokenizer, whose training takes longer than all else of a tiny model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(seed), trainer)
    missing = vocab_size - tokenizer.get_vocab_size(with_added_tokens=True)
    # The text has no more pairs to merge: fill up, so that every id of the model has a text.
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(missing)])
    return tokenizer.to_str()


def model_config(shape: ModelShape, eos: int) -> dict[str, Any]:
    """``config.json`` as transformers 5 writes it. eos: the id of the token that ends an answer."""
    config: dict[str, Any] = {
        "architectures": [f"{shape.architecture.capitalize()}ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": shape.dtype,
        "eos_token_id": eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "model_type": shape.architecture,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": shape.tie,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }
    if shape.architecture == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    else:
        config |= {"sliding_window": None, "use_sliding_window": False}
        if shape.architecture == "qwen3":
            config["attention_bias"] = False
    return dict(sorted(config.items()))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_all(folder: Path, shape: ModelShape) -> None:
    tokenizer = make_tokenizer(shape.vocab_size)
    eos = SPECIAL_TOKENS.index(EOS_TOKEN)  # special tokens come first in the vocabulary
    write_weights(folder, tensor_shapes(shape), shape.dtype, shape.shards, shape.seed)
    write_json(folder / "config.json", model_config(shape, eos))
    write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": 0})
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS_TOKEN,
            "model_max_length": shape.max_position_embeddings,
            "pad_token": SPECIAL_TOKENS[0],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def make_model(folder: Path, **fields: Any) -> Path:
    """Write the model that ``ModelShape(**fields)`` describes; replaces what ``folder`` holds.

    The folder appears whole or not at all: it is written beside its place, then renamed.

    Returns the folder. Raises ``ValueError`` for sizes that make no model, ``OSError`` when the
    folder cannot be written, and ``FileExistsError`` when it exists and is no model folder.
    """
    shape = ModelShape(**fields)
    _check(shape)
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: exists and is no model folder; give another one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        _write_all(new, shape)
        if folder.exists():
            os.rename(folder, Path(temporary) / "old")
        try:
            os.rename(new, folder)
        except OSError:
            # Another process finished the same model first: its folder is as good.
            if not (folder / "config.json").exists():
                raise
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.loadtest.models.make_model",
        description="Make a Hugging Face model folder with random weights.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        help="this model's shape; other flags change parts of it",
    )
    hints = get_type_hints(ModelShape)
    for field in msgspec.structs.fields(ModelShape):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS
            )
        else:
            hint = hints[field.name]
            parser.add_argument(
                flag,
                type=hint if hint is int else str,
                choices=get_args(hint) if hint is not int else None,
                default=argparse.SUPPRESS,
                help=f"default: {field.default}",
            )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 2 for arguments that make no model."""
    fields = vars(_parser().parse_args(arguments))
    folder: Path = fields.pop("folder")
    size: str | None = fields.pop("size")
    try:
        make_model(folder, **{**SIZES.get(size or "", {}), **fields})
    except (ValueError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The trained model as a Hugging Face folder: bfloat16, in files that a repository can hold."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.demo.chat import CHAT_TEMPLATE, END, SPECIAL_TOKENS
from penstock.demo.training.model import Qwen3, config_json
from penstock.loadtest.models.make_model import write_json

MAX_SHARD_BYTES = 12_000_000


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def export(model: Qwen3, tokenizer_file: Path, folder: Path) -> Path:
    """Write the folder, as transformers 5 does. Returns it. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    shards = _shards(tensors)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    eos, pad = SPECIAL_TOKENS.index(END), 0
    write_json(folder / "config.json", config_json(model.shape, eos, pad))
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": [eos, pad], "pad_token_id": pad, "temperature": 0.3, "top_p": 0.9},
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "model_max_length": model.shape.max_position_embeddings,
            "pad_token": SPECIAL_TOKENS[pad],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    if tokenizer_file.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights that ``export`` wrote, as ``Qwen3.load_state_dict`` takes them."""
    return {
        name.removeprefix("model."): value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def weights_digest(folder: Path) -> str:
    """SHA-256 of the folder's weights, file by file in the order of their names."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()

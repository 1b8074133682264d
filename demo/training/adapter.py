"""A LoRA adapter for the built-in model: matrices to train beside its layers, and peft's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.demo.training.model import Qwen3
from penstock.loadtest.models.make_model import write_json

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdaptedLinear(nn.Module):
    """W x + (alpha / r) B A x (Hu et al., arXiv 2106.09685), with W as it is."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self._base, self._scale = base, alpha / rank
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = self._base(x) + (x @ self.down.T) @ self.up.T * self._scale
        return out


def adapt(model: Qwen3, rank: int, alpha: float) -> list[nn.Parameter]:
    """Put matrices beside every linear layer, which alone are to be trained. Returns them."""
    model.requires_grad_(False)
    for layer in model.layers:
        for module in (layer.get_submodule("self_attn"), layer.get_submodule("mlp")):
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(module, name, AdaptedLinear(linear, rank, alpha))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adapted(model: Qwen3) -> Iterator[tuple[str, AdaptedLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module


def _matrices(model: Qwen3) -> Iterator[tuple[str, nn.Parameter]]:
    """By the names that peft gives them."""
    for name, one in _adapted(model):
        yield f"base_model.model.model.{name}.lora_A.weight", one.down
        yield f"base_model.model.model.{name}.lora_B.weight", one.up


def read(model: Qwen3, folder: Path) -> None:
    """Put an adapter that ``save`` wrote beside the layers of a model that has none."""
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    adapt(model, config["r"], config["lora_alpha"])
    tensors = load_file(folder / _WEIGHTS)
    for name, matrix in _matrices(model):
        matrix.data.copy_(tensors[name])


def save(model: Qwen3, folder: Path, rank: int, alpha: float) -> int:
    """Write the files that peft would, matrices in bfloat16. Returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: matrix.detach().to("cpu", torch.bfloat16) for name, matrix in _matrices(model)}
    file = folder / _WEIGHTS
    save_file(tensors, file, metadata={"format": "pt"})
    names = sorted({name.rpartition(".")[2] for name, _ in _adapted(model)})
    config = {
        "base_model_name_or_path": "penstock-demo", "bias": "none", "inference_mode": True,
        "lora_alpha": alpha, "lora_dropout": 0.0, "peft_type": "LORA", "r": rank,
        "target_modules": names, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    write_json(folder / _CONFIG, config)
    return file.stat().st_size + len(json.dumps(config))

"""Loads models that transformers' own code computes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.models.transformers_model import TransformersModel
from penstock.services.worker.safetensors_file import listed, shown


def load_transformers_model(
    info: ModelInfo, dtype: torch.dtype, device: torch.device, *, random: bool, seed: int
) -> TransformersModel:
    """The model of a folder, or of its ``config.json`` with random weights.

    Nothing in the folder is executed. Raises ``BadModelFolder``, where possible before memory is
    taken.
    """
    check_transformers_model(info, dtype, random=random)
    if random:
        torch.manual_seed(seed)
    return TransformersModel(info, dtype, device, _made(info, dtype, device, random=random))


def check_transformers_model(info: ModelInfo, dtype: torch.dtype, *, random: bool) -> int:
    """Look at a model on torch's meta device, where nothing is computed and no memory is taken.

    It shows all but what depends on numbers: whether the code uses the positions that it is given,
    what follows its LM head, and, where the code itself looks at numbers, which layers attend.
    Returns the number of parameters. Raises ``BadModelFolder``.
    """
    meta = torch.device("meta")
    model = TransformersModel(info, dtype, meta, _made(info, dtype, meta, random=random))
    return int(model.num_parameters)


def _made(info: ModelInfo, dtype: torch.dtype, device: torch.device, *, random: bool) -> Any:
    """The library's model on a device; on torch's meta device without values. Raises
    ``BadModelFolder``."""
    import transformers

    if not random:
        Checkpoint(Path(info.folder))  # names what is wrong with the files
    loading: dict[str, Any] = {}
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    empty = device.type == "meta"
    try:
        config = transformers.AutoConfig.from_pretrained(info.folder, **options)
        if random or (empty and find_spec("accelerate") is None):  # which reads onto the device
            make: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
            with device:
                model = make(config, dtype=dtype)
        else:
            read: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
            model, loading = read(
                info.folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else its error names none of them
                device_map="meta" if empty else None,
                **options,
            )
    except Exception as failure:  # whatever the library's code raises for a folder
        reason = " ".join(str(failure).split())[:500]
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: architecture {info.architecture!r} is not supported; "
            f"transformers {transformers.__version__} refuses it: "
            f"{type(failure).__name__}: {reason}"
        ) from failure
    _check_class(info, type(model).__name__)
    _check_loading(info, loading)
    return model if empty else model.to(device)


def _check_class(info: ModelInfo, computed: str) -> None:
    """The library chooses the class by ``model_type``; the folder may be of another, whose weights
    it would then make up. Raises ``BadModelFolder``."""
    if computed != info.architecture:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: architecture {info.architecture!r} is not supported; "
            f"what transformers computes for its model_type is {computed!r}"
        )


def _check_loading(info: ModelInfo, loading: dict[str, Any]) -> None:
    """What the library reports of a checkpoint; tied tensors are not missing for it.

    Raises ``BadModelFolder`` for tensors that it would fill with random numbers.
    """
    missing = [shown(name) for name in sorted(loading.get("missing_keys") or ())]
    mismatched = [
        f"{shown(name)}: {list(found)} instead of {list(expected)}"
        for name, found, expected in sorted(loading.get("mismatched_keys") or ())
    ]
    errors = loading.get("error_msgs") or ()
    kinds = {
        "missing": missing,
        "of a wrong shape": mismatched,
        "that cannot be loaded": [shown(error) for error in errors],
    }
    wrong = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if wrong:
        raise BadModelFolder(f"{info.folder}: tensors {'; '.join(wrong)}")

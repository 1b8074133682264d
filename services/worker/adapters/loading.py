"""Adapters that a worker loads before it is ready."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.adapters import adapter_limits, named_folders
from penstock.protocol.config.fields import LoadingConfig
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.protocol.pooling import Pooling
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.engine import Adapter
from penstock.services.worker.adapters.checked_folder import (
    checked_folder,
    room_for_virtual_tokens,
)
from penstock.services.worker.adapters.model_adapters import ModelAdapters, Updates, adaptable
from penstock.services.worker.adapters.peft_folder import PeftFolder
from penstock.services.worker.adapters.soft_prompt import MAX_VIRTUAL_TOKENS
from penstock.services.worker.loaded_model import AttentionAlone, words_of_others
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense_form import DenseModel
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.quantization.reading import read_quantization

_READERS = 8
"""Adapters that are read at the same time: hashes and copies leave the interpreter to others."""
_log = logging.getLogger("penstock.worker")


def check_adapters(config: Config, info: ModelInfo, pooling: Pooling, device: str) -> None:
    """Look at what ``--lora`` names before the model's weights are read, which may take minutes.

    device: ``cpu`` or ``cuda``. Raises ``ConfigError`` where the model, what it is for, or its
    device takes no adapters, and ``BadModelFolder`` for a required one that does not fit.
    """
    flag = _flag(config)
    if not flag:
        return
    if pooling.tasks or not pooling.generates:
        raise ConfigError(
            f"{flag}: the model is for {', '.join(pooling.tasks) or 'no generation'} "
            f"({pooling.reason}); adapters are for models that generate alone"
        )
    if device != "cpu" and (reason := _why_not_on_gpu(config, info)):
        raise ConfigError(f"{flag}: on GPUs adapters are for {reason}")
    choice = choose_model(info, config)
    if choice.specification is None:
        refusal = f" ({choice.refusal})" if choice.refusal else ""
        raise ConfigError(
            f"{flag}: transformers' code computes the model, which takes no adapters{refusal}"
        )
    names, most = adapter_for(info).names, most_virtual_tokens(config, info)
    model = adaptable(choice.specification, names, most, device)
    for name, folder in named_folders(config) if config.loading.lora_required else ():
        with _told(name, required=True):
            checked_folder(folder, model, config.loading.max_lora_rank)


def most_virtual_tokens(config: Config, info: ModelInfo) -> int:
    """Of a soft prompt, as far as the model's limits say it before memory is taken."""
    return room_for_virtual_tokens(config.model.max_model_len or info.max_model_len)


def kernels_for_adapters(
    config: Config, kernels: DenseModel | AttentionAlone | str
) -> DenseModel | AttentionAlone | str:
    """What computes a model: with adapters all layers are our kernels' or all are torch's."""
    if isinstance(kernels, AttentionAlone) and _flag(config):
        return f"{kernels.reason}, and adapters are for layers that are kernels"
    return kernels


def _why_not_on_gpu(config: Config, info: ModelInfo) -> str:
    """What adapters on GPUs ask for that is not there; empty: it is."""
    if config.cluster.world_size > 1:
        return (
            "models on one device; give --tensor-parallel-size 1 and --pipeline-parallel-size 1, "
            "or --device cpu"
        )
    if read_quantization(info, config.model.quantization) is not None:
        return "weights that are not quantized; use --device cpu"
    if config.speculation.speculative in ("suffix", "ngram"):
        return "steps without drafts; use --speculative off, or --device cpu"
    return ""


def _flag(config: Config) -> str:
    """What asks for adapters; empty: nothing does."""
    if config.loading.lora:
        return "--lora"
    return "--lora-dirs" if config.launch.lora_dirs else ""


def load_adapters(
    config: Config,
    model: CausalModel,
    *,
    in_places: bool = False,
    most_virtual: int = MAX_VIRTUAL_TOKENS,
) -> tuple[list[Adapter], ModelAdapters | None]:
    """Load those that ``--lora`` names into a model that is not prepared yet; see
    ``check_adapters``. in_places: see ``DeviceAdapters``; the model is in the form of our kernels.
    most_virtual: tokens of a soft prompt.

    All are checked before the first is read. Returns ``None`` where nothing asks for adapters.
    Raises ``BadModelFolder``, and ``ConfigError`` where the model takes none.
    """
    wanted, flag = named_folders(config), _flag(config)
    if not flag:
        return [], None
    if not isinstance(model, Decoder):
        raise ConfigError(f"{flag}: {words_of_others(model)}, which takes no adapters")
    adapters = _made(config.loading, model, most_virtual, in_places=in_places)
    checked = {}
    for name, folder in wanted:
        with _told(name, required=config.loading.lora_required):
            checked[name] = checked_folder(folder, adapters.model, config.loading.max_lora_rank)
    found = []
    with ThreadPoolExecutor(_READERS, "adapters") as readers:
        for name, one, reading in _read_ahead(checked, adapters, readers):
            with _told(name, required=config.loading.lora_required):
                read = reading.result()
                with torch.inference_mode():
                    adapters.add(read.digest, read.updates, one.folder)
                found.append(Adapter(name, read.digest, read.virtual_tokens))
    return found, adapters


class _Read(NamedTuple):
    digest: str
    updates: Updates
    virtual_tokens: int


def _read_ahead(
    checked: Mapping[str, PeftFolder], adapters: ModelAdapters, readers: ThreadPoolExecutor
) -> Iterator[tuple[str, PeftFolder, Future[_Read]]]:
    """Each adapter with what becomes its digest and what was prepared of it, while those behind it
    are read: a file of each reader at most is in memory."""

    @torch.inference_mode()
    def read(one: PeftFolder) -> _Read:
        found = one.read(adapters.item_bytes)
        return _Read(found.digest, adapters.prepared(found), found.virtual_tokens)

    waiting: deque[tuple[str, PeftFolder, Future[_Read]]] = deque()
    for name, one in checked.items():
        waiting.append((name, one, readers.submit(read, one)))
        if len(waiting) == _READERS:
            yield waiting.popleft()
    yield from waiting


def _made(
    loading: LoadingConfig, model: Decoder, most_virtual: int, *, in_places: bool
) -> ModelAdapters:
    limits = adapter_limits(loading)
    if not in_places:
        model.adapters = ModelAdapters(model, limits, loading.max_lora_rank, most_virtual)
        return model.adapters
    from penstock.services.worker.adapters.device_adapters import DeviceAdapters

    with torch.inference_mode():
        return DeviceAdapters(model, limits, loading.max_lora_rank)


@contextlib.contextmanager
def _told(name: str, *, required: bool) -> Iterator[None]:
    """Say of a failure which adapter it is of; if that is not required, in the log alone."""
    try:
        yield
    except (BadModelFolder, RuntimeError) as error:
        message = f"--lora {show(name)}: {error}"
        if required:
            raise BadModelFolder(message) from None
        _log.error("an adapter is not loaded: %s", message)

"""How held weights take the place of loading a model, and where a loaded one's are handed over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.protocol.config import Config
from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.device_memory import CudaMemory, DeviceMemory
from penstock.services.worker.held.holding import Holding
from penstock.services.worker.held.memory import HostMemory
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.loaded_model import AttentionAlone, LoadedModel, kernels_for
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.memory_plan import OUTSIDE
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.dense_form import DenseModel
from penstock.services.worker.pooling_tasks import Layer

if TYPE_CHECKING:
    from penstock.services.worker.gpu.compressed_layers import Compression

_log = logging.getLogger("penstock.worker")


class MadeModel(NamedTuple):
    """A model ahead of its first step."""

    model: CausalModel
    kernels: DenseModel | AttentionAlone | str
    judged: Layer | None = None
    """What makes logits of "no" and "yes"."""
    compression: Compression | None = None
    """Of a restored one, if it has any."""
    account: MemoryAccount | None = None
    """Likewise."""
    held_bytes: int = 0
    """See ``LoadedModel``."""
    restored: bool = False
    """Its weights are those that another worker has left."""


def holding_of(config: Config, dtype: torch.dtype, device: torch.device) -> Holding | None:
    """``None``: the configuration asks for none, or there is no memory for it, which the log
    says. Raises ``BadModelFolder``."""
    if not config.loading.hold_weights:
        return None
    if device.type == "cpu":
        return Holding(config, dtype, HostMemory())
    from penstock.services.worker.gpu import held_memory

    try:
        return Holding(config, dtype, held_memory.DeviceMemory())
    except held_memory.HeldMemoryError as failure:
        _log.warning("weights are not held: %s", failure)
        return None


def restored(
    holding: Holding,
    config: Config,
    info: ModelInfo,
    device: torch.device,
    progress: Callable[[str], None],
    loaded: Callable[[LoadReport], None],
) -> MadeModel | None:
    """The model as another worker has left it, if the holder has its weights."""
    found = holding.find(info, device, progress)
    if found is None:
        return None
    loaded(found.report)
    model, kernels, linears = found.restored
    compression = None
    if found.compression:
        from penstock.services.worker.gpu.compressed_layers import Compression

        compression = Compression(found.compression, linears)
    return MadeModel(
        model,
        kernels or kernels_for(model, config.cache.block_size),
        compression=compression,
        account=found.account,
        held_bytes=found.num_bytes,
        restored=True,
    )


def hold_on_host(holding: Holding, made: MadeModel) -> MadeModel:
    """Hand over weights in the host's memory: ahead of their being packed, since what the library
    packs is in no memory that can be shared."""
    if made.model.device.type != "cpu":
        return made
    return made._replace(held_bytes=holding.keep(made.model))


def hold_on_device(holding: Holding, subject: LoadedModel, account: MemoryAccount) -> None:
    """Hand over weights in a GPU's memory, in the form of the kernels, once it is known what is
    left beside them; and what is known, so that the next worker need not measure it."""
    if isinstance(subject.kernels, DenseModel):
        compression = subject.compression
        summary = "" if compression is None else compression.summary
        holding.keep(subject.model, subject.kernels, summary, account)
    elif subject.model.device.type != "cpu":
        holding.close()
        _log.warning("weights are not held: they are not in the form of Penstock's own kernels")


def with_held(subject: LoadedModel, made: MadeModel) -> LoadedModel:
    compression = made.compression or subject.compression
    return subject._replace(compression=compression, held_bytes=made.held_bytes)


def account_again(
    account: MemoryAccount | None, device: torch.device, memory: DeviceMemory | None = None
) -> MemoryAccount | None:
    """The account of the worker that made the weights, where there is as much memory as it had;
    else it is to be measured again. memory: of the device, by default a CUDA device's."""
    if account is None or account.capacity is None or device.type == "cpu":
        return None
    with contextlib.suppress(RuntimeError):
        total, free, reserved, _ = (memory or CudaMemory(device)).read()
        weights, outside = account.bytes_of("weights"), account.bytes_of(OUTSIDE)
        needed = account.counted - weights - outside
        if total == account.total and needed <= free + reserved:
            return account
    return None

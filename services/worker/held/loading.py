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
from penstock.services.worker.held.memory import AwaitedMemory, HostMemory
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.loaded_model import AttentionAlone, LoadedModel, kernels_for
from penstock.services.worker.memory_account import MemoryAccount, shown_bytes
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
    kv: AwaitedMemory | None = None
    """Of a restored one: KV memory for that account, which may still be another worker's."""


class NotPrepared(Exception):
    """A worker cannot be prepared on its device. Says why."""


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
        kv=found.kv,
    )


class Preparation:
    """Of a worker on the device on which the one that it is to replace still computes. It has that
    one's weights and KV memory, and loads none."""

    def __init__(self) -> None:
        self._kv: AwaitedMemory | None = None

    def begin(self, holding: Holding | None, made: MadeModel | None, memory: DeviceMemory) -> None:
        """made: of what is held; memory: of the device. Raises ``NotPrepared``."""
        if holding is not None and made is None:
            holding.close()
        if made is None or made.kv is None or made.account is None:
            raise NotPrepared("what its predecessor has is not held")
        _, free, reserved, _ = memory.read()
        needed = _step_bytes(made.account)
        if needed > free + reserved:
            made.kv.withdraw()
            raise NotPrepared(
                f"beside the worker that it is to replace it takes {shown_bytes(needed)}, and "
                f"{shown_bytes(free + reserved)} are free; lower --gpu-memory-utilization or "
                "--kv-cache-memory-bytes"
            )
        self._kv = made.kv

    def end(self) -> None:
        """All has been computed that is before the worker is wanted."""
        torch.cuda.synchronize()
        if self._kv is not None:
            self._kv.withdraw()

    def take_over(self) -> None:
        """The one that it replaces has ended. Raises ``RuntimeError``."""
        if self._kv is not None:
            self._kv.receive()


def hold_on_host(holding: Holding, made: MadeModel) -> MadeModel:
    """Hand over weights in the host's memory: ahead of their being packed, since what the library
    packs is in no memory that can be shared."""
    if made.model.device.type != "cpu":
        return made
    return made._replace(held_bytes=holding.keep(made.model).num_bytes)


def hold_on_device(holding: Holding, subject: LoadedModel, account: MemoryAccount) -> LoadedModel:
    """Hand over weights in a GPU's memory, in the form of the kernels, once it is known what is
    left beside them; what is known, so that the next worker need not measure it; and KV memory,
    which is the model's from then on."""
    if isinstance(subject.kernels, DenseModel):
        compression = subject.compression
        summary = "" if compression is None else compression.summary
        kept = holding.keep(subject.model, subject.kernels, summary, account)
        return subject._replace(kv_memory=kept.kv_memory)
    if subject.model.device.type != "cpu":
        holding.close()
        _log.warning("weights are not held: they are not in the form of Penstock's own kernels")
    return subject


def with_held(subject: LoadedModel, made: MadeModel) -> LoadedModel:
    compression = made.compression or subject.compression
    kv_memory = None if made.kv is None else made.kv.memory
    return subject._replace(
        compression=compression, held_bytes=made.held_bytes, kv_memory=kv_memory
    )


def account_of(made: MadeModel, device: torch.device) -> MemoryAccount | None:
    """What is known of the memory beside a restored model. Of KV memory that is held it is known
    for certain: where others have taken the rest, taking it fails."""
    return made.account if made.kv is not None else account_again(made.account, device)


def account_again(
    account: MemoryAccount | None, device: torch.device, memory: DeviceMemory | None = None
) -> MemoryAccount | None:
    """The account of the worker that made the weights, where there is as much memory as it had;
    else it is to be measured again. memory: of the device, by default a CUDA device's."""
    if account is None or account.capacity is None or device.type == "cpu":
        return None
    with contextlib.suppress(RuntimeError):
        total, free, reserved, _ = (memory or CudaMemory(device)).read()
        needed = _step_bytes(account) + account.kv_bytes
        if total == account.total and needed <= free + reserved:
            return account
    return None


def _step_bytes(account: MemoryAccount) -> int:
    """Of all that a worker takes beside weights and KV memory."""
    return account.beside - account.bytes_of("weights") - account.bytes_of(OUTSIDE)

"""A device's memory that is none: it counts what torch allocates on the CPU while it is watched."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from penstock.services.worker.device_memory import MemoryReading


class PretendedMemory(TorchDispatchMode):
    """A ``DeviceMemory`` of ``total`` bytes, of which others hold ``outside``."""

    def __init__(self, total: int, outside: int = 0) -> None:
        super().__init__()
        self._total, self._outside = total, outside
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._host = 0
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        new = [self._note(each) for each in found]
        if any(new):
            self.peak = max(self.peak, self.held())
        return result

    def _note(self, tensor: torch.Tensor) -> bool:
        """Whether it is new."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None and not known[0].expired():
            return False
        nowhere = self._host or tensor.device.type == "meta"
        size = 0 if nowhere else storage.nbytes()
        self._storages[storage._cdata] = StorageWeakRef(storage), size
        return True

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """What is allocated here is the host's."""
        self._host += 1
        try:
            yield
        finally:
            self._host -= 1

    def of_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.host():
                return function(*args, **kwargs)

        return called

    def held(self) -> int:
        gone = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in gone:
            del self._storages[key]
        return sum(size for _, size in self._storages.values())

    def begin(self) -> None:
        gc.collect()
        self.peak = self.held()

    def read(self) -> MemoryReading:
        held = self.held()
        return MemoryReading(self._total, self._total - self._outside - held, held, self.peak)

"""What a worker is told of adapters while it runs, and what it tells. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.steps import AdapterLoaded, DropAdapter, LoadAdapter
from penstock.services.worker.executor import DirectExecutor, Executor

if TYPE_CHECKING:
    from penstock.services.worker.adapters.adapter_loader import AdapterLoader


def take(executor: Executor | None, message: LoadAdapter | DropAdapter) -> AdapterLoaded | None:
    """Follow a message. The answer to one that cannot be followed."""
    loader = _loader(executor)
    if loader is None or executor is None:
        if isinstance(message, DropAdapter):
            return None
        reason = "this engine takes no adapters: it needs --lora-dirs, or it still loads"
        return AdapterLoaded(message.name, message.folder, reason=reason)
    if isinstance(message, LoadAdapter):
        loader.load(message)
        return None
    loader.drop(message.digest)
    executor.adapters = [one for one in executor.adapters if one.digest != message.digest]
    return None


def loads(executor: Executor | None) -> bool:
    """Whether adapters are being read."""
    loader = _loader(executor)
    return loader is not None and loader.busy


def loaded_now(executor: Executor | None) -> list[AdapterLoaded]:
    """What has been read since the last call, or could not be."""
    loader = _loader(executor)
    if executor is None or loader is None:
        return []
    found = loader.finished()
    for one in found:
        if one.digest:
            others = [known for known in executor.adapters if known.name != one.name]
            executor.adapters = [*others, Adapter(one.name, one.digest)]
    return found


def _loader(executor: Executor | None) -> AdapterLoader | None:
    return executor.loader if isinstance(executor, DirectExecutor) else None

"""What a worker is told of adapters while it runs, and what it tells. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.steps import (
    AdapterLoaded,
    BringAdapter,
    DropAdapter,
    LoadAdapter,
    NameAdapters,
)
from penstock.services.worker.executor import Executor

if TYPE_CHECKING:
    from penstock.services.worker.adapters.adapter_loader import AdapterLoader


def take(executor: Executor | None, message: Message, tell: Callable[[Message], None]) -> bool:
    """Follow a message; whether it was about adapters. tell: the scheduler."""
    loader = _loader(executor)
    match message:
        case LoadAdapter(name) if loader is not None and executor is not None:
            known = any(one.name == name for one in executor.adapters)
            loader.load(message, replaces=known)
        case LoadAdapter(name, folder):
            reason = "this engine takes no adapters: it needs --lora-dirs"
            tell(AdapterLoaded(name, folder, reason=reason))
        case BringAdapter() if loader is not None:
            loader.bring(message)
        case NameAdapters(adapters):
            if executor is not None:
                executor.adapters = adapters
        case DropAdapter(digest):
            if executor is not None and loader is not None:
                loader.drop(digest)
                executor.adapters = [one for one in executor.adapters if one.digest != digest]
        case _:
            return False
    return True


def forget_others(executor: Executor) -> None:
    """Drop what was read and is none of the engine's adapters. No scheduler that comes knows of it,
    so none would ever say that it may go."""
    if (loader := _loader(executor)) is not None:
        known = {one.digest for one in executor.adapters}
        for digest in [one for one in loader.adapters.folders if one not in known]:
            loader.drop(digest)


def loads(executor: Executor | None) -> bool:
    """Whether adapters are being read or brought."""
    loader = _loader(executor)
    return loader is not None and loader.busy


def tell_loaded(executor: Executor | None, tell: Callable[[Message], None]) -> None:
    """Tell the scheduler what has been read or brought since the last call, or could not be."""
    loader = _loader(executor)
    if loader is None:
        return
    for one in loader.finished():
        tell(one)
    for brought in loader.brought():
        tell(brought)


def _loader(executor: Executor | None) -> AdapterLoader | None:
    return None if executor is None else executor.loader

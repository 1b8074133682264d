"""What a worker does about adapters when its scheduler is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.protocol.wire.messages.engine import Adapter
from penstock.services.worker.adapter_messages import forget_unnamed


def test_what_was_replaced_leaves_with_the_scheduler_that_knew_of_it() -> None:
    """The next one is told of the new one alone, and would never let the former one go."""
    folders = {"former": "/a/one", "new": "/a/one", "other": "/a/two"}
    loader = SimpleNamespace(adapters=SimpleNamespace(folders=folders), drop=folders.pop)
    executor: Any = SimpleNamespace(
        loader=loader, adapters=[Adapter("sql", "new"), Adapter("chat", "other")]
    )
    forget_unnamed(executor)
    assert list(folders) == ["new", "other"]
    executor.loader = None
    forget_unnamed(executor)

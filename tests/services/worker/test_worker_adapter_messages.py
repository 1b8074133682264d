"""What a worker does about adapters when its scheduler is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.steps import AdapterLoaded, NameAdapters
from penstock.services.worker.adapter_messages import forget_others, take, tell_loaded


def test_what_is_none_of_the_engines_leaves_with_the_scheduler_that_knew_of_it() -> None:
    """The next one is not told of it, and would never let it go."""
    folders = {"read": "/a/one", "new": "/a/one", "replaced": "/a/two"}
    loader = SimpleNamespace(adapters=SimpleNamespace(folders=folders), drop=folders.pop)
    executor: Any = SimpleNamespace(
        loader=loader, adapters=[Adapter("sql", "new"), Adapter("", "replaced")]
    )
    forget_others(executor)
    assert list(folders) == ["new", "replaced"]
    executor.loader = None
    forget_others(executor)


def test_a_name_stands_for_what_the_scheduler_says_and_not_for_what_was_read_last() -> None:
    """Another rank may not have it, and then the former one goes on."""
    read = AdapterLoaded("sql", "/a/one", "new")
    loader = SimpleNamespace(finished=lambda: [read], brought=list)
    executor: Any = SimpleNamespace(loader=loader, adapters=[Adapter("sql", "former")])
    told: list[Any] = []
    tell_loaded(executor, told.append)
    assert told == [read] and executor.adapters == [Adapter("sql", "former")]
    assert take(executor, NameAdapters([Adapter("sql", "new")]), told.append)
    assert executor.adapters == [Adapter("sql", "new")]

"""Servers that count nothing, for comparison: what metrics cost cannot be seen where none are off.

``environment(folder)`` has variables for a server whose processes all import a ``sitecustomize`` of
ours at their start (https://docs.python.org/3/library/site.html), which calls ``stop_counting``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_STARTED = "from penstock.loadtest.studies.uncounted import stop_counting\nstop_counting()\n"


def environment(folder: Path) -> Mapping[str, str]:
    """Of such a server. ``folder``: an empty one, for the file that its processes import."""
    (folder / "sitecustomize.py").write_text(_STARTED)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def stop_counting() -> None:
    """From now on this process counts nothing and reports nothing."""
    from penstock.protocol.process.metrics import Counter, Gauge, Histogram, Registry
    from penstock.protocol.wire.messages.membership import MetricsReport

    nothing = MetricsReport([])

    def ignore(*_: object, **__: object) -> None: ...

    def report(_: Registry) -> MetricsReport:
        return nothing

    for kind, names in (
        (Counter, ("inc",)),
        (Gauge, ("set", "add")),
        (Histogram, ("observe", "observe_traced")),
        (Registry, ("inc", "set", "observe")),
    ):
        for name in names:
            setattr(kind, name, ignore)
    setattr(Registry, "report", report)  # noqa: B010

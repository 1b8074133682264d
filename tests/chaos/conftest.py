"""What the chaos tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Report = Callable[..., None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Adds a line of JSON to the file that CHAOS_REPORT names, if it names one."""

    def write(**figures: Any) -> None:
        if path := os.environ.get("CHAOS_REPORT"):
            with Path(path).open("a") as file:
                print(json.dumps({"case": request.node.name, **figures}), file=file)

    return write

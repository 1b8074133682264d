"""The model that is served when none is named: ``penstock-demo``, which ships with Penstock.

``demo/`` in the repository made it and says how. It is a normal model folder: nothing that loads
it knows that it is built in.
"""

from __future__ import annotations

from pathlib import Path

import penstock
from penstock.protocol.model_info import BadModelFolder

NAME = "penstock-demo"
"""Its name in the API."""


def builtin_model() -> Path:
    """The built-in model's folder. Raises ``BadModelFolder`` if this installation lacks it."""
    # Installed, and through the checkout's links, it lies below the package; beside it otherwise.
    for root in penstock.__path__:
        folder = Path(root) / "demo" / "model"
        if (folder / "config.json").exists():
            return folder
    raise BadModelFolder(
        f"this installation has no built-in model (demo/model below {penstock.__path__[0]}); "
        "name a MODEL"
    )

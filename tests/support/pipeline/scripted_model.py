"""A model for a whole server that says what a test wants, where it wants it.

Template, tokenizer and parsers are those of the built-in model; its window is larger. All of the
server is real but for the numbers in the worker.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUILT_IN = Path(__file__).parents[3] / "demo" / "model"
WINDOW = 131_072
_SITE = """
import sys

if "worker" in sys.orig_argv:
    sys.path.append({tests!r})
    from support.pipeline import scripted_executor

    scripted_executor.install({folder!r})
"""


def called(name: str, thought: str = "", **arguments: Any) -> str:
    """What the model writes to call a tool."""
    thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{thinking}<tool_call>\n{call}\n</tool_call>"


def scripted_model(
    folder: Path, script: Sequence[tuple[str, str]]
) -> tuple[list[str], dict[str, str]]:
    """Write the model's folder. Returns arguments and environment for ``served``.

    script: a regular expression and an answer each; the first one that is found in a prompt counts.
    """
    folder.mkdir(parents=True)
    for path in BUILT_IN.iterdir():
        if path.suffix in (".json", ".jinja") and "index" not in path.name:
            shutil.copy(path, folder)
    for name, field in (
        ("config", "max_position_embeddings"),
        ("tokenizer_config", "model_max_length"),
    ):
        settings = json.loads((folder / f"{name}.json").read_text())
        (folder / f"{name}.json").write_text(json.dumps({**settings, field: WINDOW}))
    (folder / "script.json").write_text(json.dumps(list(script)))
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        _SITE.format(tests=str(Path(__file__).parents[2]), folder=str(folder))
    )
    return [str(folder), "--device", "null"], {"PYTHONPATH": str(site)}

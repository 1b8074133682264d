"""The clients of docs/stream.md, as programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs/stream.md").read_text(), re.DOTALL)
_HERE = "ws://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    """The client, then the example that uses it; or what either prints."""
    return [text for kind, text in _BLOCKS if kind == language]


def program(language: str, url: str) -> str:
    """Client and example, for the server at this ``http://`` address."""
    text = "\n".join(blocks(language))
    assert _HERE in text
    return text.replace(_HERE, url.replace("http://", "ws://"))


def run_python(code: str) -> str:
    """What a program prints."""
    return _printed([sys.executable, "-c", code])


def node_command() -> list[str] | None:
    """Node with WebSocket, in versions before 22 behind a flag; ``None``: there is none."""
    node = shutil.which("node")
    if node is None:
        return None
    for flags in ([], ["--experimental-websocket"]):
        command = [node, *flags, "--input-type=module", "-e"]
        asked = subprocess.run([*command, "console.log(typeof WebSocket)"], capture_output=True)
        if asked.stdout == b"function\n":
            return command
    return None


def run_node(command: list[str], code: str) -> str:
    """What a program prints."""
    return _printed([*command, code])


def _printed(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

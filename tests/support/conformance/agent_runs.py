"""Coding agents without anybody before the screen: one question, answered in a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

AGENTS = Path(__file__).parents[2] / "conformance/agents"
BIN = AGENTS / "node_modules" / ".bin"
SECONDS = 300.0
KEY = "a-key"


class Run(NamedTuple):
    """What an agent has said on its way."""

    code: int
    events: list[dict[str, Any]]
    """Of its stream of JSON."""
    output: str
    """All of it, for people."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("type") == kind]


def codex(
    url: str, question: str, folder: Path, model: str, *flags: str, web_socket: bool = False
) -> Run:
    """``codex exec`` with the server as its provider of models; it may do all in ``folder``."""
    home = _home(folder)
    (home / "config.toml").write_text(
        f"""model = "{model}"
model_provider = "penstock"
model_context_window = 131072
web_search = "disabled"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
env_key = "PENSTOCK_KEY"
wire_api = "responses"
supports_websockets = {json.dumps(web_socket)}
request_max_retries = 0
stream_max_retries = 0
"""
    )
    command = [
        str(BIN / "codex"), "exec", "--json", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox", "-C", str(folder), *flags, question,
    ]  # fmt: skip
    return _run(command, folder, {"CODEX_HOME": str(home), "HOME": str(home), "PENSTOCK_KEY": KEY})


def claude(url: str, question: str, folder: Path, model: str, *flags: str) -> Run:
    """``claude -p``; it may do anything in ``folder``."""
    home = _home(folder)
    environment = {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # else root may not leave permissions out
    }
    command = [
        str(BIN / "claude"), "-p", question, "--output-format", "stream-json", "--verbose",
        "--dangerously-skip-permissions", *flags,
    ]  # fmt: skip
    return _run(command, folder, environment)


def _home(folder: Path) -> Path:
    """A home of its own beside the folder, so that nothing of this machine's user is read."""
    home = folder.with_name(f"{folder.name}-home")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Run:
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "TERM": "dumb", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return Run(done.returncode, [json.loads(line) for line in lines], done.stdout + done.stderr)

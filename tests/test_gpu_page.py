"""The commands of docs/gpus.md are read by the program; those that need no GPU are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from penstock.services import model_commands
from penstock.services.command_table import parser_of

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = re.findall(r"```sh\n(.*)\n```", (ROOT / "docs/gpus.md").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_page_is_understood(command: str) -> None:
    program, name, *arguments = shlex.split(command)
    assert program == "penstock"
    parser = parser_of(name)
    assert parser is not None
    parser.parse_args(arguments)


@pytest.mark.parametrize("command", [one for one in COMMANDS if " plan " in one])
def test_the_plans_of_the_page_are_made(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, name, _, *flags = shlex.split(command)
    assert model_commands.main(name, [str(ROOT / "demo/model"), *flags]) == 0
    assert "weights" in capsys.readouterr().out

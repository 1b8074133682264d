"""Completion scripts, loaded in the shells that they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.command_run import run
from support.commands.emulator import Terminal, terminal_of

from penstock.services.commands.completion.command import SHELLS
from penstock.services.commands.completion.declared import commands
from penstock.services.commands.completion.scripts import SCRIPTS

START = {
    "bash": ("bash --norc --noprofile -i", "PS1='$ '; source {script}"),
    "zsh": ("zsh -f -i", "PS1='$ '; autoload -Uz compinit; compinit -u -D; source {script}"),
    "fish": ("fish --no-config -i", "function fish_prompt; echo -n '$ '; end; source {script}"),
}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Terminal]]:
    """A shell on a terminal that has read its script, in a folder with one file."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed here")
    script = tmp_path / "penstock.completion"
    script.write_text(SCRIPTS[name](commands()))
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "settings.toml").touch()
    start, read = START[name]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    with terminal_of(start.split(), environment=environment, folder=folder) as seen:
        seen.type(read.format(script=script) + "; echo loa''ded\r")
        seen.sees("loaded")
        seen.at_prompt("$")
        seen.type("clear\r")
        seen.until(lambda: seen.lines == ["$"], "had a clear screen")
        yield name, seen


def test_a_real_shell_completes_commands_flags_values_and_files(
    shell: tuple[str, Terminal],
) -> None:
    _, seen = shell
    for begun, whole in (
        ("penstock tok", "penstock tokenizer"),
        ("penstock serve --max-num-s", "penstock serve --max-num-seqs"),
        ("penstock serve --dtype bfl", "penstock serve --dtype bfloat16"),
        ("penstock serve --config set", "penstock serve --config settings.toml"),
        ("penstock chat --temp", "penstock chat --temperature"),
        ("penstock status --wat", "penstock status --watch"),
        ("penstock completion zs", "penstock completion zsh"),
        ("penstock keys ad", "penstock keys add"),
        ("penstock keys add --rol", "penstock keys add --role"),
        ("penstock bench thr", "penstock bench throughput"),
    ):
        seen.type(f"{begun}\t")
        seen.sees(f"$ {whole}")
        seen.type("\x15\x0b")
        seen.until(lambda: seen.lines[-1] == "$", "had an empty line")


def test_a_choice_of_several_is_listed(shell: tuple[str, Terminal]) -> None:
    _, seen = shell
    seen.type("penstock s\t\t")
    for name in ("serve", "scheduler", "status", "stop"):
        seen.sees(name)
    assert "chat" not in seen.text


def test_every_command_is_there_and_nothing_for_tests_alone() -> None:
    found = commands()
    names = [one.name for one in found]
    assert {"serve", "chat", "status", "keys add", "bench serve", "completion"} <= set(names)
    flags = {spelling for one in found for flag in one.flags for spelling in flag.spellings}
    assert {"--port", "--watch", "--no-download", "--role"} <= flags
    assert not {"--null-step-ms", "--fault", "--parent-pid"} & flags
    serve = next(one for one in found if one.name == "serve")
    device = next(flag for flag in serve.flags if "--device" in flag.spellings)
    assert device.choices == ("auto", "cpu", "cuda", "null")


def test_the_command_prints_the_script_of_a_shell_and_knows_no_other() -> None:
    assert run("completion", "fish").stdout == SCRIPTS["fish"](commands())
    refused = run("completion", "tcsh")
    assert refused.returncode == 2
    assert "bash" in refused.stderr


def test_the_script_for_bash_is_read_without_a_terminal() -> None:
    code = 'eval "$("$0" -m penstock.services completion bash)" && complete -p penstock'
    done = subprocess.run(
        ["bash", "--norc", "-c", code, sys.executable], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("complete -F _penstock penstock\n", "")

"""Every command and example of every page is one that the program understands.

Commands are read by the code that would read them from a shell, and go no further. Tests of
their own run what the pages for beginners, the library, gRPC, extensions and the README show.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import yaml
from support.docs_examples import ROOT, Block, Command, blocks, commands, mentions

from penstock.loadtest import bench
from penstock.protocol.config.flags import FlagParser
from penstock.protocol.validation import read
from penstock.services.command_table import COMMANDS, TOOLS, parser_of
from penstock.services.frontend.api_page import described
from penstock.services.frontend.dialects.registry import BUILT_IN

FOREIGN = {
    "[", "cd", "chmod", "claude", "do", "done", "export", "for", "grpcurl", "kubectl", "mkdir",
    "openssl", "smg", "sudo",
}  # fmt: skip
"""Programs of other projects and words of the shell. Of ``docker``, ``helm`` and ``pip`` what is
ours is looked at."""
ROUTES = described(BUILT_IN)
HOST = re.compile(r"http://127\.0\.0\.1:8000(/[^?\s]*)")


class Understood(Exception):
    """All flags of a command were read."""


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs go no further than their flags."""

    def until_understood(plain: Callable[..., Any]) -> Callable[..., Any]:
        def parse(self: Any, args: Any = None, namespace: Any = None) -> Any:
            plain(self, args, namespace)
            raise Understood

        return parse

    for kind in (argparse.ArgumentParser, FlagParser):
        monkeypatch.setattr(kind, "parse_args", until_understood(kind.parse_args))


def page_of(case: Block | Command) -> str:
    return case.page


ALL = list(commands())


def of_program(*names: str) -> list[Command]:
    return [one for one in ALL if one.words[0].rpartition("/")[2] in names]


def measured_slowly(name: str) -> list[Any]:
    """Those of a program; of measurements most import torch and transformers."""
    return [
        pytest.param(one, marks=pytest.mark.slow if one.page == "benchmarks.md" else ())
        for one in of_program(name)
    ]


def test_every_program_of_the_pages_is_known_here() -> None:
    ours = {"penstock", "python", "make", "curl", "docker", "helm", "pip", "honcho"}
    found = {one.words[0].rpartition("/")[2] for one in ALL}
    assert found - FOREIGN == ours


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("command", measured_slowly("penstock"), ids=page_of)
def test_each_command_of_the_pages_has_the_flags_that_the_page_gives_it(command: Command) -> None:
    _, name, *flags = command.words
    if name == "eval":
        evaluated(flags)
    elif name == "bench":
        with pytest.raises(Understood):
            bench.main(flags)
    elif "--help" in flags:
        assert name in COMMANDS
    else:
        parser = parser_of(name)
        assert parser is not None
        with pytest.raises(Understood):
            parser.parse_args(flags)


def evaluated(flags: Sequence[str]) -> None:
    """``penstock eval`` hands on what it does not know to the server that it starts."""
    own, server = parser_of("eval"), parser_of("serve")
    assert own is not None
    assert server is not None
    _, rest = own.parse_known_args(flags)
    with pytest.raises(Understood):
        server.parse_args(rest)


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("command", measured_slowly("python"), ids=page_of)
def test_each_program_of_the_pages_has_the_flags_that_the_page_gives_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first, *words = command.words
    if first != "-m":
        assert (ROOT / first).is_file()
        return
    name, *flags = words
    if name.startswith("penstock."):
        monkeypatch.setattr(sys, "argv", [name, *flags])
        main = importlib.import_module(name).main
        with pytest.raises(Understood):
            main(*([flags] if inspect.signature(main).parameters else []))


@pytest.mark.parametrize("command", list(mentions()), ids=page_of)
def test_each_command_in_a_sentence_is_there_with_its_flags(command: Command) -> None:
    program, name, *words = command.words
    if program == "make" or name.startswith("-") or name.isupper():
        return
    assert name in COMMANDS or name in TOOLS, name
    if name != "bench":
        assert {word for word in words if word.startswith("--")} <= set(options(name))


def options(name: str) -> Iterator[str]:
    """Of a command and its sub-commands; of ``eval`` also those of the server that it starts."""
    found = [one for one in (parser_of(name), *[parser_of("serve")] * (name == "eval")) if one]
    for parser in found:
        yield from parser._option_string_actions
        for one in parser._actions:
            if isinstance(one, argparse._SubParsersAction):
                found += one.choices.values()


def test_each_target_that_a_page_makes_is_there() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    named = [one for one in (*of_program("make"), *mentions()) if one.words[0] == "make"]
    assert {one.words[1] for one in named} <= targets


@pytest.mark.parametrize("command", of_program("curl"), ids=page_of)
def test_each_request_of_the_pages_has_a_route_and_a_body_that_it_takes(command: Command) -> None:
    words = list(command.words)
    (path,) = (found[1] for word in words if (found := HOST.match(word)))
    method = "POST" if "-d" in words else "GET"
    (route,) = (one for one in ROUTES if (one.method, one.path) == (method, path))
    if method == "POST":
        assert route.takes is not None
        read(json.loads(words[words.index("-d") + 1]), route.takes)


def test_containers_and_packages_that_the_pages_name_are_there() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    profiles = {name for one in compose.values() for name in one.get("profiles", ())}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command in of_program("docker", "pip", "helm"):
        text = " ".join(command.words)
        assert set(re.findall(r"--profile (\S+)", text)) <= profiles
        assert set(re.findall(r"--scale (\w+)=", text)) <= compose.keys()
        assert set(re.findall(r"penstock\[(\w+)\]", text)) <= extras["optional-dependencies"].keys()
        assert all((ROOT / name).is_dir() for name in re.findall(r"(deploy/helm/\w+)", text))


@pytest.mark.parametrize(
    "block", [one for one in blocks() if one.kind in ("python", "py")], ids=page_of
)
def test_each_python_example_is_python_and_what_it_imports_of_ours_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            for alias in node.names:
                assert found(str(node.module), alias.name), f"{node.module}.{alias.name}"


def found(module: str, name: str) -> bool:
    """Whether a module has it, or is the package of one of that name."""
    imported = importlib.import_module(module)
    return hasattr(imported, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize(
    "block", [one for one in blocks() if one.kind in ("json", "yaml", "toml")], ids=page_of
)
def test_each_file_that_a_page_shows_can_be_read(block: Block) -> None:
    """Of JSON one text, or one a paragraph."""
    reads = {"yaml": yaml.safe_load, "toml": tomllib.loads}
    if block.kind == "json":
        decoder, rest = json.JSONDecoder(), block.text.replace(", …", "").strip()
        while rest:
            _, end = decoder.raw_decode(rest)
            rest = rest[end:].lstrip()
    else:
        assert reads[block.kind](block.text)

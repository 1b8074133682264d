"""What the model is taught about Penstock is true of Penstock, and the model was taught it.

Only what is taught is looked at: a new setting, command or route needs no word about it here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import penstock.demo
from penstock.demo.skills.facts import DEFAULTS, FLAGS, all_answers
from penstock.demo.skills.terms import COMMANDS
from penstock.demo.training.export import weights_digest
from penstock.demo.training.setting_facts import LONGEST, declared, default_of
from penstock.loadtest import bench
from penstock.protocol.config.resolve import fields
from penstock.services.command_table import COMMANDS as SERVICES
from penstock.services.command_table import TOOLS, parser_of
from penstock.services.frontend.api_page import described
from penstock.services.frontend.app import OPEN_ROUTES
from penstock.services.frontend.dialects.registry import BUILT_IN
from penstock.services.frontend.openapi import describe

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path(penstock.demo.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
DOCKER = {"--build", "--profile"}
SETTINGS = {field.flag: field for field in fields().values() if field.group != "test"}


@pytest.mark.parametrize("flag", FLAGS)
def test_demo_facts_of_a_setting_are_true(flag: str) -> None:
    """Where this fails the built-in model says something untrue: train it anew, or until then take
    the setting out of ``demo/skills/flags.json``, so that no evaluation asks for it."""
    assert flag in SETTINGS
    assert DEFAULTS[flag] == default_of(SETTINGS[flag])


def test_demo_facts_of_every_setting_can_be_taught() -> None:
    assert declared().keys() == SETTINGS.keys()
    for flag, facts in declared().items():
        assert 10 < len(facts["text"]) <= LONGEST, flag
        assert "\n" not in facts["text"], flag


def test_demo_facts_are_those_that_the_model_was_trained_on() -> None:
    """A new answer comes together with a newly trained model; an old one may be taken out."""
    record = json.loads((DEMO / "training.json").read_text())
    assert set(all_answers()) <= set(record["answers"])
    assert weights_digest(DEMO / "model") == record["weights_sha256"]


def test_demo_facts_name_only_flags_that_exist() -> None:
    named = {flag for answer in all_answers() for flag in FLAG.findall(answer)}
    assert "--device" in named
    parsers = [parser_of(command) for command in ("serve", "plan", "tune")]
    theirs = {flag for one in parsers if one for flag in one._option_string_actions}
    assert named <= theirs | SETTINGS.keys() | DOCKER


def test_demo_facts_name_only_commands_that_exist() -> None:
    commands = {f"penstock {name}" for name in (*SERVICES, *TOOLS)}
    commands |= {f"penstock bench {name}" for name in bench.COMMANDS}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands |= {f"make {name}" for name in targets}
    assert {name for name, _ in COMMANDS} <= commands
    for answer in all_answers():
        for text in re.findall(r"`((?:penstock|make) [a-z ]+)", answer):
            assert text.strip() in commands, answer


def test_demo_facts_name_only_routes_and_files_that_exist() -> None:
    routes = describe(described(BUILT_IN), OPEN_ROUTES, with_keys=False)["paths"]
    for answer in all_answers():
        for route in re.findall(r"(?<![\w.])/(?:v1/[\w/]+|health\b|metrics\b|ready\b)", answer):
            assert route in routes, answer
        for file in re.findall(r"\b(?:docs|deploy)/[\w./-]*\w", answer):
            assert (ROOT / file).exists(), answer


def test_demo_facts_name_the_port_and_the_block_size_that_are_the_defaults() -> None:
    said = " ".join(all_answers())
    assert f"listens on port {SETTINGS['--port'].default};" in said
    assert f"of {SETTINGS['--block-size'].default} tokens;" in said


def test_demo_facts_name_only_environment_variables_of_flags() -> None:
    for answer in all_answers():
        for name in re.findall(r"PENSTOCK_[A-Z_]+", answer):
            assert "--" + name.removeprefix("PENSTOCK_").replace("_", "-").lower() in SETTINGS

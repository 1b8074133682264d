"""What the model is taught about Penstock agrees with Penstock."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from penstock.demo.skills.facts import (
    COMMANDS,
    DEFAULTS,
    FLAGS,
    MORE_QUESTIONS,
    QUESTIONS,
    TERMS,
)
from penstock.protocol.config import Config
from penstock.services.cli import COMMANDS as SERVICES
from penstock.services.cli import TOOLS

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = [answer for _, answer in (*QUESTIONS, *MORE_QUESTIONS, *TERMS, *COMMANDS)]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
ELSEWHERE = {"--help", "--config", "--show-config"}
"""Flags of the command line itself."""
SINCE = {
    *("--allowed-origins", "--compress-weights", "--insecure", "--max-tenant-share"),
    *("--download", "--max-wait-s", "--max-waiting-tokens", "--published-host"),
    *("--device-index", "--restart-wait-s", "--tensor-parallel-size", "--pipeline-parallel-size"),
    *("--memory-share", "--expected-models", "--model-impl", "--tool-strictness"),
    "--quantization",
    *("--tool-parser", "--reasoning-parser", "--response-store", "--response-store-bytes"),
    *("--grpc-host", "--grpc-port", "--grpc-tokenizer", "--task", "--pooling"),
    *("--allow-dimensions", "--keys-file", "--limits-url", "--root-path", "--tls-cert"),
    *("--tls-key", "--trusted-proxies", "--uds", "--uds-mode", "--grpc-uds", "--model-dirs"),
    "--state-file",
    *("--nodes", "--join", "--join-timeout-s", "--executor", "--rank-traffic"),
    "--disable-custom-all-reduce",
    *(
        "--lora",
        "--max-loras",
        *("--max-cpu-loras", "--max-registered-loras"),
        "--max-lora-rank",
        "--lora-dirs",
        "--lora-required",
    ),
    "--otel-traces",
    *("--kv-tier-memory-bytes", "--kv-tier-disk", "--kv-tier-disk-bytes", "--kv-tier-store-after"),
    *("--speculative", "--speculative-tokens", "--speculative-history"),
    *("--resident", "--keep-alive", "--min-awake-s", "--wake-wait-s", "--prepare-engines"),
    *("--kv-cache-dtype", "--deterministic"),
}
"""Flags newer than the training of the model that is built in."""
SETTINGS = {
    "--" + field.name.replace("_", "-"): field.default
    for group in msgspec.structs.fields(Config)
    if group.name != "test"
    for field in msgspec.structs.fields(group.type)
    if field.name != "models"  # what several values of --model become
}


def written(default: object) -> str:
    """A default as people write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_demo_facts_know_every_flag_and_no_other() -> None:
    assert set(FLAGS) == set(SETTINGS) - SINCE


@pytest.mark.parametrize("flag", DEFAULTS)
def test_demo_facts_know_the_default_of(flag: str) -> None:
    assert DEFAULTS[flag] == written(SETTINGS[flag])


def test_demo_facts_name_only_flags_that_exist() -> None:
    named = {flag for answer in ANSWERS for flag in FLAG.findall(answer)}
    assert "--device" in named
    assert named <= SETTINGS.keys() | ELSEWHERE


def test_demo_facts_name_only_commands_that_exist() -> None:
    commands = {f"penstock {name}" for name in (*SERVICES, *TOOLS)} | {"penstock bench serve"}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands |= {f"make {name}" for name in targets}
    assert {name for name, _ in COMMANDS} <= commands
    for answer in ANSWERS:
        for text in re.findall(r"`((?:penstock|make) [a-z ]+)", answer):
            assert text.strip() in commands, answer


def test_demo_facts_name_the_port_and_the_block_size_that_are_the_defaults() -> None:
    said = " ".join(ANSWERS)
    assert f"listens on port {SETTINGS['--port']};" in said
    assert f"of {SETTINGS['--block-size']} tokens;" in said


def test_demo_facts_name_only_environment_variables_of_flags() -> None:
    for answer in ANSWERS:
        for name in re.findall(r"PENSTOCK_[A-Z_]+", answer):
            assert "--" + name.removeprefix("PENSTOCK_").replace("_", "-").lower() in SETTINGS

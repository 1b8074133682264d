"""What engines with roles do not go together with is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.derive import derive
from penstock.protocol.config.machine import read_machine
from penstock.protocol.config.resolve import fields
from penstock.protocol.config.role_checks import check_roles, contradictions_of_roles
from penstock.protocol.config.sources import Source

KEPT = {"kv_tier_memory_bytes": 1 << 30}
BOTH = {"prefill_engines": 1, "decode_engines": 2, "data_parallel_size": 3}


GIVEN = {name: Source("flag") for name in fields()}
DEFAULT = {name: Source("default") for name in fields()}


def configuration(**groups: dict[str, Any]) -> Config:
    """It differs from the default in these settings of its groups."""
    config = Config()
    changed = {
        group: msgspec.structs.replace(getattr(config, group), **settings)
        for group, settings in groups.items()
    }
    return msgspec.structs.replace(config, **changed)


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"launch": BOTH, "cache": KEPT},
        {"launch": BOTH, "cache": KEPT, "device": {"device": "cuda"}},
        {"scheduler": {"role": "decode"}, "cache": KEPT},
    ],
    ids=str,
)
def test_roles_with_a_keeper_and_no_roles_are_not_refused(groups: dict[str, Any]) -> None:
    assert list(contradictions_of_roles(configuration(**groups), GIVEN)) == []


def test_the_number_of_engines_follows_from_their_roles() -> None:
    launch = {"prefill_engines": 1, "decode_engines": 2}
    config = configuration(launch=launch, cache=KEPT, device={"device": "cpu"})
    assert list(contradictions_of_roles(config, DEFAULT)) == []
    machine = read_machine(environment={})
    found, sources = derive(config, DEFAULT, machine, None)
    assert found.launch.data_parallel_size == 3
    assert list(contradictions_of_roles(found, sources)) == []


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (
            {"launch": {"prefill_engines": 1}, "cache": KEPT},
            ("--prefill-engines 1", "--decode-engines"),
        ),
        (
            {"launch": {"decode_engines": 2}, "cache": KEPT},
            ("--decode-engines 2", "--prefill-engines"),
        ),
        ({"launch": BOTH}, ("--prefill-engines 1", "--kv-tier-memory-bytes")),
        ({"scheduler": {"role": "prefill"}}, ("--role prefill", "--kv-tier-memory-bytes")),
        (
            {"launch": BOTH | {"data_parallel_size": 2}, "cache": KEPT},
            ("--data-parallel-size 2", "--prefill-engines 1", "--decode-engines 2"),
        ),
        (
            {"launch": BOTH | {"resident": 1}, "cache": KEPT},
            ("--prefill-engines 1", "--resident 1"),
        ),
        (
            {"launch": BOTH | {"keep_alive": ["5m"]}, "cache": KEPT},
            ("--prefill-engines 1", "--keep-alive"),
        ),
        (
            {"launch": BOTH, "cache": KEPT, "scheduler": {"role": "decode"}},
            ("--role decode", "--prefill-engines"),
        ),
    ],
    ids=str,
)
def test_what_roles_do_not_go_together_with_is_named(
    groups: dict[str, Any], names: tuple[str, ...]
) -> None:
    (line,) = contradictions_of_roles(configuration(**groups), GIVEN)
    assert all(name in line for name in names), line


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ({"scheduler": {"role": "prefill"}}, "--role prefill"),
        ({"cluster": {"max_local_prefill_length": 9}}, "--max-local-prefill-length 9"),
    ],
)
def test_serve_refuses_what_is_for_one_engine_or_for_none(
    groups: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=name):
        check_roles("serve", configuration(**groups))


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [("plan", True), ("warm", True), ("scheduler", False), ("worker", False)],
)
def test_a_command_without_an_engine_of_its_own_names_the_one_that_takes_a_role(
    command: str, is_refused: bool
) -> None:
    config = configuration(scheduler={"role": "decode"})
    if is_refused:
        said = f"`penstock scheduler` takes it, `penstock {command}` does not"
        with pytest.raises(ConfigError, match=said):
            check_roles(command, config)
    else:
        check_roles(command, config)

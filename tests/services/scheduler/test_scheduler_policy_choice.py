"""Policies by name: built in, brought by an installed package, broken or unknown."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.protocol.config import ConfigError
from penstock.services import cli
from penstock.services.scheduler.policy import FirstComeFirstServed
from penstock.services.scheduler.policy_choice import (
    ENTRY_POINT_GROUP,
    MEMBERS,
    POLICIES,
    make_policy,
)

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "scheduling.md"
GOOD = "from penstock.services.scheduler.policy import FirstComeFirstServed as Policy\n"


def install(
    folder: Path, distribution: str, module: str, source: str, entry: str, version: str = "1.0"
) -> None:
    """What an installer leaves in a folder of ``sys.path``: a module and its metadata."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{entry}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, searched by this process for the length of a test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return folder


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def install_the_example(folder: Path) -> None:
    (source,), (project_text,) = blocks_of("python"), blocks_of("toml")
    project = tomllib.loads(project_text)["project"]
    ((name, target),) = project["entry-points"][ENTRY_POINT_GROUP].items()
    module = target.partition(":")[0]
    assert source.startswith(f"# {module}.py\n")
    install(folder, project["name"], module, source, f"{name} = {target}", project["version"])


def test_the_documented_example_orders_requests_when_installed(site: Path) -> None:
    install_the_example(site)
    engine = Engine(small(max_num_seqs=1), policy="head-start")
    for request_id, (tenant, age) in enumerate(
        [("", 0.0), ("silver", 0.0), ("gold", 0.0), ("", 20.0), ("", 40.0)]
    ):
        engine.submit(request_id, prompt(2 + request_id), max_tokens=3, tenant=tenant, age=age)
    engine.run()
    started = [new.prompt_len - 2 for plan in engine.plans for new in plan.added]
    assert started == [4, 2, 3, 1, 0]
    engine.assert_idle()


def test_the_documented_example_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As a user would try it: the simulation, with the package on the path."""
    install_the_example(tmp_path / "site")
    done = subprocess.run(
        [
            sys.executable, "-m", "penstock.loadtest.studies.simulate_policies",
            "--requests", "40", "--policy", "head-start",
        ],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| head-start |" in done.stdout


def test_an_unknown_name_names_the_known_ones_the_installed_ones_and_the_group(site: Path) -> None:
    install(site, "other", "other_module", GOOD, "lottery = other_module:Policy")
    with pytest.raises(ConfigError) as caught:
        make_policy("lifo")
    message = str(caught.value)
    for word in ("'lifo'", "--scheduling-policy", *POLICIES, "lottery", ENTRY_POINT_GROUP):
        assert word in message
    assert "other_module" not in sys.modules


def test_the_scheduler_command_ends_with_that_message_and_the_code_of_wrong_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["scheduler", "--scheduling-policy", "lifo"]) == cli.BAD_SETTINGS
    assert "unknown scheduling policy 'lifo'" in capsys.readouterr().err


BROKEN = {
    "raises at import": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "imports what is not there": ("import not_there_at_all", "not_there_at_all"),
    "has no such class": ("", "Policy"),
    "has a syntax error": ("def", "SyntaxError"),
    "cannot be called": ("Policy = 5", "'int' object is not callable"),
    "needs arguments": ("def Policy(a): pass", "missing 1 required positional argument"),
    "makes no policy": ("class Policy: name = 'x'", "without uses_prefix_cache, key, victim"),
    "has no key": (
        "from penstock.services.scheduler.policy import SchedulingPolicy\n"
        "class Policy(SchedulingPolicy): name = 'x'",
        "abstract",
    ),
    "has no name": (
        "from penstock.services.scheduler.policy import SchedulingPolicy\n"
        "class Policy(SchedulingPolicy):\n    def key(self, request): return (0,)",
        "without name",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_package_that_delivers_no_policy_is_named_with_the_cause(site: Path, case: str) -> None:
    source, words = BROKEN[case]
    module = f"broken_{list(BROKEN).index(case)}"
    install(site, "acme-policies", module, source, f"acme = {module}:Policy", version="2.5")
    with pytest.raises(ConfigError) as caught:
        make_policy("acme")
    message = str(caught.value)
    for word in ("'acme'", "acme-policies 2.5", f"{module}:Policy", words):
        assert word in message


def test_a_name_that_two_packages_offer_is_refused_with_both_named(site: Path) -> None:
    install(site, "first", "first_module", GOOD, "twice = first_module:Policy")
    install(site, "second", "second_module", GOOD, "twice = second_module:Policy")
    with pytest.raises(ConfigError, match=r"2 times.*first 1\.0.*second 1\.0"):
        make_policy("twice")


def test_only_the_policy_that_is_asked_for_is_loaded(site: Path) -> None:
    install(site, "wanted", "wanted_module", GOOD, "wanted = wanted_module:Policy")
    install(site, "bomb", "bomb_module", "raise SystemExit(9)", "bomb = bomb_module:Policy")
    assert isinstance(make_policy("wanted"), FirstComeFirstServed)
    assert "bomb_module" not in sys.modules


def test_the_built_in_names_cannot_be_taken(site: Path) -> None:
    install(site, "thief", "thief_module", "raise SystemExit(9)", "fcfs = thief_module:Policy")
    assert type(make_policy("fcfs")) is FirstComeFirstServed


@pytest.mark.parametrize("name", POLICIES)
def test_every_built_in_policy_has_its_name_all_members_and_a_line_in_the_document(
    name: str,
) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert all(hasattr(policy, member) for member in MEMBERS)
    assert make_policy(name) is not policy
    assert f"| `{name}`" in DOCUMENT.read_text()

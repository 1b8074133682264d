"""Which tasks installed packages bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.protocol.config import ConfigError
from penstock.protocol.tasks import load_tasks

Install = Callable[[str, str], None]
CODE = """
class Task:
    name = "{name}"
    def pool(self, hidden): return b""
    def event(self, values): return values
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(module: str, code: str) -> None:
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (tmp_path / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[penstock.tasks]\n{module} = {module}:Task\n")

    return add


def test_without_packages_there_is_no_task_but_to_generate() -> None:
    assert load_tasks() == {}


def test_a_task_is_known_by_its_own_name(install: Install) -> None:
    install("task_of_one_test", CODE.format(name="fold"))
    assert list(load_tasks()) == ["fold"]


@pytest.mark.parametrize("names", [("generate",), ("tokenize",), ("fold", "fold")])
def test_two_tasks_of_one_name_are_refused(install: Install, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        install(f"taken_{names[0]}_{number}", CODE.format(name=name))
    with pytest.raises(ConfigError, match=f"'{names[0]}' of distribution taken.* uninstall one"):
        load_tasks()


def test_a_package_without_a_task_is_named(install: Install) -> None:
    install("no_task", "class Task:\n    name = 'fold'\n")
    with pytest.raises(ConfigError, match=r"'no_task' of distribution no.task 1.0.*without pool"):
        load_tasks()

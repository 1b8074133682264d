"""Adapters of other packages: what is wrong with one is said with the package's name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.registry import ENTRY_POINTS, adapter_for, is_native

INFO = ModelInfo(Path("/model"), "OwnForCausalLM", 10, 10, "float32", [], {}, {})


def install(site: Path, package: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one module that declares an adapter, as an installer leaves it."""
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\n{INFO.architecture} = {module}:adapter\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise RuntimeError('no such driver')", "RuntimeError: no such driver"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of"),
        ("other = 1", "AttributeError: .*'adapter'"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused_with_its_package(
    source: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "broken-models", source, monkeypatch)
    assert is_native(INFO)
    with pytest.raises(
        BadModelFolder, match=rf"'OwnForCausalLM'.*package broken-models cannot.*: {error}"
    ):
        adapter_for(INFO)


def test_two_packages_with_an_adapter_for_one_architecture_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "second-models", "adapter = object()", monkeypatch)
    install(tmp_path, "first-models", "adapter = object()", monkeypatch)
    with pytest.raises(
        BadModelFolder, match="2 adapters, of the packages first-models, second-models; uninstall"
    ):
        adapter_for(INFO)

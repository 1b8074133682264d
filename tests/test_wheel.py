"""The wheel and the sdist hold all that a server needs, the built-in model included."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("setuptools", reason="no setuptools here to build a wheel with")

ROOT = Path(__file__).resolve().parent.parent
URL = re.compile(r"(http://[\d.]+:\d+)/v1")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the Dockerfile does, from what it copies and what it leaves out of the images."""
    return _built("wheel", _sources(tmp_path_factory.mktemp("wheel")))


def _sources(folder: Path) -> Path:
    """What a build needs of the repository, in this folder."""
    folder.mkdir(exist_ok=True)
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = re.findall(r"^COPY ([\w. ]+) \./[\w]*$", dockerfile, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert {"pyproject.toml", "README.md", "penstock", "services"} <= set(names)
    names += ["demo", "loadtest", "MANIFEST.in"]
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=LEFT_OUT)
        else:
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def _built(kind: str, folder: Path) -> Path:
    """The wheel or the sdist of a source folder."""
    (folder / "out").mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}('out')"  # as pip calls it
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (made,) = (folder / "out").iterdir()
    return made


def test_the_wheel_holds_every_module_the_page_and_the_built_in_model(wheel: Path) -> None:
    """But no studies, which repeat measurements of ours from a source tree, and nothing that trains
    the built-in model."""
    archive = zipfile.ZipFile(wheel)
    held = set(archive.namelist())
    missing = set()
    for folder in ("client", "demo", "kernels", "loadtest", "protocol", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            if not {"studies", "training"}.intersection(path.parts):
                missing |= {f"penstock/{path.relative_to(ROOT)}"} - held
    assert not [name for name in held if "/studies/" in name or "/training/" in name]
    modules = [archive.read(name).decode() for name in held if name.endswith(".py")]
    assert not [
        one for one in modules if re.search(r"^ *(from|import) .*demo\.training", one, re.M)
    ]
    for folder in ("demo/model", "services/frontend/page", "services/frontend/docs_page"):
        for path in (ROOT / folder).iterdir():
            missing |= {f"penstock/{path.relative_to(ROOT)}"} - held
    assert missing | {"penstock/demo/skills/flags.json"} - held == set()
    for path in (ROOT / "demo/model").iterdir():
        assert archive.read(f"penstock/{path.relative_to(ROOT)}") == path.read_bytes(), path


@pytest.mark.slow  # two builds
def test_a_wheel_made_of_the_sdist_holds_what_one_made_of_the_sources_does(
    wheel: Path, tmp_path: Path
) -> None:
    sources = _sources(tmp_path / "sources")
    (sources / "tests").mkdir()
    (sources / "tests/test_some.py").touch()
    with tarfile.open(_built("sdist", sources)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / "tests").exists()
    again = zipfile.ZipFile(_built("wheel", unpacked))
    first = zipfile.ZipFile(wheel)
    assert again.namelist() == first.namelist()
    assert {one.CRC for one in again.infolist()} == {one.CRC for one in first.infolist()}


@pytest.mark.parametrize("device", ["null", pytest.param("cpu", marks=pytest.mark.slow)])
def test_a_server_from_the_wheel_answers_with_the_built_in_model(
    wheel: Path, tmp_path: Path, device: str
) -> None:
    """The null device draws its tokens, and reads no weights: those of the wheel are compared
    above."""
    installed = tmp_path / "installed"
    threads = {"PENSTOCK_THREADS": "1"} if device == "cpu" else {}
    zipfile.ZipFile(wheel).extractall(installed)
    command = [sys.executable, "-m", "penstock.services", "serve", "--device", device]
    environment = {**os.environ, "PYTHONPATH": str(installed), **threads}
    answer = _served(command, environment, tmp_path, f"{installed}/penstock/demo/model")
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["choices"][0]["message"]["content"] == "42" or device == "null"


@pytest.mark.slow  # it installs everything
@pytest.mark.timeout(1800)
def test_an_sdist_is_installed_into_a_clean_environment_and_serves(tmp_path: Path) -> None:
    own, sources = tmp_path / "own", _sources(tmp_path / "sources")
    kept = re.compile(r"PIP_|.*_proxy$|SSL_CERT|PATH$|OPENBLAS", re.IGNORECASE)
    environment = {
        name: value
        for name, value in os.environ.items()
        if kept.match(name) and name != "PYTHONPATH"
    }
    subprocess.run([sys.executable, "-m", "venv", own], check=True, timeout=120)
    (torch,) = re.findall(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for packages in ([torch], [str(_built("sdist", sources))]):
        pip = [str(own / "bin/python"), "-m", "pip", "install", "-q", *packages]
        done = subprocess.run(pip, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr[-2000:]
    command = [str(own / "bin/penstock"), "serve", "--threads", "1"]
    answer = _served(command, environment, tmp_path, f"{own}/lib")
    assert answer["choices"][0]["message"]["content"] == "42"


def _served(command: list[str], environment: dict[str, str], folder: Path, shown: str) -> Any:
    """What a server that is started so answers. shown: what it says at its start."""
    server = subprocess.Popen(
        [*command, "--port", "0"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        lines: list[str] = []
        while not (found := URL.search(lines[-1] if lines else "")):
            line = server.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        assert shown in "".join(lines)
        question = {"role": "user", "content": "What is 17 + 25?"}
        body = json.dumps({"messages": [question], "max_tokens": 200, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{found[1]}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            whole = json.load(answer)
        assert whole["model"] == "penstock-demo"
        return whole
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_an_editable_install_is_a_path_that_type_checkers_can_follow(tmp_path: Path) -> None:
    """An import hook in its place would hide the package from mypy and pyright."""
    code = "from setuptools import build_meta; import sys; build_meta.build_editable(sys.argv[1])"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    for name in ("penstock", "services", "protocol"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=LEFT_OUT)
    for name in ("kernels", "loadtest", "demo"):  # where the links of the package lead
        (source / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=source, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    (path,) = [name for name in held.namelist() if name.endswith(".pth")]
    assert held.read(path).decode().strip() == str(source)
    assert not [name for name in held.namelist() if name.endswith("finder.py")]

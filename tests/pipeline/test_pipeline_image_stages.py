"""The commands of the Dockerfile's stages, run in a clean folder in place of an image's root.

What stays untested is the base image, users and volumes: that needs a Docker engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.pipeline.compose_file import ROOT, copies, in_build_context, read_dockerfile

from penstock.protocol.process.state_file import StateFile

STAGES = read_dockerfile()
HEAVY = {"torch", "transformers", "tokenizers", "numpy", "llguidance"}
LIGHT = ("router", "scheduler", "frontend")
ROLES = (*LIGHT, "tokenizer", "worker-cpu")
WITH_MODEL = "wheel-with-model"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"
"""Another index than that of the machine, which may reach none but its own."""


class Root:
    """A folder in which a stage's /src, /opt/penstock and /wheels lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "opt", "wheels"):
            (folder / name).mkdir()
        tools = folder / "tools"
        subprocess.run([sys.executable, "-m", "venv", tools], check=True, timeout=120)
        self.path = f"{tools}/bin:/usr/bin:/bin"

    def copy(self, stage: str) -> None:
        for copied in copies(STAGES[stage]):
            for source in () if copied.stage else copied.sources:
                assert in_build_context(source.removeprefix("./")), source
                to = self.folder / "src" / source
                to.parent.mkdir(exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, to, symlinks=True, ignore=LEFT_OUT)
                else:
                    shutil.copyfile(ROOT / source, to)

    def run(self, stage: str, **arguments: str) -> None:
        """Copies what the stage copies, and runs its commands as a shell in it does."""
        self.copy(stage)
        for text in STAGES[stage].all("RUN"):
            command = re.sub(r"--mount=\S+ ", "", text).replace(CPU_INDEX, "")
            command = re.sub(r"(?<=[\s/])/?(opt/penstock|wheels)\b", rf"{self.folder}/\1", command)
            done = subprocess.run(
                ["sh", "-ec", command],
                cwd=self.folder / "src",
                env={**os.environ, **arguments, "PATH": self.path},
                capture_output=True,
                text=True,
                timeout=900,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def site_packages(root: Root) -> Path:
    (site,) = (root.folder / "opt/penstock/lib").glob("python3*/site-packages")
    return site


def packages(root: Root) -> set[str]:
    site = site_packages(root)
    return {re.split(r"-\d", path.name)[0].lower() for path in site.glob("*.dist-info")}


def test_the_bases_are_pinned_to_a_release() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (version,) = re.findall(r"^ARG PYTHON_VERSION=(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"3\.\d+\.\d+", version)
    bases = {stage.base for stage in STAGES.values()} - STAGES.keys()
    assert bases == {"python:${PYTHON_VERSION}-slim-bookworm"}


def test_the_wheels_of_the_images_hold_no_load_tests_and_no_training() -> None:
    plain, with_model = copies(STAGES["wheel"]), copies(STAGES[WITH_MODEL])
    copied = {source for one in (*plain, *with_model) for source in one.sources}
    assert not copied & {"loadtest", "demo", "."}
    assert "demo/model" in copied
    for source in ("loadtest", "demo", "demo/training/train.py"):
        assert not in_build_context(source), source


@pytest.mark.parametrize("role", [*ROLES, "worker-cuda"])
def test_each_image_knows_whether_its_process_is_well(role: str, tmp_path: Path) -> None:
    """The check of the image looks at the file that the process touches."""
    found = STAGES[role].all("HEALTHCHECK") or STAGES["runtime"].all("HEALTHCHECK")
    options, _, command = found[-1].partition(" CMD ")
    assert all(f"--{name}=" in options for name in ("interval", "timeout", "retries"))
    (path,) = re.findall(r"PENSTOCK_STATE_FILE=(\S+)", STAGES["runtime"].all("ENV")[0])
    assert path in command
    own = tmp_path / "state"

    def code() -> int:
        return subprocess.run(["sh", "-c", command.replace(path, str(own))], timeout=60).returncode

    assert code() == 1
    state = StateFile(str(own), "loading")
    assert code() == 0
    patience = 150 if role.startswith("worker") else 10  # a step may take two minutes
    told = time.time() - patience
    os.utime(own, (told + 5, told + 5))
    assert code() == 0
    os.utime(own, (told - 1, told - 1))
    assert code() == 1
    state.tell("ready", time.monotonic())
    assert code() == 0


@pytest.mark.slow  # it installs the packages of a role
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", ROLES)
def test_the_commands_of_a_role_install_what_its_process_needs_and_no_more(
    role: str, tmp_path: Path
) -> None:
    root = Root(tmp_path)
    root.run("tools")
    root.run("wheel")
    if WITH_MODEL in [copied.stage for copied in copies(STAGES[f"{role}-packages"])]:
        root.run(WITH_MODEL)
    torch = re.findall(r"^ARG TORCH=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0]
    root.run(f"{role}-packages", TORCH=torch, FRONTEND_PACKAGES="")
    installed = packages(root)
    assert "penstock" in installed
    assert not installed & {"pytest", "mypy", "openai", "pip"}
    assert role not in LIGHT or not installed & HEAVY
    own = site_packages(root) / "penstock"
    assert not (own / "loadtest").exists()
    kept = {path.parent.name for path in (own / "demo").rglob("*") if path.is_file()}
    assert kept == (set() if role in ("router", "frontend") else {"model"})
    process = role.partition("-")[0]
    done = subprocess.run(
        [tmp_path / "opt/penstock/bin/penstock", process, "--show-config"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PENSTOCK_ROUTER": "tcp://router:1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    imports = f"import penstock.services.{process}.service"
    python = tmp_path / "opt/penstock/bin/python"
    done = subprocess.run(
        [python, "-c", imports], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

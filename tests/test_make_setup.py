"""`make setup` with a pip that downloads nothing: what it says, and which torch it asks for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = """#!/bin/sh
case "$*" in
  *"version_info"*) exit 0 ;;
  *"pip install"*)
    echo "$@" >> "$LOG"
    echo "  Downloading torch-2.13.0-cp311-manylinux_2_28.whl.metadata (31 kB)"
    case "$*" in
      *torch==*)
        echo "  Downloading torch-2.13.0-cp311-manylinux_2_28.whl (899.7 MB)"
        echo "  Downloading nvidia_cublas-13.0-py3-none-manylinux_2_27.whl (1.2 GB)" ;;
      *)
        echo "Using cached aiohttp-3.14.2-cp311.whl (1.8 MB)"
        echo "Downloading numpy-2.4.0-cp311.whl (16.9 MB)"
        echo "Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)" ;;
    esac
    exit ${PIP_ENDS:-0} ;;
  *torch.version*) echo "$BUILD" ;;
esac
"""


def set_up(folder: Path, *, gpu: str = "", build: str = "", **more: str) -> tuple[int, str, str]:
    """Exit code, what was printed, and what pip was called with. gpu: its name, if there is one;
    build: the version of CUDA that the installed torch was built for."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    programs, own = folder / "programs", folder / ".venv/bin"
    programs.mkdir()
    own.mkdir(parents=True)
    tool = f'#!/bin/sh\necho "{gpu}"\n' if gpu else "#!/bin/sh\nexit 9\n"
    for path, text in ((own / "python", PYTHON), (programs / "nvidia-smi", tool)):
        path.write_text(text)
        path.chmod(0o755)
    (programs / "python3").symlink_to(own / "python")
    log = folder / "log"
    done = subprocess.run(
        ["make", "--no-print-directory", "setup"],
        cwd=folder,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "LOG": str(log),
            "BUILD": build,
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, log.read_text()


def test_it_says_what_is_downloaded_and_how_much(tmp_path: Path) -> None:
    code, said, asked = set_up(tmp_path, build="13.0")
    assert code == 0, said
    assert "torch-2.13.0-cp311-manylinux_2_28.whl (899.7 MB)" in said
    assert "nvidia_cublas-13.0-py3-none-manylinux_2_27.whl (1.2 GB)" in said
    assert "2.1 GB downloaded" in said
    assert "17 MB downloaded" in said
    assert "six" not in said  # small ones are only counted
    assert "metadata" not in said
    assert asked.count("pip install") == 2
    assert asked.splitlines()[0].endswith("torch==2.13.0 triton==3.7.1")


def test_on_a_machine_with_a_gpu_it_says_that_torch_uses_it(tmp_path: Path) -> None:
    code, said, _ = set_up(tmp_path, gpu="NVIDIA H100 80GB HBM3", build="13.0")
    assert code == 0, said
    assert "NVIDIA H100 80GB HBM3" in said
    assert "torch is built for CUDA 13.0 and uses it" in said


def test_a_torch_that_does_not_use_the_gpu_is_named_with_the_remedy(tmp_path: Path) -> None:
    code, said, _ = set_up(tmp_path, gpu="NVIDIA GH200 480GB", build="")
    assert code == 0, said
    assert "torch is built for CPUs and does not use the NVIDIA GH200 480GB" in said
    assert "make setup TORCH=" in said


def test_without_a_gpu_it_says_which_build_would_be_smaller(tmp_path: Path) -> None:
    _, said, _ = set_up(tmp_path, build="13.0")
    assert "no NVIDIA GPU" in said
    assert "TORCH=" in said


def test_an_installation_that_fails_is_no_success(tmp_path: Path) -> None:
    code, _, _ = set_up(tmp_path, PIP_ENDS="1")
    assert code != 0
    assert not (tmp_path / ".venv/.installed").exists()


if shutil.which("make") is None:
    pytest.skip("there is no make", allow_module_level=True)

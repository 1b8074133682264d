"""docs/start.md and the README's two commands, in a fresh copy and a clean environment; as root on
Linux in a root of their own, with the system, a Python, the copy and nothing else in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.polling import until
from test_readme import free_port

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/start.md").read_text()
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall(PAGE)
KEPT = re.compile(r"PIP_|.*_proxy$|SSL_CERT", re.IGNORECASE)
"""How a machine reaches its package index."""


def test_the_page_begins_with_the_command_that_serves_and_ends_with_the_one_that_stops() -> None:
    commands = [text.strip() for kind, text in BLOCKS if kind == "sh"]
    assert commands[0] == "make serve"
    assert commands[-1] == ".venv/bin/penstock stop"
    assert {kind for kind, _ in BLOCKS} == {"sh", "text", "python"}


def test_json_of_the_page_can_be_read() -> None:
    for kind, text in BLOCKS:
        if kind == "sh" and " -d " in text:
            words = shlex.split(text)
            assert json.loads(words[words.index("-d") + 1])["temperature"] == 0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files of the repository, without anything that was made of them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("needs git, which knows the files of the repository")
    folder = tmp_path / "penstock"
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(ROOT / name):
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Sockets lie in it, and the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="start-", dir="/tmp") as folder:
        yield folder


def clean_environment(tmp_path: Path, temporary: str, port: int) -> dict[str, str]:
    """That of a user who has just logged in. The port stands for 8000, which may be taken."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
    index = Path.home() / ".config/pip/pip.conf"
    if index.exists():
        kept["PIP_CONFIG_FILE"] = str(index)
    python = Path(sys.base_prefix) / "bin"
    return {
        **kept,
        "HOME": str(home),
        "TMPDIR": temporary,
        "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin",
        "PENSTOCK_PORT": str(port),
        "LANG": "C.UTF-8",
    }


ENTER = """
set -e
mount -t tmpfs none "$0"
while [ "$1" != -- ]; do
    if [ -L "$1" ]; then cp -P "$1" "$0$1"
    elif [ -d "$1" ]; then mkdir -p "$0$1"; mount --rbind "$1" "$0$1"
    elif [ -e "$1" ]; then mkdir -p "$(dirname "$0$1")"; touch "$0$1"; mount --bind "$1" "$0$1"
    fi
    shift
done
exec /usr/sbin/chroot "$0" "${@:2}"
"""
"""$0: an empty folder; then what is seen in it under the same names, ``--``, and a command."""


def in_own_root(tmp_path: Path, seen: Sequence[str]) -> list[str]:
    """What stands before a command, so that it sees the system, these paths and nothing else;
    nothing where only root might do that."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        return []
    root = tmp_path / "root"
    root.mkdir()
    system = [
        f"/{name}" for name in ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "sbin", "usr")
    ]
    return ["unshare", "--mount", "bash", "-c", ENTER, str(root), *system, *seen, "--"]


@contextmanager
def first_terminal(
    command: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[list[str]]:
    """Runs what serves, and yields a list that has its log at the end."""
    log = folder.parent / "log"
    with open(log, "w") as file:
        server = subprocess.Popen(
            command,
            cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def ready() -> bool:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            address = f"http://127.0.0.1:{environment['PENSTOCK_PORT']}/ready"
            with urllib.request.urlopen(address, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        until(ready, 1500, told=lambda: log.read_text()[-4000:])
        lines: list[str] = []
        yield lines
        assert server.wait(60) == 0, log.read_text()[-4000:]
        lines += log.read_text().splitlines()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.mark.slow  # it installs everything
@pytest.mark.timeout(3000)
def test_each_command_of_the_page_works_in_a_fresh_copy(
    copy: Path, tmp_path: Path, short_folder: str
) -> None:
    port = free_port()
    environment = clean_environment(tmp_path, short_folder, port)
    seen = [str(copy), environment["HOME"], short_folder, sys.base_prefix]
    enter = in_own_root(tmp_path, [*seen, environment.get("PIP_CONFIG_FILE", "")])
    if enter:
        enter += ["env", "--chdir", str(copy)]

    def run(*command: str) -> str:
        done = subprocess.run(
            [*enter, *command],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    said = []
    with first_terminal([*enter, "bash", "-c", BLOCKS[0][1]], copy, environment) as log:
        for kind, text in BLOCKS[1:]:
            here = text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            if kind == "sh":
                for command in re.split(r"\n(?=[.c])", here.strip()):
                    said.append(run("bash", "-c", command))
            elif kind == "python":
                (copy / "hello.py").write_text(here)
                said.append(run(".venv/bin/python", "hello.py"))
            elif "Penstock is ready" not in text:
                assert said[-1] == text
    assert json.loads(said[1])["choices"][0]["message"]["content"] == "42"
    assert "Hello" in said[2]
    (promised,) = re.findall(r"The content of the answer is `(.*?)`", PAGE)
    assert json.loads(said[3])["choices"][0]["message"]["content"] == promised
    assert "penstock-demo" in said[4] and "penstock_" in said[5]
    assert any("serving" in line or "ready" in line for line in log)
    if enter:
        run("test", "!", "-e", str(ROOT))
    # The README's second command, with one file of the tests in place of all.
    assert "passed" in run("make", "test", "ARGS=-n 0 -v tests/test_configuration_page.py")

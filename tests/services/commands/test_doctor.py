"""``penstock doctor``: what it finds on this machine, and what it says would not work."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands.command_run import call, environment, run
from support.pipeline.served import Served

from penstock import __version__
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.terminal import style_of
from penstock.protocol.process import limited_process, running_servers
from penstock.services.commands.doctor import hardware, places, smoke, software
from penstock.services.commands.doctor.finding import Finding, Section, as_text, verdict
from penstock.services.commands.doctor.hardware import (
    Probe,
    Product,
    _Device,
    _read,
    gpus,
    probed,
    processor,
)
from penstock.services.commands.doctor.limits import limits
from penstock.services.commands.doctor.smoke import _judged

ROOT = Path(__file__).resolve().parents[3]

QUICK = ("--smoke-test", "none", "--port", "0")
GIB = 1 << 30


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The findings of a report in JSON, by their names."""
    report = json.loads(done.stdout)
    return {one["name"]: one for section in report["sections"] for one in section["findings"]}


@pytest.mark.parametrize("device", ["null", pytest.param("cpu", marks=pytest.mark.slow)])
def test_where_all_is_well_a_server_starts_and_answers_and_the_report_says_so(
    short_folder: Path, device: str
) -> None:
    done = run(
        "doctor", "--json", "--smoke-test", device, "--port", "0",
        timeout=240, XDG_RUNTIME_DIR=str(short_folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report, said = json.loads(done.stdout), found(done)
    assert (report["ok"], report["problems"]) == (True, 0)
    titles = [section["title"] for section in report["sections"]]
    assert titles == ["Software", "Machine", "Limits", "Places", "Smoke test"]
    assert said["penstock"]["value"].startswith(f"{__version__} in ")
    for package in ("torch", "pyzmq", "msgspec"):
        assert importlib.metadata.version(package) in said[package]["value"]
    assert "ready after" in said[f"server on {device}"]["value"]
    assert "tokens after" in said["answer"]["value"]
    assert not list(short_folder.glob("penstock-serve-*"))  # it has ended


def test_the_report_is_text_that_can_be_pasted_and_holds_no_secret() -> None:
    done = run("doctor", *QUICK, PENSTOCK_API_KEY="sk-hidden", https_proxy="http://u:pw@proxy")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "Software"
    assert {"Machine", "Limits", "Places"} <= set(lines)
    assert "PENSTOCK_API_KEY" in done.stdout
    assert "https_proxy" in done.stdout
    assert not [word for word in ("sk-hidden", "pw@proxy", "\x1b") if word in done.stdout]
    assert lines[-1].startswith("Nothing was found that would keep a server from working")


@pytest.mark.usefixtures("no_probe")
def test_paths_are_told_without_the_users_home_whoever_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "alice"
    (home / "models").mkdir(parents=True)
    linked = tmp_path / "link"
    linked.symlink_to(home)
    monkeypatch.setenv("HOME", str(linked))
    settings = {
        "LD_PRELOAD": f"{linked}/lib/libjemalloc.so:{home}/other.so:{home}s/third.so",
        "PENSTOCK_PORT": str(home / "x"),
        "HF_HOME": str(linked / "models"),
    }
    for flags in ((), ("--json",)):
        done = call("doctor", *QUICK, *flags, **settings)
        assert done.returncode == 1, done.stderr
        assert f"~/lib/libjemalloc.so:~/other.so:{home}s/third.so" in done.stdout
        assert "'~/x'" in done.stdout  # by the refusal of that setting
        assert "~/models/hub" in done.stdout
        left = done.stdout.replace(f"{home}s/", "")
        assert (str(linked) in left, str(home) in left) == (False, False)


@pytest.mark.usefixtures("no_probe")
def test_a_port_that_another_program_has_is_a_problem_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        done = call("doctor", "--smoke-test", "none", "--port", str(number))
    assert done.returncode == 1
    assert f"x port {number}" in done.stdout
    assert "-> stop what listens there" in done.stdout
    assert "1 problem (x) would keep a server from working" in done.stdout


@pytest.mark.usefixtures("no_probe")
def test_the_port_of_grpc_is_looked_at_where_a_server_would_serve_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        done = call("doctor", "--json", *QUICK, PENSTOCK_GRPC_PORT=number)
    assert done.returncode == 1
    said = found(done)
    assert (said["port 0"]["state"], said[f"port {number}"]["state"]) == ("ok", "problem")


@pytest.mark.usefixtures("no_probe")
def test_the_port_of_the_users_own_server_is_no_problem(server: Served) -> None:
    place = str(Path(server.router.removeprefix("ipc://")).parent.parent)
    number = server.url.rpartition(":")[2]
    done = call("doctor", "--json", "--smoke-test", "none", "--port", number, XDG_RUNTIME_DIR=place)
    assert done.returncode == 0, done.stdout
    assert found(done)[f"port {number}"]["value"] == f"a server of yours listens at {server.url}"


def test_too_few_open_files_are_a_problem() -> None:
    command = [sys.executable, "-m", "penstock.services", "doctor", *QUICK]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 200 && exec "$@"', "bash", *command],
        capture_output=True, text=True, timeout=60, env=environment(),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "200, at most 200" in done.stdout
    assert "LimitNOFILE=" in done.stdout


@pytest.mark.usefixtures("no_probe")
def test_a_wrong_setting_of_the_environment_is_named_as_serve_names_it() -> None:
    done = call("doctor", "--json", *QUICK, PENSTOCK_PROT="8000")
    assert done.returncode == 1
    problems = [
        one["value"]
        for section in json.loads(done.stdout)["sections"]
        for one in section["findings"]
        if one["state"] == "problem"
    ]
    assert len(problems) == 1
    assert "PENSTOCK_PROT" in problems[0]


def test_a_server_that_cannot_start_is_a_problem_in_its_own_words(tmp_path: Path) -> None:
    far = tmp_path / ("long" * 25)
    far.mkdir()
    done = run(
        "doctor", "--json", "--smoke-test", "null", "--port", "0",
        timeout=240, XDG_RUNTIME_DIR=str(far),
    )  # fmt: skip
    assert done.returncode == 1
    said = found(done)
    assert said["sockets"]["state"] == "problem"
    assert "XDG_RUNTIME_DIR" in said["sockets"]["remedy"]
    assert said["server on null"]["state"] == "problem"
    assert "`penstock serve` ended with" in said["server on null"]["value"]


@pytest.mark.usefixtures("no_probe")
def test_a_folder_of_models_that_cannot_be_made_is_a_problem() -> None:
    done = call("doctor", "--json", *QUICK, HF_HOME="/dev/null/models")
    assert done.returncode == 1
    assert found(done)["models"]["state"] == "problem"
    assert "HF_HOME" in found(done)["models"]["remedy"]


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is not asked."""
    monkeypatch.setattr(hardware, "probed", lambda _: Probe("2.13.0+cpu", None, None, 8, []))


@pytest.mark.usefixtures("no_probe")
def test_without_a_folder_for_temporary_files_the_report_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    for module in (places, running_servers):
        monkeypatch.setattr(module, "tempfile", SimpleNamespace(gettempdir=full))
    done = call("doctor", "--json", *QUICK, XDG_RUNTIME_DIR="", HF_HOME="/tmp")
    assert done.returncode == 1, done.stderr
    said = found(done)
    for name in ("sockets", "temporary files"):
        assert said[name]["state"] == "problem"
        assert "No usable temporary directory" in said[name]["value"]
        assert "TMPDIR" in said[name]["remedy"]
    assert (said["port 0"]["state"], said["models"]["state"]) == ("ok", "ok")


@pytest.mark.usefixtures("no_probe")
def test_a_folder_below_one_that_may_not_be_entered_is_a_problem_with_its_remedy() -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from penstock.services.commands.doctor import places\n"
        "os.chmod(sys.argv[1], 0)\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print(places._folder('models', Path(sys.argv[1]) / 'x' / 'hub', 1, 'HF_HOME'))\n"
    )
    with tempfile.TemporaryDirectory() as closed:
        done = subprocess.run(
            [sys.executable, "-c", code, closed], capture_output=True, text=True, timeout=60
        )
        os.chmod(closed, 0o700)
    assert "cannot be written to" in done.stdout, done.stderr
    assert "HF_HOME" in done.stdout


@pytest.mark.usefixtures("no_probe")
def test_a_user_without_a_home_is_told_which_variable_names_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    done = call("doctor", "--json", *QUICK, XDG_CACHE_HOME="", HF_HUB_CACHE="")
    assert done.returncode == 1, done.stderr
    models = found(done)["models"]
    assert (models["state"], models["value"]) == ("problem", "Could not determine home directory.")
    assert "HF_HOME" in models["remedy"]


@pytest.mark.usefixtures("no_probe")
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("no number")])
def test_where_looking_itself_fails_that_is_a_problem_and_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    for module, name in ((hardware, "processor"), (places, "sockets"), (places, "port")):
        monkeypatch.setattr(module, name, broken)
    done = call("doctor", "--json", *QUICK)
    assert done.returncode == 1, done.stderr
    said = found(done)
    words = str(error.args[-1])
    assert [said[name]["value"] for name in ("processor", "sockets", "port")] == [words] * 3
    assert {"open files", "torch", "temporary files"} <= set(said)


def test_at_a_unix_socket_no_port_is_looked_at_unless_one_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        settings = {"PENSTOCK_UDS": str(path)}
        by_port = {one.name: one for one in places.listeners(None, settings)}
        assert {name: one.state for name, one in by_port.items()} == {"UNIX socket": "ok"}
        asked = [*places.listeners(int(number), settings)]
        assert [(one.name, one.state) for one in asked] == [(f"port {number}", "problem")]
        both = [*places.listeners(None, {**settings, "PENSTOCK_GRPC_PORT": number})]
        assert [one.state for one in both] == ["ok", "problem"]


def test_a_unix_socket_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    settings = {"PENSTOCK_GRPC_UDS": str(path), "PENSTOCK_PORT": "0"}
    http, grpc = places.listeners(None, settings)
    assert (http.name, grpc.name, grpc.state) == ("port 0", "UNIX socket", "ok")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        _, left = places.listeners(None, settings)
        assert (left.state, "nobody listens" in left.value) == ("ok", True)
        taken.listen(1)
        _, used = places.listeners(None, settings)
        assert (used.state, "listens there" in used.value) == ("problem", True)
    path.unlink()
    path.write_text("")
    _, file = places.listeners(None, settings)
    assert (file.state, "something else than a socket" in file.value) == ("problem", True)
    missing = {**settings, "PENSTOCK_GRPC_UDS": str(tmp_path / "none" / "grpc.sock")}
    _, absent = places.listeners(None, missing)
    assert (absent.state, "is no folder" in absent.value) == ("problem", True)


def test_the_probe_tells_what_torch_says_of_itself() -> None:
    probe = probed(os.environ)
    assert probe.error == ""
    assert probe.torch.partition("+")[0] == importlib.metadata.version("torch").partition("+")[0]
    assert probe.threads >= 1


def test_a_torch_that_cannot_be_imported_is_a_problem_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: no such file')\n")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    probe = probed({**os.environ, "PYTHONPATH": paths})
    assert "libcudart.so" in probe.error
    (problem,) = gpus(Machine(2, 2, 0), probe)
    assert problem.state == "problem"


H100 = _Device("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB)


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (Probe("2.13.0+cpu", None, "13.0", 8, []), "a build of torch for CUDA"),
        (Probe("2.13.0", "13.0", None, 8, []), "install the NVIDIA driver"),
        (Probe("2.13.0", "13.0", "12.2", 8, []), "the driver does CUDA 12.2"),
        (Probe("2.13.0", "13.0", "13.0", 8, [_Device("P4", (6, 1), GIB, GIB)]), "capability 7.5"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_problem_with_its_remedy(probe: Probe, words: str) -> None:
    probe.products = [Product(0, 0) for _ in probe.devices]
    problems = [one for one in gpus(Machine(8, 4, 1), probe) if one.state == "problem"]
    assert len(problems) == 1
    assert words in problems[0].remedy
    assert "--device cpu" in problems[0].remedy


def test_a_gpu_that_works_is_told_and_one_in_use_is_a_warning(tmp_path: Path) -> None:
    module = tmp_path / "proc/driver/nvidia/version"
    module.parent.mkdir(parents=True)
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    works = Probe("2.13.0", "13.0", "13.0", 8, [H100], "", [Product(0, 0)])
    _, driver, fine, product = gpus(Machine(8, 4, 1), works, tmp_path)
    assert (product.state, product.value) == ("ok", "the same as on the CPU")
    assert driver.value == "580.65.06, for CUDA 13.0 or older"
    assert (fine.state, fine.name) == ("ok", "GPU 0")
    assert "NVIDIA H100, 79.0 GiB free of 80.0 GiB, compute capability 9.0" in fine.value
    used = _Device("NVIDIA H100", (9, 0), 80 * GIB, 8 * GIB)
    *_, busy, _ = gpus(Machine(8, 4, 1), Probe("2.13.0", "13.0", "13.0", 8, [used]))
    assert busy.state == "warning"
    assert "--gpu-memory-utilization" in busy.remedy


FACTS = (
    '{"type":"probe","torch":"2.13.0","built_for":"13.0","driver_cuda":"13.0","threads":8,'
    '"devices":[{"name":"H100","capability":[9,0],"total_bytes":8,"free_bytes":8}]}\n'
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"type":"product","device":0,"wrong":7,"error":""}', "7 entries are not the CPU's"),
        ('{"type":"product","device":0,"wrong":0,"error":"no kernel image"}', "no kernel image"),
        ("a library says something", "none: it took longer than 180 s"),
    ],
)
def test_a_gpu_that_computes_wrongly_or_not_at_all_is_a_problem(line: str, words: str) -> None:
    probe = _read(f"{FACTS}{line}\n", "it took longer than 180 s")
    problems = [one for one in gpus(Machine(8, 4, 1), probe) if one.state == "problem"]
    assert [(one.name, one.value) for one in problems] == [("product on GPU 0", words)]


def with_torch(folder: Path, text: str) -> dict[str, str]:
    """An environment in which ``import torch`` runs this text."""
    (folder / "torch.py").write_text(text)
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": paths}


def test_a_probe_that_cannot_be_ended_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    # As a process that waits in the driver takes it.
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: started.append(process))
    monkeypatch.setattr(limited_process, "END_S", 0.1)
    probe = probed(with_torch(tmp_path, "import time\ntime.sleep(600)\n"), limit_s=0.2)
    (stuck,) = started
    assert stuck.poll() is None
    stuck.send_signal(signal.SIGKILL)
    stuck.communicate()
    assert "it took longer than 0.2 s" in probe.error
    assert f"process {stuck.pid} cannot be ended" in probe.error


def test_words_of_the_probe_that_are_no_text_are_told_as_far_as_they_are(tmp_path: Path) -> None:
    code = "import os\nos.write(2, b'libcuda: \\xff\\n')\nos._exit(3)\n"
    assert "libcuda: \ufffd" in probed(with_torch(tmp_path, code)).error


def test_a_server_that_gets_ready_and_never_answers_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        @contextlib.contextmanager
        def own_server(*_: Any) -> Iterator[str]:
            yield f"http://127.0.0.1:{silent.getsockname()[1]}"

        monkeypatch.setattr("penstock.services.commands.chat.own_server.own_server", own_server)
        monkeypatch.setattr(smoke, "ANSWER_S", 0.2)
        ready, answer = smoke.smoke_test("null", {}, style_of(2, {}))
    assert (ready.state, answer.name, answer.state) == ("ok", "answer", "problem")
    assert "did not answer within 0.2 s" in answer.value


def test_little_memory_and_little_shared_memory_for_several_gpus_are_warnings() -> None:
    memory = {one.name: one for one in processor(Machine(8, 4, 0, free_bytes=GIB))}["memory"]
    assert (memory.state, memory.value.startswith("1.0 GiB free")) == ("warning", True)
    absent = Path("/no/such/folder")
    shared = {one.name: one for one in limits(2, absent)}["shared memory"]
    assert (shared.state, shared.value) == ("warning", f"no {absent}")


@pytest.mark.parametrize(
    ("answer", "device", "state"),
    [
        ({"choices": [{"message": {"content": "42"}}], "usage": {"completion_tokens": 1}},
         "cpu", "ok"),
        ({"choices": [{"message": {"content": "41"}}], "usage": {"completion_tokens": 1}},
         "cpu", "problem"),
        ({"choices": [{"message": {"content": "q"}}], "usage": {"completion_tokens": 1}},
         "null", "ok"),
        ({"choices": []}, "null", "problem"),
    ],
)  # fmt: skip
def test_an_answer_is_judged_where_the_device_computes(
    answer: dict[str, Any], device: str, state: str
) -> None:
    assert _judged(answer, device, 0.1).state == state


def test_a_remedy_stands_below_what_it_is_for() -> None:
    section = Section("Limits", [Finding("a", "b\nc", "problem", "d"), Finding("longer", "e")])
    assert as_text([section]).splitlines() == [
        "Limits", "x a       b", "          c", "          -> d", "  longer  e",
    ]  # fmt: skip
    assert verdict([section]).startswith("1 problem (x)")


def test_every_extra_that_a_server_may_need_is_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"].keys() - {"dev", "docs", "limits"}
    assert set(software.EXTRAS.values()) == needed
    for package, extra in software.EXTRAS.items():
        names = [re.split("[<>=]", one)[0] for one in project["optional-dependencies"][extra]]
        assert package in names

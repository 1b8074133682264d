"""Every command of the README does what the README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from penstock.demo.grading import ALL_SKILLS
from penstock.loadtest.evaluation.eval import NUM_QUESTIONS
from penstock.loadtest.models.make_model import make_model
from penstock.protocol.config import ServerConfig
from penstock.protocol.declared import describe, description_of, fields_of
from penstock.protocol.sampling import PARAMETERS
from penstock.services.frontend.bodies.openai_responses import ResponsesBody
from penstock.services.frontend.bodies.requests import ChatBody, CompletionBody

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
KNOWN = {
    "make serve",
    "make test",
    "make serve MODEL=/path/to/hf-folder",
    ".venv/bin/penstock eval",
    ".venv/bin/penstock serve /path/to/one /path/to/another",
    ".venv/bin/penstock serve --help",
    ".venv/bin/penstock serve --max-num-seqs 128 --show-config",
    'PATH="$PWD/.venv/bin:$PATH" honcho -f procfile start',
    ".venv/bin/penstock tokenizer --router ipc:///tmp/penstock-serve-…/router.sock",
    ".venv/bin/python -m penstock.loadtest.studies.pipeline_cost",
    ".venv/bin/penstock bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 "
    "--max-concurrency 16 --random-input-len 64 --random-output-len 32 --ignore-eos",
}
ONE_THREAD = {"PENSTOCK_THREADS": "1"}
"""For whoever computes on the CPU beside other tests."""
pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv/bin/penstock").exists(), reason="needs the .venv that `make setup` makes"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(beginning: str) -> str:
    return next(c.strip() for c in COMMANDS if c.startswith(beginning))


class Running:
    """A command that serves until it is told to stop."""

    def __init__(self, text: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            ["bash", "-c", "exec " + text if "=" not in text.split()[0] else text],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def wait_ready(self, port: int) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.stop()
        raise AssertionError(f"not ready: {self.output}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.output = self.process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.output = self.process.communicate()[0]


def test_every_command_of_the_readme_is_known_here() -> None:
    found = {c.strip() for c in COMMANDS if not c.startswith("curl")}
    assert found == KNOWN


def test_make_serve_and_the_clients_of_the_readme() -> None:
    port = free_port()
    server = Running(f"{command('make serve')} ARGS='--port {port} --device null'")
    try:
        server.wait_ready(port)
        curl = command("curl").replace(":8000", f":{port}")
        answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
        assert "data: [DONE]" in answer.stdout
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
            assert b"<title>Penstock</title>" in page.read()
        program = PYTHON[0].replace(":8000", f":{port}")
        done = subprocess.run(
            [ROOT / ".venv/bin/python", "-c", program], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
        load = command(".venv/bin/penstock bench serve").replace(":8000", f":{port}")
        fewer = [*load.split(), "--num-prompts", "20"]
        done = subprocess.run(fewer, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Failed requests:                                       0" in done.stdout
    finally:
        server.stop()


def test_the_library_example_prints_what_the_readme_says() -> None:
    done = subprocess.run(
        [ROOT / ".venv/bin/python", "-c", PYTHON[1]],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = README[README.index(PYTHON[1]) :]
    assert done.stdout == re.findall(r"```text\n(.*?)```", said, re.DOTALL)[0]


def test_make_serve_takes_a_folder(tmp_path: Path) -> None:
    """The folder and the flags reach the command of the tests beside this one, which serves."""
    folder = make_model(tmp_path / "own-model")
    text = command("make serve MODEL=").replace("/path/to/hf-folder", str(folder))
    done = subprocess.run(
        ["bash", "-c", f"{text} ARGS='--device null --show-config'"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f'\nmodel = "{folder}"  # flag --model' in done.stdout
    assert '\nserved_model_name = ["own-model"]' in done.stdout
    assert '\ndevice = "null"  # flag --device' in done.stdout


def test_two_models_reach_the_command(tmp_path: Path) -> None:
    one, another = make_model(tmp_path / "one"), make_model(tmp_path / "another")
    text = command(".venv/bin/penstock serve /path/to/one")
    text = text.replace("/path/to/another", str(another)).replace("/path/to/one", str(one))
    done = subprocess.run(
        [*text.split(), "--device", "null", "--show-config"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(one) in done.stdout and str(another) in done.stdout


@pytest.mark.slow  # the tests of several models have such a server in the quick run
def test_two_models_share_one_server(tmp_path: Path) -> None:
    one, another = make_model(tmp_path / "one"), make_model(tmp_path / "another")
    port = free_port()
    text = command(".venv/bin/penstock serve /path/to/one")
    text = text.replace("/path/to/another", str(another)).replace("/path/to/one", str(one))
    server = Running(f"{text} --port {port} --device null")
    try:
        server.wait_ready(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["one", "another"]
    finally:
        server.stop()


@pytest.mark.parametrize("beginning", [".venv/bin/penstock serve --"])
def test_the_help_and_the_settings_are_printed(beginning: str) -> None:
    for text in (c.strip() for c in COMMANDS if c.startswith(beginning)):
        done = subprocess.run(text.split(), cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "max-num-seqs" in done.stdout or "max_num_seqs = 128" in done.stdout


def ready_tokenizers(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/playground/status", timeout=60) as answer:
        processes = json.load(answer)["processes"]
    return sum(p["service"] == "tokenizer" and p["phase"] == "ready" for p in processes)


def test_the_procfile_serves_and_another_tokenizer_joins(tmp_path: Path) -> None:
    port = free_port()
    runtime = tmp_path / "run"
    router = f"ipc://{runtime}/router.sock"
    environment = {
        "PENSTOCK_ROUTER": router,
        "PENSTOCK_PORT": str(port),
        "PENSTOCK_DEVICE": "null",
    }
    server = Running(command("PATH="), environment)
    try:
        server.wait_ready(port)
        joiner = re.sub(r"ipc://\S+", router, command(".venv/bin/penstock tokenizer"))
        other = Running(joiner)
        deadline = time.monotonic() + 90
        while ready_tokenizers(port) < 2:
            assert other.process.poll() is None
            assert time.monotonic() < deadline, "it did not join"
            time.sleep(0.1)
        other.stop()
        assert other.process.returncode == 0, other.output
    finally:
        server.stop()
    assert "Traceback" not in server.output
    assert not list(runtime.glob("*.sock"))
    shutil.rmtree(runtime, ignore_errors=True)


def evaluated(*flags: str, of_each_skill: int) -> None:
    text = command(".venv/bin/penstock eval")
    done = subprocess.run(
        [*text.split(), *flags, "--quiet", "--num-questions", str(of_each_skill)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    skills = len(done.stdout.splitlines()) - 3  # its head, the sum, and the time
    asked = re.search(r"^all +(\d+)", done.stdout, re.MULTILINE)
    assert asked is not None
    assert int(asked[1]) == of_each_skill * skills
    assert skills == len(ALL_SKILLS)


def test_the_readme_says_how_many_questions_an_evaluation_has() -> None:
    assert f"asks it {NUM_QUESTIONS * len(ALL_SKILLS)} questions" in README
    assert f"each of its {len(ALL_SKILLS)} skills" in README


@pytest.mark.slow  # the tests of evaluations call the command in the quick run
def test_the_evaluation_of_the_readme_asks_as_many_questions_as_it_says() -> None:
    evaluated("--device", "null", of_each_skill=1)


@pytest.mark.timeout(300)
@pytest.mark.slow  # the tests of the demo ask the model itself in the quick run
def test_the_evaluation_of_the_readme_finds_the_built_in_model_right() -> None:
    evaluated("--threads", "1", "--require", "0.95", of_each_skill=NUM_QUESTIONS)


def test_every_page_and_picture_that_the_readme_names_is_there() -> None:
    pages = set(re.findall(r"(?:docs|demo)/[\w./-]+\.(?:md|png)", README))
    assert {
        "docs/operations.md",
        "docs/playground.md",
        "docs/demo-model.md",
        "docs/cpu.md",
    } <= pages
    assert [page for page in pages if not (ROOT / page).is_file()] == []
    assert all((ROOT / page).stat().st_size < 200_000 for page in pages)


def test_the_address_of_the_readme_serves_the_page() -> None:
    assert "Open http://127.0.0.1:8000/ in a browser" in README
    assert ServerConfig().host == "127.0.0.1"
    assert ServerConfig().port == 8000


def test_the_pipeline_cost_command_prints_figures() -> None:
    text = command(".venv/bin/python -m penstock.loadtest.studies.pipeline_cost")
    done = subprocess.run(
        [*text.split(), "--streams", "8", "--tokens", "40", "--step-ms", "1", "--frontends", "1",
         "--idle-seconds", "0.2"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"cpu_us_per_token"' in done.stdout


def test_the_api_page_lists_every_field_of_a_body_with_what_is_allowed() -> None:
    page = (ROOT / "docs/api.md").read_text()
    fields = {**fields_of(ChatBody), **fields_of(CompletionBody)}
    fields["parallel_tool_calls"] = fields_of(ChatBody)["parallel_tool_calls"]
    for name, of in fields.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        default, *_ = row.split(" | ")[1:2] if name in PARAMETERS else ("",)
        shown = [f"| `{name}`", default, describe(of), f"{description_of(of)} |"]
        assert row == " | ".join(filter(None, shown))


def test_the_page_of_the_responses_api_lists_every_field_of_its_body() -> None:
    page = (ROOT / "docs/responses.md").read_text()
    for name, of in fields_of(ResponsesBody).items():
        if name in PARAMETERS:
            assert f"`{name}`" in page
            continue
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        assert row == f"| `{name}` | {describe(of)} | {description_of(of)} |"


def test_the_readme_names_the_python_that_is_needed() -> None:
    assert sys.version_info >= (3, 11)
    assert "Python 3.11 or newer" in README

"""The command ``penstock``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.pipeline.in_process import called

import penstock
from penstock.protocol.config.machine import read_machine
from penstock.services import cli
from penstock.services.command_table import HEADINGS

HEAVY = {
    *("torch", "transformers", "aiohttp", "zmq", "tokenizers", "numpy", "structlog"),
    *("huggingface_hub", "rich", "prompt_toolkit", "markdown_it"),
}
MAIN = "import sys; from penstock.services.cli import main; code = main(sys.argv[1:]); "


def clean_environment(**more: str) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith("PENSTOCK_")}
    return {**kept, **more}


def penstock_command(
    *arguments: str, timeout: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.services", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=clean_environment(**environment),
    )


MOST_CALLS = 280_000
"""Functions that a help may call, those of its imports among them: of Python and of C."""
LIGHT = [
    "chat", "complete", "embed", "models", "keys", "status", "stop", "pull", "list", "rm",
    "completion", "doctor", "plan", "warm",
]  # fmt: skip


WITH_HELP = ["", *cli.COMMANDS, *LIGHT]
HELPS = """
import json, os, sys

count = 0
def see(frame, event, argument):
    global count
    count += event in ("call", "c_call")
sys.setprofile(see)
from penstock.services.cli import main

heavy, commands = map(json.loads, sys.argv[1:])
helps = {}
for command in commands:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(writer, 1)
        code = main([part for part in (command, "--help") if part])
        sys.setprofile(None)
        print(count, set(heavy) & sys.modules.keys(), code, flush=True)
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        helps[command] = said.read()
    os.waitpid(child, 0)
print(json.dumps(helps))
"""


@functools.cache
def helps() -> dict[str, str]:
    """What each help says, and then what it has cost. What all of them begin with is imported
    once: each goes on from there in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", HELPS, json.dumps(sorted(HEAVY)), json.dumps(WITH_HELP)],
        capture_output=True, text=True, timeout=60, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", WITH_HELP)
def test_cli_help_is_quick_and_imports_nothing_heavy(command: str) -> None:
    said = helps()[command]
    calls, rest = said.splitlines()[-1].split(" ", 1)
    assert said.startswith(f"usage: penstock {command}".rstrip())
    assert rest == "set() 0"
    assert 10_000 < int(calls) < MOST_CALLS


def test_cli_every_command_stands_below_one_heading() -> None:
    listed = [name for names in HEADINGS.values() for name in names]
    assert sorted(listed) == sorted([*cli.COMMANDS, *cli.TOOLS])


@pytest.mark.parametrize("command", ["", *cli.COMMANDS, *cli.TOOLS])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_cli_no_line_of_any_help_is_wider_than_80_columns(
    command: str,
    flag: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command in ("version", *(set(cli.TOOLS) - {"plan", "warm"})) and flag == "--help-all":
        return  # they have one help
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        cli.main([*filter(None, (command, flag))])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "--null-step-ms" not in shown
    if flag == "--help" and command in ("", *cli.COMMANDS, "plan", "warm"):
        assert len(lines) <= 40


def test_cli_help_all_tells_what_help_leaves_out() -> None:
    short, whole = (called("serve", flag).stdout for flag in ("--help", "--help-all"))
    assert "--port VALUE" in short
    assert "--help-all` shows all flags" in short
    assert "--block-size" not in short
    assert "--block-size {8,16,32,64}" in whole
    assert "(PENSTOCK_BLOCK_SIZE)" in whole


def test_cli_help_lists_every_command() -> None:
    text = called("--help").stdout
    assert all(f"\n  {name} " in text for name in [*cli.COMMANDS, *cli.TOOLS])


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["-V"]])
def test_cli_version_is_the_packages(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_cli_an_unknown_command_names_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["sevre"]) == 2
    text = capsys.readouterr().err
    assert "'sevre'" in text
    assert "serve, router, tokenizer, scheduler, worker, keeper, holder, frontend, version" in text


def test_cli_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, shown in (
        (["help"], "Run a server:"),
        (["help", "serve"], "usage: penstock serve [MODEL"),
        (["help", "chat"], "usage: penstock chat "),
    ):
        assert cli.main(arguments) == 0
        assert shown in capsys.readouterr().out


def test_cli_an_empty_model_is_not_the_built_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([""], ["--port", "1", ""], ["/models/a", ""]):
        assert cli.main(["serve", *arguments, "--show-config"]) == 2
        assert "MODEL is empty" in capsys.readouterr().err


def test_cli_without_a_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "Run a server:" in capsys.readouterr().err


def test_cli_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["router", "--max-num-seqs", "3"]) == 2
    assert "--max-num-seqs" in capsys.readouterr().err


def test_cli_every_wrong_setting_is_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PROT", "8000")
    assert cli.main(["serve", "--port", "70000", "--block-size", "17"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("penstock: ") for line in lines)
    for name in ("PENSTOCK_PROT", "--port", "--block-size"):
        assert sum(name in line for line in lines) == 1


def test_cli_show_config_says_where_each_value_is_from_and_hides_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "correct horse battery staple")
    assert cli.main(["serve", "/models/x", "--port", "8001", "--show-config"]) == 0
    text = capsys.readouterr().out
    assert 'model = "/models/x"  # flag --model' in text
    assert "port = 8001  # flag --port" in text
    assert 'host = "127.0.0.1"  # default' in text
    assert "horse" not in text


def test_cli_processes_started_by_hand_meet_at_one_address_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = set()
    for command in ("router", "tokenizer", "scheduler", "worker", "frontend"):
        assert cli.main([command, "--show-config"]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.add(next(line for line in lines if line.startswith("router = ")))
    assert len(found) == 1
    assert f'"ipc://{tmp_path}/penstock-{os.getuid()}/default/router.sock"' in found.pop()


def test_cli_a_runtime_dir_names_the_router_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["router", "--runtime-dir", str(tmp_path), "--show-config"]) == 0
    assert f'router = "ipc://{tmp_path}/router.sock"' in capsys.readouterr().out


@pytest.mark.parametrize("command", ["tokenizer", "serve"])
def test_cli_a_model_path_that_does_not_exist_is_one_line_and_code_3(
    command: str, tmp_path: Path
) -> None:
    done = penstock_command(command, str(tmp_path / "none"), XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("penstock: ")
    assert str(tmp_path / "none") in done.stderr


def test_cli_an_address_of_no_known_form_is_one_line_and_code_2() -> None:
    done = penstock_command("router", "--router", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "http://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_cli_a_tcp_address_without_a_secret_is_one_line_and_code_2() -> None:
    done = penstock_command("router", "--router", "tcp://0.0.0.0:5555")
    assert done.returncode == 2
    assert "--secret" in done.stderr
    assert "Traceback" not in done.stderr


def test_cli_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = penstock_command("router", "--runtime-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"chmod 700 {tmp_path}" in done.stderr


def test_cli_show_config_without_a_model_shows_the_built_in_one() -> None:
    done = called("serve", "--show-config", environment=clean_environment())
    assert done.returncode == 0, done.stderr
    assert 'served_model_name = ["penstock-demo"]  # derived the built-in model' in done.stdout
    dtype = "bfloat16" if read_machine().multiplies_bf16 else "float32"
    assert f'dtype = "{dtype}"' in done.stdout


def test_cli_a_reader_that_closes_its_pipe_gets_no_traceback() -> None:
    command = f"{sys.executable} -m penstock.services serve --show-config | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins"])
def test_cli_the_model_behind_a_repeatable_flag_is_the_model(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", flag, "https://a.example", "/models/x", "--show-config"]) == 0
    assert "/models/x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sevre"], "did you mean serve?"),
        (["/models/x"], "`penstock serve /models/x`"),
        (["--port", "80"], "`penstock serve --port`"),
    ],
)
def test_cli_what_is_no_command_is_told_what_is_probably_meant(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert words in text
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frontend", "--prot", "1"], "did you mean --port?"),
        (["plan", "--max-modellen", "1"], "did you mean --max-model-len?"),
        (["trace", "--secnds", "3"], "did you mean --seconds?"),
        (["complete", "--max-token", "3", "hi"], "did you mean --max-tokens?"),
        (["status", "--jsn"], "did you mean --json?"),
        (["completion", "bahs"], "did you mean bash?"),
        (["keys", "ad", "ann"], "did you mean add?"),
        (["keys", "add", "--exprs", "5d", "ann"], "did you mean --expires?"),
        (["bench", "srve"], "did you mean serve?"),
        (["bench", "serve", "--modle", "x"], "did you mean --model?"),
        (["bench", "throughput", "--num-promts", "3"], "did you mean --num-prompts?"),
    ],
)
def test_cli_every_command_says_what_a_wrong_flag_was_probably_meant_to_be(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    text = capsys.readouterr().err
    assert words in text
    assert len(text.splitlines()) <= 3


def test_cli_a_name_that_is_not_in_the_hubs_cache_is_one_line_that_ends_with_the_command(
    tmp_path: Path,
) -> None:
    done = penstock_command("serve", "org/little", "--no-download", HF_HOME=str(tmp_path))
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("penstock: org/little: no such folder, and not in the hub's ")
    assert done.stderr.endswith(": hf download org/little\n")


def test_cli_only_serve_looks_a_name_up_and_the_others_say_so(tmp_path: Path) -> None:
    done = penstock_command("scheduler", "org/little", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 3
    assert "for `penstock serve` the name of a model" in done.stderr


def test_cli_a_folder_is_served_without_the_hubs_client() -> None:
    folder = "penstock/demo/model"
    done = subprocess.run(
        [
            *(sys.executable, "-c", MAIN + "print('huggingface_hub' in sys.modules)"),
            *("serve", folder, "--show-config"),
        ],
        capture_output=True, text=True, timeout=60, env=clean_environment(),
        cwd=Path(penstock.__file__).parents[1],
    )  # fmt: skip
    assert folder in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [
            "--port",
            "8001",
            "--device",
            "cpu",
            "--no-enable-prefix-caching",
            "--max-model-len",
            "1k",
        ],
        ["--device", "null", "--null-step-ms", "0.5", "--data-parallel-size", "2"],
        [
            "--served-model-name",
            'a"b,c',
            "--expected-models",
            "\\d\x7f\u00e4",
            "--num-kv-blocks",
            "99",
        ],
        ["--request-timeout-s", "5", "--port-range", "20000-20099", "--max-wait-s", "1e-05"],
    ],
)
def test_cli_show_config_prints_a_file_that_config_loads(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> str:
        assert cli.main(["serve", *arguments, "--show-config"]) == 0
        return capsys.readouterr().out

    first = shown(*arguments)
    path = tmp_path / "penstock.toml"
    path.write_text(first)
    values, again = ([line.partition("  #")[0] for line in text.splitlines() if text[:1] != "#"]
                     for text in (first, shown("--config", str(path))))  # fmt: skip
    assert [line for line in again if line[:1] != "#"] == [
        line for line in values if line[:1] != "#"
    ]
    assert len(values) > 50


def test_cli_show_config_marks_a_secret_and_the_file_is_refused_until_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    keys.chmod(0o600)
    secrets = {"--api-key": "sk-1", "--secret": "x" * 20, "--response-store": "redis://:pw@h"}
    given = [text for pair in secrets.items() for text in pair]
    assert cli.main(["serve", "--api-key", f"file:{keys}", *given, "--show-config"]) == 0
    text = capsys.readouterr().out
    assert not [value for value in ("sk-1", "xxx", "pw") if value in text]
    assert f'\napi_key = ["file:{keys}", "<hidden>"]  # flag --api-key\n' in text
    assert '\nsecret = "<hidden>"  # flag --secret\n' in text
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    assert cli.main(["serve", "--config", str(path)]) == 2
    lines = sorted(capsys.readouterr().err.removeprefix("penstock: ").splitlines())
    for line, name in zip(lines, ("api_key", "response_store", "secret"), strict=True):
        assert f"--config {path}: {name} is '<hidden>', which stands where a secret was" in line
        assert ('"file:PATH" of a file' in line) == (name != "response_store")
        assert f"give it by PENSTOCK_{name.upper()} or --{name.replace('_', '-')}" in line
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-1")
    rest = [text for flag in ("--secret", "--response-store") for text in (flag, secrets[flag])]
    assert cli.main(["serve", "--config", str(path), *rest, "--show-config"]) == 0
    assert 'api_key = ["<hidden>"]  # environment PENSTOCK_API_KEY' in capsys.readouterr().out

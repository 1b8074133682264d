"""``penstock models``, ``complete`` and ``embed`` against a server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands.command_run import call, environment
from support.commands.scripted_api import scripted_api
from support.pipeline.served import Served

from penstock.services.cli import main
from penstock.services.commands.failure import CommandError
from penstock.services.commands.printable import only_colours, printable
from penstock.services.commands.settings import names, setting

NOBODY = "127.0.0.1:9"
"""Named so that no server of the same user is looked for, since another test may run one."""
HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b1md\rx\u202ey"


def test_models_lists_what_the_server_serves_with_its_context(server: Served) -> None:
    done = call("models", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "model          context\npenstock-demo  2,048 tokens\n"


def test_models_prints_the_servers_own_list_as_json(server: Served) -> None:
    done = call("models", server.url + "/v1/", "--json")
    assert [card["id"] for card in json.loads(done.stdout)["data"]] == ["penstock-demo"]


def test_a_completion_is_the_text_that_the_server_gives(server: Served) -> None:
    body = {"model": "penstock-demo", "prompt": "Once", "max_tokens": 12, "seed": 7}
    _, answer = server.post("/v1/completions", body)
    more = ("--url", server.url, "--max-tokens", "12", "--seed", "7")
    done = call("complete", "Once", *more)
    assert (done.stdout, done.stderr) == (answer["choices"][0]["text"], "")
    assert call("complete", *more, given="Once").stdout == done.stdout
    assert call("complete", "-", "--echo", *more, given="Once").stdout == "Once" + done.stdout


def test_a_completion_is_written_as_it_comes(server: Served) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "penstock.services", "complete", "Once", "--url", server.url),
            *("--max-tokens", "1800", "--set", "ignore_eos=true"),
        ],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(8)
    assert process.poll() is None  # 9 s of answer are still to come
    process.terminate()
    process.communicate()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-tokens", "2o"), "max_tokens is '2o'"),
        (("--set", "tempature=1"), "did you mean temperature?"),
        (("--set", "top_k"), "expected NAME=VALUE"),
        (("--url", "ftp://x"), "expected http://HOST:PORT"),
        (("--url", NOBODY, "--api-key", "a b"), "visible ASCII"),
    ],
)
def test_what_is_wrong_with_a_flag_is_one_line_and_code_2(
    flags: tuple[str, ...], said: str
) -> None:
    done = call("complete", "x", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_prompt_at_all_is_refused() -> None:
    done = call("complete", "--url", NOBODY, given="")
    assert (done.returncode, done.stderr.count("standard input is empty")) == (2, 1)


def test_a_server_that_is_not_there_is_one_line_and_code_4() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and listens to nobody
        done = call("models", f"127.0.0.1:{held.getsockname()[1]}")
    assert (done.returncode, done.stderr.count("cannot be reached")) == (4, 1)


def test_what_the_server_refuses_is_said_in_its_words_with_code_1(server: Served) -> None:
    done = call("complete", "x", "--url", server.url, "--model", "gpt-5")
    assert done.returncode == 1
    assert done.stderr.startswith("penstock: ")
    assert "gpt-5" in done.stderr


def test_embeddings_are_those_of_the_server_in_batches_of_any_size(server: Served) -> None:
    texts = ["one", "two words", "and three of them"]
    body = {"model": "penstock-demo", "input": texts, "encoding_format": "float"}
    status, answer = server.post("/v1/embeddings", body)
    assert status == 200, answer
    expected = [
        {"index": row["index"], "text": text, "embedding": row["embedding"]}
        for text, row in zip(texts, answer["data"], strict=True)
    ]
    for flags, given in ((texts, ""), (["--batch-size", "2"], "\n".join(texts))):
        done = call("embed", "--url", server.url, *flags, given=given)
        assert (done.returncode, done.stderr) == (0, "")
        assert [json.loads(line) for line in done.stdout.splitlines()] == expected


def test_the_model_is_the_first_that_does_what_is_asked_for() -> None:
    with scripted_api() as api:
        cards = [{"id": "talker", "tasks": ["generate"]}, {"id": "maker", "tasks": ["embed"]}]
        api.whole["/v1/models"] = {"data": cards}
        api.whole["/v1/embeddings"] = {"data": [{"index": 0, "embedding": [0.5]}]}
        api.deltas = [{"text": "x"}]
        assert call("embed", "one", "--url", api.url).returncode == 0
        api.whole["/v1/models"] = {"data": cards[::-1]}
        assert call("complete", "one", "--url", api.url).stdout == "x"
        assert [body["model"] for _, _, body in api.asked] == ["maker", "talker"]
        api.whole["/v1/models"] = {"data": cards[:1]}
        done = call("embed", "one", "--url", api.url)
        assert "serves no model that does 'embed'; its models do: generate" in done.stderr


def test_embeddings_are_json_lines_in_the_order_of_the_texts() -> None:
    with scripted_api() as api:
        rows = [{"index": 1, "embedding": [0.5]}, {"index": 0, "embedding": [0.25]}]
        api.whole["/v1/embeddings"] = {"data": rows}
        done = call("embed", "--dimensions", "1", "--url", api.url, given="one\n\ntwo\n")
        ((_, _, body),) = api.asked
    assert body == {
        "model": "scripted", "encoding_format": "float", "dimensions": 1, "input": ["one", "two"],
    }  # fmt: skip
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"index": 0, "text": "one", "embedding": [0.25]},
        {"index": 1, "text": "two", "embedding": [0.5]},
    ]


@pytest.mark.parametrize(
    ("variables", "flags", "sent"),
    [
        ({}, (), None),
        ({"OPENAI_API_KEY": "o"}, (), "Bearer o"),
        ({"OPENAI_API_KEY": "o", "PENSTOCK_API_KEY": "p"}, (), "Bearer o"),
        ({"PENSTOCK_API_KEY": "p,q"}, (), "Bearer p"),
        ({"PENSTOCK_API_KEY": '["p,q", "r"]'}, (), "Bearer p,q"),
        ({"OPENAI_API_KEY": "o", "PENSTOCK_API_KEY": "p"}, ("--api-key", "f"), "Bearer f"),
    ],
)
def test_openais_address_gets_the_key_of_the_flag_else_openais_else_penstocks(
    variables: dict[str, str], flags: tuple[str, ...], sent: str | None
) -> None:
    with scripted_api() as api:
        api.deltas = [{"text": "hello"}]
        done = call("complete", "x", *flags, OPENAI_BASE_URL=f"{api.url}/v1", **variables)
        ((path, headers, _),) = api.asked
    assert (done.stdout, path) == ("hello", "/v1/completions")
    assert headers.get("Authorization") == sent


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({"OPENAI_API_KEY": "o"}, None),
        ({"OPENAI_API_KEY": "o", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, None),
        ({"OPENAI_API_KEY": "o", "PENSTOCK_API_KEY": "p"}, "Bearer p"),
    ],
)
def test_openais_key_goes_to_openais_address_alone(
    variables: dict[str, str], sent: str | None
) -> None:
    with scripted_api() as api:
        api.deltas = [{"text": "hello"}]
        call("complete", "x", "--url", api.url, **variables)
        ((_, headers, _),) = api.asked
    assert headers.get("Authorization") == sent


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        (
            "unix:/nowhere/s",
            4,
            "unix:/nowhere/s cannot be reached: No such file",
        ),
        ("unix:///nowhere/s", 4, "unix:/nowhere/s cannot be reached"),
        ("unix:relative", 2, "unix:relative: expected unix:/PATH"),
        ("unix://host/s", 2, "expected unix:/PATH"),
    ],
)
def test_a_unix_socket_is_named_by_its_path(url: str, code: int, said: str) -> None:
    done = call("models", url)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        (["chat", "--base-url", "http://127.0.0.1:9"], "URL alone: penstock chat http://127.0."),
        (["chat", "--url=http://127.0.0.1:9"], "URL alone: penstock chat http://127.0."),
        (["status", "--base-url", "http://127.0.0.1:9"], "URL alone: penstock status http://"),
        (["complete", "hi", "--base-url", "http://127.0.0.1:9"], "--base-url: use --url"),
        (["list", "--base-url", "http://127.0.0.1:9"], "unknown flag --base-url\n"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], "flag --url: use --base-url\n"),
        (["eval", "--url=http://127.0.0.1:9"], "unknown flag --url: use --base-url\n"),
    ],
)
def test_a_server_that_is_named_as_elsewhere_is_told_how_to_name_it(
    arguments: list[str], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert way in capsys.readouterr().err


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    done = call("models", "http://ann:hidden@127.0.0.1:9")
    assert (done.returncode, "--api-key" in done.stderr, "hidden" in done.stderr) == (
        2, True, False,
    )  # fmt: skip


def test_a_key_can_stand_in_a_file_of_its_user(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret-of-a-file  # mine\n")
    file.chmod(0o600)
    with scripted_api() as api:
        api.deltas = [{"text": "hello"}]
        call("complete", "x", "--url", api.url, "--api-key", f"file:{file}")
        ((_, headers, _),) = api.asked
        assert headers["Authorization"] == "Bearer secret-of-a-file"
        file.chmod(0o644)
        refused = call("complete", "x", "--url", api.url, "--api-key", f"file:{file}")
    assert (refused.returncode, refused.stderr.count("penstock: --api-key")) == (2, 1)


@pytest.mark.parametrize(
    "told", [["x"], {"data": "x"}, {"data": [{"id": 5}]}, {"data": [{"name": "x"}]}]
)
def test_a_list_of_models_that_is_none_is_one_line_and_code_1(told: object) -> None:
    with scripted_api() as api:
        api.whole["/v1/models"] = told
        for done in (call("models", api.url), call("complete", "x", "--url", api.url)):
            assert (done.returncode, done.stdout) == (1, "")
            assert "sent a list of models that cannot be read" in done.stderr
            assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "delta",
    [
        {"text": 5},
        {"content": {"x": 1}},
        {"tool_calls": [{"index": 10**12, "function": {"name": "x"}}]},
        {"tool_calls": [{"index": -1, "function": 5}]},
    ],
)
def test_a_part_of_an_answer_that_is_none_ends_the_command_with_one_line(
    delta: dict[str, object],
) -> None:
    with scripted_api() as api:
        api.deltas = [delta]
        command = ("complete", "x", "--url") if "text" in delta else ("chat", "-m", "x")
        done = call(*command, api.url)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "sent a part of an answer that cannot be read" in done.stderr


def test_nothing_that_a_model_writes_is_obeyed_by_a_terminal() -> None:
    shown = printable(HOSTILE + "\n\tz")
    assert shown == "a␛]0;title␇b␛[2Jc\\x9b1mdx\\u202ey\n\tz"
    assert only_colours("\x1b[1mbold\x1b[0m\x1b[2J\x1b]8;;x\x1b\\") == (
        "\x1b[1mbold\x1b[0m␛[2J␛]8;;x␛\\"
    )


def test_a_value_is_json_where_it_reads_so_and_a_text_otherwise() -> None:
    assert setting("temperature", "0.2") == ("temperature", 0.2)
    assert setting("reasoning-effort", "high") == ("reasoning_effort", "high")
    assert setting("stop", "END") == ("stop", ["END"])
    assert setting("stop", '["a", "b"]') == ("stop", ["a", "b"])
    with pytest.raises(CommandError, match="temperature is -1"):
        setting("temperature", "-1")
    assert "temperature" in names()
    assert "n" not in names()

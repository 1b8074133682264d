"""``penstock chat`` in a real pseudo-terminal, its screen as an emulator shows it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.commands.command_run import environment
from support.commands.emulator import Terminal, terminal
from support.commands.scripted_api import ScriptedApi, scripted_api
from support.pipeline.served import Served
from support.polling import until

MARKDOWN = """# Rivers

The **Danube** flows through `ten` countries.
It begins at [Donaueschingen](https://example.org).

- Vienna
- Budapest

```python
length = 2850
```

| city | bridges |
| --- | --- |
| Vienna | 14 |

"""
SHOWN = """\
Rivers

The Danube flows through ten countries.
It begins at Donaueschingen (https://example.org).

 • Vienna
 • Budapest

length = 2850

 city    bridges
 ───────────────
 Vienna  14"""


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as found:
        yield found


@contextlib.contextmanager
def chat(
    url: str, state: Path, *flags: str, columns: int = 80, rows: int = 24
) -> Iterator[Terminal]:
    """At its first prompt."""
    chosen = environment(XDG_STATE_HOME=str(state))
    with terminal("chat", url, *flags, environment=chosen, columns=columns, rows=rows) as found:
        found.at_prompt()
        yield found


def words(text: str) -> list[dict[str, str]]:
    """The deltas of a model that writes a text in pieces of seven characters."""
    return [{"content": text[at : at + 7]} for at in range(0, len(text), 7)]


def messages(api: ScriptedApi) -> list[tuple[str, str]]:
    """Roles and texts of the last request."""
    return [(one["role"], one["content"]) for one in api.asked[-1][2]["messages"]]


def test_markdown_in_pieces_is_the_same_screen_as_the_whole(
    api: ScriptedApi, tmp_path: Path
) -> None:
    with chat(api.url, tmp_path, rows=40) as seen:
        api.deltas = words(MARKDOWN)
        seen.type("rivers\r")
        seen.sees("Vienna  14")
        seen.at_prompt()
        api.deltas = [{"content": MARKDOWN}]
        seen.type("/retry\r")
        seen.sees("Vienna  14", 2)
        seen.at_prompt()
        assert seen.text.count(SHOWN) == 2
        assert seen.style("Danube").bold
        assert not seen.style("flows").bold


def test_an_answer_longer_than_the_screen_is_whole_in_what_scrolled_away(
    api: ScriptedApi, tmp_path: Path
) -> None:
    code = "".join(f"line_{number} = {number}\n" for number in range(60))
    api.deltas = words(f"```python\n{code}```\nThe end.")
    with chat(api.url, tmp_path, rows=12) as seen:
        seen.type("code\r")
        seen.sees("The end.")
        seen.at_prompt()
        assert code.rstrip() in seen.text


def test_what_has_come_is_shown_before_the_answer_ends(api: ScriptedApi, tmp_path: Path) -> None:
    api.deltas = [{"reasoning": "Thinking hard."}, {"content": "Half of"}, {"content": " it."}]
    api.go_on.clear()
    with chat(api.url, tmp_path) as seen:
        seen.type("hello\r")
        seen.sees("Thinking hard.")
        assert "Half of" not in seen.text
        api.go_on.set()
        seen.sees("Half of it.")
        assert b"\x1b[2mThinking" in seen.raw  # dim; the emulator knows no dim


def test_nothing_that_a_model_or_its_server_writes_moves_the_cursor(
    api: ScriptedApi, tmp_path: Path
) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\x9b2J\x1b]52;c;ZXZpbA==\x07\r&#27;[2J"
    call = {"index": 0, "id": "1", "function": {"name": evil, "arguments": evil}}
    api.deltas = [
        {"reasoning": f"t{evil}"}, {"content": f"a{evil} `{evil}` [x](http://y/{evil})"},
        {"content": f"\n\n```{evil}\n{evil}\n```\n"}, {"tool_calls": [call]},
    ]  # fmt: skip
    with chat(api.url, tmp_path) as seen:
        seen.type("go\r")
        seen.sees("result of")
        assert "/help lists commands" in seen.text  # nothing was erased
        sequences = re.findall(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[^\[])", seen.raw)
        assert not [one for one in sequences if one.startswith(b"\x1b]") or b"2J" in one]
        assert b"\x07" not in seen.raw
        assert b"\xc2\x9b" not in seen.raw


def test_tool_calls_are_shown_and_take_their_results(api: ScriptedApi, tmp_path: Path) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Vienna"}'}}
    api.deltas = [{"tool_calls": [call]}, {"tool_calls": [rest]}]
    with chat(api.url, tmp_path) as seen:
        seen.type("weather?\r")
        seen.at_prompt("result of weather>")
        assert '→ weather({"city": "Vienna"})' in seen.lines
        api.deltas = [{"content": "It is sunny."}]
        seen.type("sunny\r")
        seen.sees("It is sunny.")
        seen.at_prompt()
    assert messages(api) == [("user", "weather?"), ("assistant", ""), ("tool", "sunny")]
    assert api.asked[-1][2]["messages"][2]["tool_call_id"] == "c1"


def test_a_terminal_that_becomes_narrower_shows_the_answer_anew(
    api: ScriptedApi, tmp_path: Path
) -> None:
    api.deltas = [{"content": "one two three four five six seven eight nine"}, {"content": " ten"}]
    api.go_on.clear()
    with chat(api.url, tmp_path, columns=60) as seen:
        seen.type("count\r")
        seen.sees("one two three four five six seven eight nine")
        seen.resize(26, 24)
        seen.sees("one two three four five\nsix seven eight nine")
        api.go_on.set()
        seen.sees("six seven eight nine ten")
        seen.at_prompt()
        assert seen.lines[:3] == ["> count", "one two three four five", "six seven eight nine ten"]
        assert seen.lines.count("one two three four five") == 1


def test_ctrl_c_ends_an_answer_at_the_server_and_a_second_one_leaves(
    server: Served, tmp_path: Path
) -> None:
    def running() -> float:
        return server.metrics()["penstock_requests_running"]

    flags = ("--max-tokens", "1800", "--set", "ignore_eos=true")
    with chat(server.url, tmp_path, *flags) as seen:
        before = server.metrics().get("penstock_generation_tokens_total", 0)
        written = len(seen.raw)
        seen.type("hello\r")
        seen.until(lambda: len(seen.raw) > written + 300, "streamed")
        until(lambda: running() == 1)
        seen.type("\x03")
        seen.sees("(interrupted)")
        seen.at_prompt()
        until(lambda: running() == 0, 4)
        assert server.settled()["penstock_generation_tokens_total"] < before + 1700
        seen.type("half a line\x03")
        seen.at_prompt()
        seen.type("\x03")
        assert seen.ended() == 130


def test_ctrl_c_ends_the_wait_for_an_answer_that_has_not_begun(
    api: ScriptedApi, tmp_path: Path
) -> None:
    api.deltas = [{"content": ""}, {"content": "late"}]
    api.go_on.clear()
    with chat(api.url, tmp_path) as seen:
        seen.type("hello\r")
        until(lambda: len(api.asked) == 1)
        seen.type("\x03")
        seen.sees("(interrupted)")
        seen.at_prompt()
        api.go_on.set()
        api.deltas = [{"content": "in time"}]
        seen.type("again\r")
        seen.sees("in time")
        assert messages(api) == [("user", "again")]  # no question without an answer stays


def test_the_system_message_parameters_and_model_of_a_chat_can_change(
    api: ScriptedApi, tmp_path: Path
) -> None:
    api.deltas = [{"content": "yes"}]
    with chat(api.url, tmp_path, "--system", "Be brief.", "--temperature", "0.5") as seen:
        seen.type("/system\r")
        seen.sees("Be brief.")
        seen.type("/system Speak like a pirate.\r")
        seen.sees("system message set")
        seen.type("/set temperature 0.2\r")
        seen.sees("temperature = 0.2")
        seen.type("/set top_k=7\r")
        seen.sees("top_k = 7")
        seen.type("/set temprature 1\r")
        seen.sees("did you mean temperature?")
        seen.type("/set temperature hot\r")
        seen.sees("temperature is 'hot'")
        seen.type("/model other\r")
        seen.sees("the server has no model other")
        seen.type("/modle\r")
        seen.sees("did you mean /model?")
        seen.type("//not a command\r")
        seen.sees("yes")
        seen.at_prompt()
        seen.type("/clear\r")
        seen.sees("begins anew")
        seen.type("/help\r")
        seen.sees("/save [-f] FILE")
        seen.at_prompt()
        seen.type("/exit\r")
        assert seen.ended() == 0
    body = api.asked[-1][2]
    assert messages(api) == [
        ("system", "Speak like a pirate."), ("user", "/not a command"),
    ]  # fmt: skip
    assert (body["temperature"], body["top_k"], body["model"]) == (0.2, 7, "scripted")


def test_a_conversation_is_saved_and_loaded_and_no_file_is_overwritten_unasked(
    api: ScriptedApi, tmp_path: Path
) -> None:
    api.deltas = [{"content": "four"}]
    file = tmp_path / "talk.json"
    with chat(api.url, tmp_path, "--system", "Count.") as seen:
        seen.type("two and two?\r")
        seen.sees("four")
        seen.at_prompt()
        for times in (1, 2):  # a file of its own may be written again
            seen.type(f"/save {file}\r")
            seen.sees("saved in", times)
        foreign = tmp_path / "foreign.json"
        foreign.write_text("[]")
        seen.type(f"/save {foreign}\r")
        seen.sees("is there already")
        assert foreign.read_text() == "[]"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one["role"] for one in json.loads(file.read_text())["messages"]] == [
        *("system", "user", "assistant"),
    ]  # fmt: skip
    with chat(api.url, tmp_path, "--load", str(file)) as seen:
        seen.type("and one more?\r")
        seen.sees("four")
    assert messages(api) == [
        ("system", "Count."), ("user", "two and two?"), ("assistant", "four"),
        ("user", "and one more?"),
    ]  # fmt: skip


def test_lines_of_an_earlier_chat_come_back_with_the_arrow_key(
    api: ScriptedApi, tmp_path: Path
) -> None:
    api.deltas = [{"content": "fine"}]
    with chat(api.url, tmp_path) as seen:
        seen.type("how are you?\r")
        seen.sees("fine")
        seen.at_prompt()
        seen.type("\x04")
        assert seen.ended() == 0
    with chat(api.url, tmp_path) as seen:
        seen.type("\x1b[A")
        seen.sees("> how are you?")
        seen.type("\x7f today?\x1b\r(two lines)\r")  # edited, and continued with Alt-Enter
        seen.sees("fine")
    assert messages(api)[0] == ("user", "how are you today?\n(two lines)")
    history = tmp_path / "penstock" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600


def test_commands_and_parameters_are_completed_with_tab(api: ScriptedApi, tmp_path: Path) -> None:
    with chat(api.url, tmp_path) as seen:
        seen.type("/sys\t")
        seen.sees("> /system")
        seen.type("\x15/set temp\t")
        seen.sees("> /set temperature")


def test_a_terminal_without_a_movable_cursor_gets_plain_lines_and_their_history(
    api: ScriptedApi, tmp_path: Path
) -> None:
    api.deltas = [{"content": "**fine**"}]
    chosen = environment(XDG_STATE_HOME=str(tmp_path))
    with terminal("chat", api.url, environment=chosen, kind="dumb") as seen:
        seen.at_prompt()
        seen.type("how are you?\r")
        seen.sees("**fine**")
        seen.at_prompt()
        assert b"\x1b" not in seen.raw
        seen.type("\x10\r")  # Ctrl-P: the line before
        seen.sees("**fine**", 2)
        seen.at_prompt()
        seen.type("\x03")
        assert seen.ended() == 130
    assert [text for role, text in messages(api) if role == "user"] == ["how are you?"] * 2
    assert "how are you?" in (tmp_path / "penstock" / "chat_history").read_text()


def test_a_server_that_is_gone_is_told_and_the_question_can_be_asked_again(
    tmp_path: Path,
) -> None:
    with scripted_api() as api, chat(api.url, tmp_path) as seen:
        api.deltas = [{"content": "here"}]
        seen.type("first\r")
        seen.sees("here")
        seen.at_prompt()
        api.status = 503
        seen.type("second\r")
        seen.sees("penstock: the script says no")
        seen.at_prompt()
        api.status = 200
        for times in (2, 3):  # the one that failed, and then the same again
            seen.type("/retry\r")
            seen.sees("here", times)
            seen.at_prompt()
            assert messages(api) == [("user", "first"), ("assistant", "here"), ("user", "second")]


def test_a_folder_is_served_for_the_time_of_a_chat(
    server: Served, tmp_path: Path, short_folder: Path
) -> None:
    folder = re.findall(r'"folder": "([^"]+)"', server.output)[0]
    chosen = environment(XDG_STATE_HOME=str(tmp_path), XDG_RUNTIME_DIR=str(short_folder))
    flags = ("--max-tokens", "5", "--", "--device", "null")
    with terminal("chat", folder, *flags, environment=chosen) as seen:
        seen.sees("starting a server for")
        seen.at_prompt()
        processes = psutil.Process(seen.process.pid).children(recursive=True)
        assert len(processes) == 6
        seen.type("\x03")  # at the prompt: it leaves, and ends what it has started
        assert seen.ended() == 130
    assert not psutil.wait_procs(processes, 10)[1]


def test_a_server_of_its_own_ends_also_when_the_chat_is_killed(
    server: Served, tmp_path: Path, short_folder: Path
) -> None:
    folder = re.findall(r'"folder": "([^"]+)"', server.output)[0]
    chosen = environment(XDG_STATE_HOME=str(tmp_path), XDG_RUNTIME_DIR=str(short_folder))
    with terminal("chat", folder, "--", "--device", "null", environment=chosen) as seen:
        seen.at_prompt()
        processes = psutil.Process(seen.process.pid).children(recursive=True)
        seen.process.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(processes, 10)[1]

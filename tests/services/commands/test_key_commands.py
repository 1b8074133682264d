"""``penstock keys``: the file of keys, and what is said of it."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from penstock.protocol.config import ConfigError
from penstock.protocol.keys import key_file
from penstock.protocol.keys.key_file import KeyFileError, Line, change_keys, line_of, read_keys
from penstock.protocol.keys.record import id_of, new_key
from penstock.services.commands import keys as key_commands


def keys(path: Path, *arguments: str) -> int:
    return key_commands.main([*arguments, "--keys-file", str(path)], {})


def test_a_file_that_another_process_keeps_locked_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    change_keys(path, lambda lines: lines)
    monkeypatch.setattr(key_file, "LOCK_S", 0.2)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process has held the file's lock"):
            keys(path, "add", "ann")
    assert keys(path, "add", "ann") == 0


def test_a_key_is_printed_once_and_the_file_holds_no_more_than_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    options = ["--requests-per-minute", "60", "--tokens-per-day", "5000", "--model", "m/one"]
    assert keys(path, "add", "ann@example.org", *options, "--expires", "30d") == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("sk-penstock-")
    (record,) = read_keys(path)
    assert record.is_of(key)
    assert not record.is_of(key[:-1] + ("A" if key[-1] != "A" else "B"))
    assert (record.id, record.role, record.models) == (id_of(key), "user", ["m/one"])
    assert (record.requests_per_minute, record.tokens_per_day) == (60, 5000)
    text = path.read_text()
    assert key.rpartition("-")[2] not in text
    assert text.startswith("# ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["keys"]
    keys(path, "list")
    shown = capsys.readouterr().out
    assert "60 requests/min, 5,000 tokens/day" in shown
    assert "until 2" in shown
    keys(path, "list", "--json")
    one = json.loads(capsys.readouterr().out)
    assert (one["name"], "hash" in one) == ("ann@example.org", False)


def test_keys_are_disabled_enabled_and_removed_by_name_or_id_and_comments_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\n")
    path.chmod(0o600)
    for name in ("ann", "bob"):
        keys(path, "add", name)
    ann, bob = read_keys(path)
    keys(path, "disable", "ann")
    assert [one.disabled for one in read_keys(path)] == [True, False]
    keys(path, "enable", ann.id)
    assert read_keys(path) == [ann, bob]
    keys(path, "remove", "bob")
    assert read_keys(path) == [ann]
    assert path.read_text().startswith("# of the team\n\n{")
    with pytest.raises(ConfigError, match="there is no key 'an'; did you mean ann"):
        keys(path, "disable", "an")
    with pytest.raises(ConfigError, match="of the name ann already"):
        keys(path, "add", "ann")


def test_what_is_no_name_limit_or_time_is_refused_by_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for arguments, said in (
        (("add", "a b"), "NAME is 'a b'"),
        (("add", "x" * 65), "64 at most"),
        (("add", "ann", "--requests-per-minute", "0"), "--requests-per-minute 0: 1 to"),
        (("add", "ann", "--expires", "soon"), "--expires soon: expected"),
        (("add", "ann", "--expires", "2020-01-01"), "is over already"),
        (("list",), "is not there; `penstock keys add"),
        (("remove", "ann"), "is not there"),
    ):
        with pytest.raises(ConfigError, match=said):
            keys(path, *arguments)
    with pytest.raises(ConfigError, match="PENSTOCK_KEYS_FILE"):
        key_commands.main(["list"], {})
    assert key_commands.main(["add", "ann"], {"PENSTOCK_KEYS_FILE": str(path)}) == 0
    assert [one.name for one in read_keys(path)] == ["ann"]


def test_many_who_change_the_file_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def add(first: int) -> None:
        for number in range(first, first + 10):
            record = new_key(f"key-{number}")[1]
            change_keys(path, lambda lines, one=record: [*lines, line_of(one)])  # type: ignore[misc]

    threads = [threading.Thread(target=add, args=(10 * part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.name for one in read_keys(path)} == {f"key-{number}" for number in range(40)}


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys(path, "add", "ann")
    before = path.read_bytes()

    def fails(lines: list[Line]) -> list[Line]:
        raise KeyFileError("no")

    with pytest.raises(KeyFileError):
        change_keys(path, fails)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["keys"]


def test_a_file_that_is_no_list_of_private_keys_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    good = line_of(new_key("ann")[1]).text
    other = line_of(new_key("ann")[1]).text
    for text, said in (
        ("", "is empty"),
        (good + "\n{", "line 2: "),
        (good.replace('"name"', '"nome"'), "line 1: .*nome"),
        (good.replace("sha256", "sha1"), r"line 1: .*\$.hash"),
        (f"{good}\n# x\n{other}", "line 3: the name ann stands in line 1 already"),
        (f"{good}\n{good.replace('ann', 'bob')}", "line 2: the id .* stands in line 1"),
        ("[" * 9000, "line 1: "),
        ("{" * 70_000, "a line has 65536 at most"),
    ):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(KeyFileError, match=said):
            read_keys(path)
    path.write_text(good)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match=r"others can read .* chmod 600"):
        read_keys(path)
    with pytest.raises(KeyFileError, match="no regular file"):
        read_keys(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_a_file_that_root_changes_stays_the_servers(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    change_keys(path, lambda lines: [*lines, line_of(new_key("ann")[1])])
    os.chown(path, 1234, 1235)
    path.chmod(0o400)
    change_keys(path, lambda lines: [*lines, line_of(new_key("bob")[1])])
    after = path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode & 0o777) == (1234, 1235, 0o400)
    assert path.read_text().count('"bob"') == 1

"""Grammars are vetted in a helper's children: real processes, hostile grammars."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.polling import until
from support.tokenizer import patient_grammars, ruinous_grammars

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.request import MAX_SOURCE_BYTES, Grammar
from penstock.services.tokenizer import grammar_check
from penstock.services.tokenizer.grammar_check import GrammarCheck, GrammarsBusy, Verdicts
from penstock.services.tokenizer.grammar_process import MAX_FRAME, Ask, FrameReader, frame
from penstock.services.tokenizer.prompt_error import PromptError

GOOD = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"string"}}}')


def soon() -> float:
    """Seconds in which a client must have its answer: 1, where it has the processors it needs. They
    may be another's for some; without a limit these grammars take minutes."""
    return max(6.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammars")
    (folder / "tokenizer.json").write_text(make_tokenizer(512).to_str())
    return folder


@pytest.fixture(scope="module")
def check(folder: Path) -> Iterator[GrammarCheck]:
    one = GrammarCheck(folder, 600, [2])
    one.check(GOOD)
    yield one
    one.close()


@pytest.fixture(scope="module")
def patient(folder: Path) -> Iterator[GrammarCheck]:
    one = GrammarCheck(folder, 600, [2], command=[sys.executable, patient_grammars.__file__])
    one.check(GOOD)
    yield one
    one.close()


@pytest.fixture
def ruinous(folder: Path) -> Iterator[GrammarCheck]:
    one = GrammarCheck(folder, 512, [2], command=[sys.executable, ruinous_grammars.__file__])
    one.check(GOOD)
    yield one
    one.close()


@pytest.fixture
def unhurried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCheck]:
    """As ``ruinous``, where others may have the processors for long: only their time counts."""
    seconds = patient_grammars.PATIENCE
    monkeypatch.setattr(grammar_check, "VERDICT_SECONDS", seconds)
    command = [sys.executable, ruinous_grammars.__file__, str(seconds)]
    one = GrammarCheck(folder, 512, [2], command=command)
    one.check(GOOD)
    yield one
    one.close()


def regex(source: str) -> Grammar:
    return Grammar("regex", source)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value), param="response_format")


def lark(source: str) -> Grammar:
    return Grammar("grammar", source)


def alternative(number: int) -> dict[str, Any]:
    name = f"key{number}"
    return {"type": "object", "properties": {name: {"maxLength": number}}, "required": [name]}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def settle(check: GrammarCheck, grammar: Grammar) -> None:
    """``check``, again where others had the processors."""
    for _ in range(20):
        try:
            return check.check(grammar)
        except GrammarsBusy:
            continue
    raise AssertionError("never any time")


HOSTILE = {
    "unknown type": schema({"properties": {"a": {"type": "strng"}}}),
    "open group": regex("("),
    "open class": regex("["),
    "open repeat": regex("a{"),
    "nothing to repeat": regex("{}"),
    "deep schema": Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "reference to itself": schema({"$ref": "#"}),
    "circle of references": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "remote reference": schema({"$ref": "https://example.org/schema"}),
    "rule without an end": lark("start: start"),
    "rule in a circle": lark("root ::= root"),
    "enum of 100,000": schema({"enum": [f"value {number}" for number in range(100_000)]}),
    "30,000 parentheses": regex("(" * 30_000 + ")" * 30_000),
    "30,000 parentheses in Lark": lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "3,000 parentheses in GBNF": lark("root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    "empty": lark(" "),
    "too long": regex("é" * (MAX_SOURCE_BYTES // 2 + 1)),
    "too many alternatives": schema(
        {"allOf": [{"anyOf": [{"required": [f"{i} {j}"]} for j in range(6)]} for i in range(12)]}
    ),
    "4,096 rules": lark("start: " + " | ".join(f'"choice {n}"' for n in range(4096))),
    "a million": regex("(x{1,999}){999}"),
    "a billion": regex("((x{1,999}){999}){999}"),
    "a string of a billion": schema({"type": "string", "minLength": 10**9}),
    "an array of a billion": schema({"type": "array", "minItems": 10**9}),
    "no unknown format": schema({"type": "string", "format": "no such format"}),
}
HARMLESS = {
    "left recursion": lark('start: start "a" | "a"'),
    "4,096 choices": Grammar("choice", json.dumps([f"choice {n}" for n in range(4096)])),
    "300 alternatives": schema(
        {
            "anyOf": [
                {"properties": {f"a{n}": {"maxLength": n}}, "required": [f"a{n}"]}
                for n in range(300)
            ]
        }
    ),
    "400 properties": schema({"properties": {f"key {n}": {"type": "string"} for n in range(400)}}),
    "enum of 10,000": schema({"enum": [f"value {number}" for number in range(10_000)]}),
    "a string of a million": schema({"type": "string", "minLength": 10**6}),
    "an array of a million": schema({"type": "array", "minItems": 10**6}),
    "at most a billion": schema({"type": "string", "maxLength": 10**9}),
    "repeated repeats": regex("(a+)+$"),
    "ambiguous": regex("(a|a)*b"),
    "counted classes": regex(r"(\w{1,500}\W{1,500}){1,500}[^a]{9,999}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_soon_and_a_good_one_is_served_next(
    name: str, check: GrammarCheck
) -> None:
    began = time.monotonic()
    with pytest.raises(PromptError) as caught:
        settle(check, HOSTILE[name])
    assert time.monotonic() - began < soon()
    assert caught.value.param == HOSTILE[name].param
    assert caught.value.message.startswith(f"{HOSTILE[name].param}: ")
    assert len(caught.value.message) < 500
    check.check(schema({"const": name}))
    assert time.monotonic() - began < 1.5 * soon()


@pytest.mark.parametrize("name", HARMLESS)
def test_a_large_grammar_that_can_be_followed_is_accepted(
    name: str, patient: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "VERDICT_SECONDS", patient_grammars.PATIENCE)
    patient.check(HARMLESS[name])


def test_one_helper_serves_all_grammars(check: GrammarCheck) -> None:
    pid = check.pid
    assert pid is not None
    for number in range(20):
        check.check(regex(f"a{{{number},30}}"))
    assert check.pid == pid


def test_the_helper_never_gives_its_verdict_twice_for_one_grammar(check: GrammarCheck) -> None:
    with pytest.raises(PromptError, match="unclosed group"):
        check.check(regex("(once"))
    pid = check.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PromptError, match="unclosed group"):
            check.check(regex("(once"))
        check.check(GOOD)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("abort", "512 MiB or breaks the compiler"),
        ("segfault", "512 MiB or breaks the compiler"),
        ("eat", "512 MiB or breaks the compiler|more than 0.5 s to compile"),
        ("interrupt", "512 MiB or breaks the compiler"),
        ("leave", "512 MiB or breaks the compiler"),
        ("spin", "more than 0.5 s to compile"),
        ("slowly", "to check one token of an answer takes up to"),
    ],
)
def test_a_grammar_that_ruins_its_child_costs_nobody_else(
    does: str, says: str, unhurried: GrammarCheck
) -> None:
    pid = unhurried.pid
    with pytest.raises(PromptError, match=says) as caught:
        unhurried.check(regex(does))
    assert caught.value.param == "structured_outputs"
    unhurried.check(regex("fine"))
    assert unhurried.pid == pid


def test_what_a_child_prints_is_no_answer(ruinous: GrammarCheck) -> None:
    ruinous.check(regex("shout"))


def test_a_child_that_had_no_time_twice_is_no_verdict_on_its_grammar(
    ruinous: GrammarCheck,
) -> None:
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(GrammarsBusy, match="no time"):
            ruinous.check(regex("sleep"))
        assert 1.5 < time.monotonic() - began < 2.5 * soon()


def test_good_grammars_are_served_beside_ruinous_ones(ruinous: GrammarCheck) -> None:
    """Before any of these has its end, but where other processes hold up the good one."""

    def others_had_ended(attempt: int) -> bool:
        ends: list[BaseException] = []

        def ask(source: str) -> None:
            try:
                ruinous.check(regex(source))
            except (PromptError, GrammarsBusy) as error:
                ends.append(error)

        names = [f"sleep{'!' * (3 * attempt + number)}" for number in range(3)]
        threads = [threading.Thread(target=ask, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        until(lambda: len(ruinous._waiting) == 3 or bool(ends))
        ruinous.check(regex(f"fine {attempt}"))
        too_late = bool(ends)
        for thread in threads:
            thread.join(60)
        assert len(ends) == 3
        return too_late

    assert not all(others_had_ended(attempt) for attempt in range(3))


def test_requests_for_one_grammar_share_its_verdict(ruinous: GrammarCheck) -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            ruinous.check(regex("spin"))
        except (PromptError, GrammarsBusy) as error:
            said.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(said) == 20 and len(set(said)) == 1
    assert time.monotonic() - began < 2 * soon()


def test_a_helper_that_ended_is_started_again(ruinous: GrammarCheck) -> None:
    pid = ruinous.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ruinous.check(regex("fine"))
    assert ruinous.pid not in (None, pid)


def test_helpers_are_started_again_so_often_and_no_more(ruinous: GrammarCheck) -> None:
    with pytest.raises(GrammarsBusy, match="has ended"):
        ruinous.check(regex("end the helper"))
    with pytest.raises(GrammarsBusy, match="has ended"):
        ruinous.check(regex("end the helper!"))
    with pytest.raises(GrammarsBusy, match=f"{grammar_check.STARTS} times within a minute"):
        ruinous.check(regex("end the helper!!"))
    ruinous.check(GOOD)


def test_a_helper_that_hangs_is_replaced(
    ruinous: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "SILENCE_SECONDS", 0.3)
    pid = ruinous.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(GrammarsBusy, match="does not answer"):
        ruinous.check(regex("a" * 200_000))
    until(lambda: not alive(pid))
    monkeypatch.undo()
    ruinous.check(regex("fine"))


def test_a_helper_that_answers_others_is_waited_for(
    ruinous: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them waits for longer than a helper may be silent."""
    monkeypatch.setattr(grammar_check, "SILENCE_SECONDS", 2.0)
    pid, naps = ruinous.pid, [regex("nap" + "!" * number) for number in range(48)]
    began = time.monotonic()
    with ThreadPoolExecutor(len(naps)) as threads:
        list(threads.map(ruinous.check, naps))
    assert time.monotonic() - began > 2.5
    assert ruinous.pid == pid


def test_a_wait_ends_and_the_helper_goes_on(
    ruinous: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "VERDICT_SECONDS", 0.2)
    pid = ruinous.pid
    with pytest.raises(GrammarsBusy, match="too many grammars"):
        ruinous.check(regex("sleep"))
    monkeypatch.undo()
    ruinous.check(regex("fine"))
    assert ruinous.pid == pid


def test_children_end_with_the_helper_and_the_helper_with_its_owner(ruinous: GrammarCheck) -> None:
    pid = ruinous.pid
    assert pid is not None

    def children() -> list[str]:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    thread = threading.Thread(target=_quietly, args=(ruinous, "sleep"))
    thread.start()
    until(lambda: children() != [])
    (child,) = children()
    ruinous.close()
    until(lambda: not alive(pid) and not alive(int(child)))
    thread.join(60)


def _quietly(check: GrammarCheck, source: str) -> None:
    try:
        check.check(regex(source))
    except (PromptError, GrammarsBusy):
        pass


def test_a_model_that_can_have_no_grammar_is_a_clear_refusal(folder: Path, tmp_path: Path) -> None:
    for place, ends, says in (
        (folder, [], "no end token"),
        (tmp_path, [2], "no such file"),
    ):
        one = GrammarCheck(place, 512, ends)
        for source in ("a", "b"):
            with pytest.raises(PromptError, match=f"structured_outputs: .*{says}"):
                one.check(regex(source))
        one.close()


def test_more_grammars_than_can_wait_are_sent_away(
    ruinous: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 1)
    thread = threading.Thread(target=_quietly, args=(ruinous, "sleep"))
    thread.start()
    until(lambda: bool(ruinous._waiting))
    with pytest.raises(GrammarsBusy, match="1 grammars wait"):
        ruinous.check(regex("fine"))
    thread.join(60)
    ruinous.check(regex("fine"))


# --- verdicts and frames


def test_verdicts_stay_within_their_number_and_their_bytes() -> None:
    verdicts = Verdicts(entries=100, size=3000)
    for number in range(20_000):
        verdicts.put(number.to_bytes(16, "little"), None if number % 2 else "x" * (number % 90))
        assert len(verdicts) <= 100
        assert verdicts.size <= 3000
    assert (19_999).to_bytes(16, "little") in verdicts
    assert (0).to_bytes(16, "little") not in verdicts
    verdicts.put(b"long", "x" * 4000)
    assert len(verdicts) == 0
    assert verdicts.size == 0


def test_the_verdict_used_last_is_forgotten_last() -> None:
    verdicts = Verdicts(entries=2)
    verdicts.put(b"a", None)
    verdicts.put(b"b", "no")
    assert verdicts.get(b"a") is None
    verdicts.put(b"c", None)
    assert b"a" in verdicts and b"b" not in verdicts
    verdicts.put(b"a", "changed")
    assert verdicts.get(b"a") == "changed"
    assert len(verdicts) == 2


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    asks = [frame(Ask(number, GOOD)) for number in range(3)]
    stream = b"".join(asks)
    for size in (1, 3, 7, len(stream)):
        reader = FrameReader()
        bodies: list[bytes] = []
        for start in range(0, len(stream), size):
            bodies += reader.feed(stream[start : start + size])
        assert bodies == [one[4:] for one in asks]


def test_a_frame_that_is_too_long_is_no_frame() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(FrameReader().feed((MAX_FRAME + 1).to_bytes(4, "little")))

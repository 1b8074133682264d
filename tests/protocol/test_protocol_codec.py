"""Frames: fixed bytes for every message, round trips, and survival of anything else."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from support.protocol.golden_frames import GOLDEN, NESTED, SAMPLES, SCHEMA_HASH, pack

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire import codec
from penstock.protocol.wire.messages import membership, requests, steps, tokens

MESSAGES: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in codec.Message.__args__}
PREFIX = b"\x00" * codec.PREFIX_BYTES
UPDATE = (
    "the layout of {} changed: bump PROTOCOL_VERSION and update "
    "tests/support/protocol/golden_frames.py (Hello and Refused must never change)"
)


def strategy_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a declared type, within its limits."""
    match kind:
        case inspect.Metadata(type=inner):
            return strategy_of(inner)
        case inspect.StructType():
            parts = {field.name: strategy_of(field.type) for field in kind.fields}
            return st.builds(kind.cls, **parts)
        case inspect.UnionType(types=types):
            return st.one_of([strategy_of(each) for each in types])
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.EnumType(cls=enum_class):
            return st.sampled_from(enum_class)
        case inspect.ListType(item_type=item):
            most = 3 if kind.max_length is None else min(3, kind.max_length)
            return st.lists(strategy_of(item), min_size=kind.min_length or 0, max_size=most)
        case inspect.DictType(key_type=key, value_type=item):
            return st.dictionaries(strategy_of(key), strategy_of(item), max_size=3)
        case inspect.IntType():
            low = -(2**63) if kind.ge is None else kind.ge
            return st.integers(low, 2**64 - 1 if kind.le is None else kind.le)
        case inspect.FloatType():
            low = kind.ge if kind.gt is None else kind.gt
            open_below = kind.gt is not None
            return st.floats(low, kind.le, allow_nan=False, exclude_min=open_below)
        case inspect.StrType():
            most = min(40, kind.max_length or 40)
            return st.text(min_size=kind.min_length or 0, max_size=most)
        case inspect.BytesType():
            return st.binary(max_size=min(40, kind.max_length or 40))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise TypeError(kind)


def test_every_message_and_every_nested_struct_has_a_sample() -> None:
    assert SAMPLES.keys() == MESSAGES.keys()
    assert all(type(message) is MESSAGES[name] for name, (message, _) in SAMPLES.items())
    assert GOLDEN.keys() == {**SAMPLES, **NESTED}.keys()


@pytest.mark.parametrize("name", [*SAMPLES, *NESTED])
def test_the_bytes_of_a_message_are_the_golden_ones(name: str) -> None:
    message, row = {**SAMPLES, **NESTED}[name]
    golden = bytes.fromhex(GOLDEN[name])
    assert pack(row) == golden, "golden_frames.py contradicts itself"
    assert msgspec.msgpack.encode(message) == golden, UPDATE.format(name)
    assert msgspec.msgpack.decode(golden, type=type(message)) == message, UPDATE.format(name)


def test_the_schema_hash_is_that_of_the_golden_layout() -> None:
    assert codec.PROTOCOL_VERSION == 46
    assert codec.SCHEMA_HASH == SCHEMA_HASH, UPDATE.format("some message")


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in MESSAGES.values()]
    assert len(set(tags)) == len(tags)


def describe(kind: Any) -> str:
    out: dict[str, str] = {}
    codec._describe(inspect.type_info(kind), out)
    return "\n".join(out.values())


class Base(msgspec.Struct, array_like=True, tag=1):
    first: int
    second: int
    reason: tokens.EndReason


def test_the_schema_hash_sees_order_names_types_tags_and_ranges() -> None:
    def variant(*fields: tuple[str, Any], tag: int = 1) -> str:
        return describe(
            msgspec.defstruct(
                "Base", fields, array_like=True, tag=tag, module=__name__, namespace={}
            )
        )

    fields = [("first", int), ("second", int), ("reason", tokens.EndReason)]
    assert variant(*fields) == describe(Base)
    others = {
        variant(fields[1], fields[0], fields[2]),
        variant(("renamed", int), *fields[1:]),
        variant(("first", float), *fields[1:]),
        variant(("first", int | None), *fields[1:]),
        variant(("first", Annotated[int, msgspec.Meta(ge=0)]), *fields[1:]),
        variant(*fields, ("third", int)),
        variant(*fields, tag=2),
        variant(*fields[:2]),
    }
    assert len(others) == 8
    assert describe(Base) not in others


def test_two_structs_of_one_name_are_both_in_the_schema_hash() -> None:
    fields = [("text", str)]
    one, other = (
        msgspec.defstruct("Same", fields, tag="same", module=module) for module in ("a", "b")
    )
    both = msgspec.defstruct("Both", [("one", one), ("other", other)])
    assert describe(both).count("Same#same(") == 2


def test_the_schema_hash_is_the_same_in_every_process() -> None:
    code = "from penstock.protocol.wire import codec; print(codec.SCHEMA_HASH)"
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONOPTIMIZE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == codec.SCHEMA_HASH


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_survives_the_round_trip(name: str) -> None:
    encode = codec.Encoder(2**63 - 1)

    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(strategy_of(inspect.type_info(MESSAGES[name])))
    def check(message: Any) -> None:
        frame = encode(message)
        assert codec.decode(frame) == (2**63 - 1, message)
        assert codec.decode(memoryview(frame)) == (2**63 - 1, message)

    check()


@pytest.mark.parametrize("kind", [requests.Work, requests.TokenWork])
def test_nested_work_survives_the_round_trip(kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=50, deadline=None, database=None, derandomize=True)
    @given(strategy_of(inspect.type_info(kind)))
    def check(work: Any) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(work), type=kind) == work

    check()


def test_the_prefix_is_the_incarnation_in_little_endian() -> None:
    frame = codec.Encoder(0x0102030405060708)(SAMPLES["Taken"][0])
    assert frame[:8] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert frame[8:] == bytes.fromhex(GOLDEN["Taken"])


def test_a_frame_does_not_change_when_the_encoder_is_used_again() -> None:
    encode = codec.Encoder(1)
    big = encode(requests.Submit(1, 256, "ipc:///f", b"x" * 100_000))
    small = encode(SAMPLES["Goodbye"][0])
    assert len(big) > 100_000
    assert codec.decode(small)[1] == SAMPLES["Goodbye"][0]
    assert codec.decode(big)[1].work == b"x" * 100_000  # type: ignore[union-attr]


def test_an_encoder_works_on_after_a_value_that_cannot_be_encoded() -> None:
    encode = codec.Encoder(7)
    with pytest.raises((OverflowError, msgspec.MsgspecError)):
        encode(requests.Taken(2**64, 1))
    assert codec.decode(encode(requests.Taken(1, 2))) == (7, requests.Taken(1, 2))


def refuses(frame: bytes) -> str:
    with pytest.raises(codec.MalformedFrame) as caught:
        codec.decode(frame)
    return str(caught.value)


def survives(frame: bytes) -> None:
    """Either a message or ``MalformedFrame``, nothing else."""
    try:
        sender, message = codec.decode(frame)
    except codec.MalformedFrame:
        return
    assert isinstance(sender, int)
    assert type(message) in MESSAGES.values()


@settings(max_examples=250, deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_malformed_frame(data: bytes) -> None:
    survives(data)
    survives(PREFIX + data)


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(
    st.sampled_from(sorted(GOLDEN)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
    st.binary(max_size=20),
)
def test_damaged_frames_never_raise_anything_but_malformed_frame(
    name: str, changes: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    data = bytearray(PREFIX + bytes.fromhex(GOLDEN[name]))
    for position, value in changes:
        data[position % len(data)] = value
    survives(bytes(data[: cut or None]) + tail)
    survives(bytes(data))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_truncated_frame_is_malformed(name: str) -> None:
    frame = PREFIX + bytes.fromhex(GOLDEN[name])
    for length in range(len(frame)):
        refuses(frame[:length])


def test_a_frame_too_short_for_its_prefix_is_malformed() -> None:
    assert refuses(b"\x01" * 7)


NOT_A_MESSAGE = {
    "empty": b"",
    "nil": pack(None),
    "map": b"\x80",
    "array without a tag": pack([]),
    "unknown tag": pack([99, 1]),
    "negative tag": pack([-1, 1]),
    "text tag": pack(["hello", 1]),
    "float tag": pack([4.0, 1]),
    "float for an integer": pack([4, 1.5]),
    "NaN for an integer": pack([4, math.nan]),
    "infinity for an integer": pack([4, math.inf]),
    "bool for an integer": pack([4, True]),
    "text for an integer": pack([4, "1"]),
    "text for bytes": pack([20, 1, 256, "ipc:///f", "work"]),
    "bytes for text": pack([10, b"ipc:///f"]),
    "nil for text": pack([10, None]),
    "text for a flag": pack([42, 1, 2, "yes", [], [], [], []]),
    "number for a list": pack([25, 1, 1, 1]),
    "unknown end reason": pack(
        [30, [1], [0], [1], [0], [0], b"", [[0, 9, None, "", 0]], [0]],
    ),
    "missing fields": pack([23, 1]),
    "bad UTF-8": b"\x92\x0a\xa2\xff\xfe",
    "UTF-8 surrogate": b"\x92\x0a\xa3\xed\xa0\x80",
    "reserved byte": b"\xc1",
    "extension": b"\x92\x04\xd4\x01\x00",
    "timestamp": b"\x92\x04\xd6\xff\x00\x00\x00\x00",
    "nested 1000 deep": b"\x92\x04" + b"\x91" * 1000 + b"\xc0",
    "nested a million deep": b"\x91" * 1_000_000,
    "a million deep in an unknown field": b"\x93\x04\x01" + b"\x91" * 1_000_000,
    "maps a million deep": b"\x93\x04\x01" + b"\x81\x01" * 1_000_000,
    "4 G items declared": b"\xdd\xff\xff\xff\xff\x04",
    "4 G items in a field": b"\x94\x19\xdd\xff\xff\xff\xff",
    "4 GiB of bytes declared": b"\x95\x14\x01\x01\xa0\xc6\xff\xff\xff\xff",
    "4 GiB of text declared": b"\x92\x0a\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("case", NOT_A_MESSAGE)
def test_what_is_no_message_is_malformed_with_a_reason(case: str) -> None:
    assert refuses(PREFIX + NOT_A_MESSAGE[case])


def test_a_struct_that_is_no_message_is_malformed() -> None:
    for name in NESTED:
        if not name.startswith("Work"):
            refuses(PREFIX + bytes.fromhex(GOLDEN[name]))


def test_the_frame_of_one_type_is_never_taken_for_another() -> None:
    for name, kind in MESSAGES.items():
        _, message = codec.decode(PREFIX + bytes.fromhex(GOLDEN[name]))
        assert type(message) is kind


def test_sampling_numbers_outside_their_range_do_not_decode() -> None:
    good = [0.5, 0.25, 40, -1, 2, 100, ["\n"], [2], True]
    bad: dict[int, list[Any]] = {
        0: [math.nan, math.inf, -math.inf, -0.1, 101.0, "1"],
        1: [math.nan, 1.1, -1.0],
        2: [-2, 2**31, 1.0, 2**63],
        3: [2**63, -0.5],
        4: [0, 129, None],
        5: [-1, 2**31],
        6: [[""], ["x" * 513], ["x"] * 17, "x"],
        7: [[-1], [2**31], [1] * 65],
        8: [1, None],
    }
    decoder = msgspec.msgpack.Decoder(SamplingParams)
    assert decoder.decode(pack(good))
    for position, values in bad.items():
        for value in values:
            row = [*good[:position], value, *good[position + 1 :]]
            with pytest.raises(msgspec.ValidationError):
                decoder.decode(pack(row))


@pytest.mark.parametrize(
    ("priority", "cache_salt"), [(2**31, ""), (-(2**31) - 1, ""), (0.5, ""), (0, "x" * 129)]
)
def test_a_priority_or_cache_salt_outside_its_range_does_not_decode(
    priority: Any, cache_salt: str
) -> None:
    kind = requests.RequestHead
    row = NESTED["Work text"][1][0][: kind.__struct_fields__.index("priority")]
    decoder = msgspec.msgpack.Decoder(kind)
    assert decoder.decode(pack([*row, 5, "é" * 128]))
    assert decoder.decode(pack(row)) == decoder.decode(pack([*row, 0, ""]))
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(pack([*row, priority, cache_salt]))


def test_a_decode_step_that_changes_nothing_is_a_few_bytes() -> None:
    plan = steps.StepPlan(1, 5, False, [], [], [], [])
    assert len(codec.Encoder(1)(plan)) < 24


def test_the_longest_plain_integers_pass_and_longer_ones_are_malformed() -> None:
    assert codec.decode(PREFIX + pack([4, 2**64 - 1]))[1] == membership.BeatAnswer(2**64 - 1)
    refuses(PREFIX + b"\x92\x04\xc4\x09" + b"\xff" * 9)
    assert struct.calcsize("<Q") == codec.PREFIX_BYTES

"""One message of every type, the plain list that it must become, and an own msgpack writer.

The lists are written by hand from the declarations (tag first, fields in order), the writer from
the specification (https://github.com/msgpack/msgpack/blob/master/spec.md), so that neither shares
code with what is tested.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock.protocol.grammar.request import Grammar
from penstock.protocol.logprobs import NamedLogprobs, PackedLogprobs
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages import administration as a
from penstock.protocol.wire.messages import cache_hints as h
from penstock.protocol.wire.messages import engine as e
from penstock.protocol.wire.messages import hand_overs as o
from penstock.protocol.wire.messages import kv_tier as k
from penstock.protocol.wire.messages import membership as m
from penstock.protocol.wire.messages import requests as r
from penstock.protocol.wire.messages import steps as s
from penstock.protocol.wire.messages import tokens as t


def pack(value: Any) -> bytes:
    """MessagePack of plain Python values, always in the shortest form."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _pack_int(value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return _head(len(data), 0xA0, 32, 0xD9) + data
        case bytes():
            return _head(len(value), 0, 0, 0xC4) + value
        case list():
            return _head(len(value), 0x90, 16, None) + b"".join(pack(v) for v in value)
        case dict():
            parts = b"".join(pack(key) + pack(one) for key, one in value.items())
            return _head(len(value), 0x80, 16, None) + parts
    raise TypeError(type(value).__name__)


def _pack_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack(">b", value)
    ladder = "BHIQ" if value >= 0 else "bhiq"
    for index, letter in enumerate(ladder):
        try:
            return bytes([(0xCC if value >= 0 else 0xD0) + index]) + struct.pack(
                ">" + letter, value
            )
        except struct.error:
            continue
    raise OverflowError(value)


def _head(size: int, fixed: int, fixed_limit: int, small: int | None) -> bytes:
    if size < fixed_limit:
        return bytes([fixed | size])
    if small is not None:
        if size < 256:
            return bytes([small, size])
        return bytes([small + 1]) + struct.pack(">H", size)
    return b"\xdc" + struct.pack(">H", size)


_GROUPS = [e.LayerGroup(), e.LayerGroup("window", 512)]
_GROUPS_ROW: list[Any] = [["full", 0], ["window", 512]]
_SIZES: list[Any] = [1000, 16, 64, 2048, 4096, 32000, 5]
_ADAPTERS = [e.Adapter("sql", "ab12", 20)]
_CAPACITY = m.Capacity(*_SIZES, _GROUPS, "whole", 3, ["embed"], False, ["no"], _ADAPTERS, [2], True)
_ADAPTERS_ROW: list[Any] = [["sql", "ab12", 20]]
_CAPACITY_ROW: list[Any] = [
    *_SIZES, _GROUPS_ROW, "whole", 3, ["embed"], False, ["no"], _ADAPTERS_ROW, [2],
    True,
]  # fmt: skip
_DEMAND = m.Demand(70, 6, 70000, 900, 64, "me", 2)
_DEMAND_ROW: list[Any] = [70, 6, 70000, 900, 64, "me", 2]
_SLEEPER = m.Sleeper("tiny", ["t"], "asleep", _CAPACITY, 2.5, "none", True)
_SLEEPER_ROW: list[Any] = ["tiny", ["t"], "asleep", _CAPACITY_ROW, 2.5, "none", True]
_IDENTITY = m.Identity(
    4242, "host-a", "0", 1, "qwen", ["qwen", "me"], "127.0.0.1:8000", "c0de", "h:1", "decode"
)
_IDENTITY_ROW: list[Any] = [
    4242, "host-a", "0", 1, "qwen", ["qwen", "me"], "127.0.0.1:8000", "c0de", "h:1", "decode",
]  # fmt: skip
_PEER = m.Peer("worker", "ipc:///run/w.sock", 7, _IDENTITY, "ready", "", _CAPACITY, 3)
_PEER_ROW: list[Any] = [
    "worker", "ipc:///run/w.sock", 7, _IDENTITY_ROW, "ready", "", _CAPACITY_ROW, 3,
]  # fmt: skip
_REPORT = m.MetricsReport(
    [m.MetricSample("steps_total", ["a"], [1.5, 2.0], [m.Exemplar(1, "4bf9", 0.25, 8.0)])]
)
_REPORT_ROW: list[Any] = [[["steps_total", ["a"], [1.5, 2.0], [[1, "4bf9", 0.25, 8.0]]]]]
_ID = b"\x05\x00\x00\x00"
_GRAMMAR = Grammar("regex", "a+", True, "response_format", _ID, _ID, True, True)
_GRAMMAR_ROW: list[Any] = ["regex", "a+", True, "response_format", _ID, _ID, True, True]
_PARAMS = SamplingParams(
    temperature=0.5, top_p=0.25, top_k=40, seed=-1, n=2, max_tokens=100, stop=["\n"],
    stop_token_ids=[2], ignore_eos=True, min_p=0.125, presence_penalty=1.5,
    frequency_penalty=-1.5, repetition_penalty=1.25, min_tokens=3, logit_bias={7: -2.0},
    allowed_token_ids=[7, 8], bad_words=["dam"], include_stop_str_in_output=True,
    skip_special_tokens=False, spaces_between_special_tokens=False, truncate_prompt_tokens=9,
    logprobs=2, prompt_logprobs=0, echo=True,
    structured_outputs=_GRAMMAR, dynatemp_min=0.5, dynatemp_max=1.5, dynatemp_exponent=2.0,
    nsigma=1.5, top_a=0.25, tfs=0.75, eta_cutoff=0.125, epsilon_cutoff=0.0625, typical_p=0.5,
    smoothing_factor=0.25, smoothing_curve=1.5, xtc_threshold=0.25, xtc_probability=0.5,
    mirostat_mode=2, mirostat_tau=4.0, mirostat_eta=0.25, skew=-0.5, temperature_last=True,
    sampler_order=[6, "xtc"], dry_multiplier=0.5, dry_base=1.25, dry_allowed_length=3,
    dry_range=64, dry_sequence_breakers=["."], no_repeat_ngram_size=4, banned_strings=["dam"],
)  # fmt: skip
_PARAMS_ROW: list[Any] = [
    0.5, 0.25, 40, -1, 2, 100, ["\n"], [2], True, 0.125, 1.5, -1.5, 1.25, 3, {7: -2.0}, [7, 8],
    ["dam"], True, False, False, 9, 2, 0, True, _GRAMMAR_ROW, 0.5, 1.5, 2.0, 1.5, 0.25, 0.75,
    0.125, 0.0625, 0.5, 0.25, 1.5, 0.25, 0.5, 2, 4.0, 0.25, -0.5, True, [6, "xtc"], 0.5, 1.25, 3,
    64, ["."], 4, ["dam"],
]  # fmt: skip
_NO_PARAMS_ROW: list[Any] = [
    None, None, None, None, 1, None, [], [], False, None, 0.0, 0.0, None, 0, {}, None, [], False,
    True, True, None, None, None, False, None, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0,
    1.0, 0.1, 0.0, 0, 5.0, 0.1, 0.0, False, [], 0.0, 1.75, 2, 0, ["\n", ":", '"', "*"], 0, [],
]  # fmt: skip
_IDS = b"\x01\x00\x00\x00\xff\x7f\x00\x00"
_PACKED = PackedLogprobs(2, _IDS)
_ADJUSTMENTS = s.SlotAdjustments(
    1.25, -1.5, 1.5, _IDS, _IDS, _IDS, [_IDS], 3, _IDS, _GRAMMAR,
    [s.SamplerStage("xtc", [0.25, 0.5])], s.Dry(0.5, 1.75, 2, 64, _IDS), 4, _IDS, 9,
)  # fmt: skip
_SAMPLING = s.SlotSampling(0.5, 40, 0.25, 2**64 - 1, 0.125, _ADJUSTMENTS, 5)
_SAMPLING_ROW: list[Any] = [
    0.5, 40, 0.25, 2**64 - 1, 0.125,
    [
        *(1.25, -1.5, 1.5, _IDS, _IDS, _IDS, [_IDS], 3, _IDS, _GRAMMAR_ROW),
        *([["xtc", [0.25, 0.5]]], [0.5, 1.75, 2, 64, _IDS], 4, _IDS, 9),
    ],
    5,
]  # fmt: skip
_SLOT = s.NewSlot(3, _IDS, 1, 0, [5, 6], b"sampling", 1, 2, 4, 0, "embed", 7, "ab12", "00-a",
    99, b"corpus", 20,
)  # fmt: skip
_SLOT_ROW: list[Any] = [3, _IDS, 1, 0, [5, 6], b"sampling", 1, 2, 4, 0, "embed", 7, "ab12", "00-a",
    99, b"corpus", 20,
]  # fmt: skip
_HEAD = r.RequestHead(
    "req-1", "qwen", "embed", "chat", "lora", "me", -5, "salt", 2.5, 0.5, "00-a-b-01", ["d1"],
    False, 6, True, False, 3, True, 20,
)  # fmt: skip
_HEAD_ROW: list[Any] = [
    "req-1", "qwen", "embed", "chat", "lora", "me", -5, "salt", 2.5, 0.5, "00-a-b-01", ["d1"],
    False, 6, True, False, 3, True, 20,
]  # fmt: skip
_PLAIN_HEAD_ROW: list[Any] = [
    "", "", "generate", "text", "", "", 0, "", None, 0.0, "", [], True, 1, False, True, 0,
    False, 0,
]  # fmt: skip
BIG = 2**63 - 1

_EVENTS: list[t.Event] = [
    t.Text("a"), t.Reasoning("b"),
    t.ToolCallOpened(0, "call-1", "f"), t.ToolArguments(0, "{}"), t.Vector(_IDS), t.Scores(_IDS),
    t.TokenIds(_IDS),
]  # fmt: skip
_EVENT_ROWS: list[Any] = [
    ["text", "a"], ["reasoning", "b"],
    ["call", 0, "call-1", "f"], ["arguments", 0, "{}"], ["vector", _IDS],
    ["scores", _IDS], ["ids", _IDS],
]  # fmt: skip

SAMPLES: dict[str, tuple[Any, list[Any]]] = {
    "Hello": (
        m.Hello("worker", "ipc:///run/w.sock", BIG, 1, "0123456789abcdef", b"\x00\xff"),
        [1, "worker", "ipc:///run/w.sock", BIG, 1, "0123456789abcdef", b"\x00\xff"],
    ),
    "Refused": (m.Refused("old", "upgrade"), [2, "old", "upgrade"]),
    "Beat": (
        m.Beat(
            *("tcp://h:1", 9, "loading", "45 %", 70000, 0.25, 10.0, 5),
            *(_CAPACITY, b"m", 2, [_DEMAND], ["me"]),
            m.PrefixReport(3, 300, b"heldheld", b"gonegone"),
            *(["you"], [_SLEEPER]),
        ),
        [
            *(3, "tcp://h:1", 9, "loading", "45 %", 70000, 0.25, 10.0, 5),
            *(_CAPACITY_ROW, b"m", 2, [_DEMAND_ROW], ["me"]),
            *([3, 300, b"heldheld", b"gonegone"], ["you"], [_SLEEPER_ROW]),
        ],
    ),
    "BeatAnswer": (m.BeatAnswer(BIG, [_DEMAND], 300), [4, BIG, [_DEMAND_ROW], 300]),
    "WhoAreYou": (m.WhoAreYou(5), [5, 5]),
    "Goodbye": (m.Goodbye(200), [6, 200]),
    "Died": (m.Died(65536, "host-a"), [7, 65536, "host-a"]),
    "Fenced": (m.Fenced(1), [8, 1]),
    "Members": (
        m.Members(9, 3, [_PEER], [11, 12], 2, [200], ["me"], ["you"], [_SLEEPER]),
        [9, 9, 3, [_PEER_ROW], [11, 12], 2, [200], ["me"], ["you"], [_SLEEPER_ROW]],
    ),
    "MetricsQuery": (m.MetricsQuery("ipc:///f"), [10, "ipc:///f"]),
    "MetricsAnswer": (
        m.MetricsAnswer([m.ProcessMetrics("router", 0, _REPORT, 3)]),
        [11, [["router", 0, _REPORT_ROW, 3]]],
    ),
    "Trace": (m.Trace("ipc:///o", 2.5), [12, "ipc:///o", 2.5]),
    "Traced": (
        m.Traced(["plan"], b"events", 300, True, "busy"),
        [13, ["plan"], b"events", 300, True, "busy"],
    ),
    "Ask": (
        a.Ask("ipc:///f", 7, "find_request", b"about"),
        [14, "ipc:///f", 7, "find_request", b"about"],
    ),
    "Told": (a.Told(7, b"answer"), [15, 7, b"answer"]),
    "Submit": (
        r.Submit(1, 256, "ipc:///f", b"work", "qwen", 2, "00-a"),
        [20, 1, 256, "ipc:///f", b"work", "qwen", 2, "00-a"],
    ),
    "Taken": (r.Taken(1, 256), [21, 1, 256]),
    "Enqueue": (
        r.Enqueue(
            1, 257, "ipc:///t", b"work", "qwen", b"prefix", 2, 100, "embed", "00-a", "d1", True,
            True,
        ),
        [
            22, 1, 257, "ipc:///t", b"work", "qwen", b"prefix", 2, 100, "embed", "00-a", "d1", True,
            True,
        ],
    ),
    "Accepted": (r.Accepted(1, 257, _IDS, 16, [1, 2]), [23, 1, 257, _IDS, 16, [1, 2]]),
    "Rejected": (
        r.Rejected(1, 257, 429, "overloaded_error", "busy", "n", 1.5, True, "full", 3),
        [24, 1, 257, 429, "overloaded_error", "busy", "n", 1.5, True, "full", 3],
    ),
    "Cancel": (r.Cancel([1, 2], [256, 512], [-1, 0]), [25, [1, 2], [256, 512], [-1, 0]]),
    "Holding": (r.Holding("ipc:///t", [1], [256]), [26, "ipc:///t", [1], [256]]),
    "Unknown": (r.Unknown([1], [256], [2], True), [27, [1], [256], [2], True]),
    "TokenBatch": (
        t.TokenBatch(
            [1], [0], [256], [7], [2], _IDS, [t.End(0, t.EndReason.STOP, 2, "", 0, 7, 3, 5, 6)],
            [t.RowStart(0, 16, 0.25, "0", 16, 0.5)],
            [t.RowLogprobs(0, _PACKED, _PACKED)],
            [t.RowPooled(0, _IDS)],
        ),
        [
            30, [1], [0], [256], [7], [2], _IDS, [[0, 1, 2, "", 0, 7, 3, 5, 6]],
            [[0, 16, 0.25, "0", 16, 0.5]],
            [[0, [2, _IDS], [2, _IDS]]],
            [[0, _IDS]],
        ],
    ),
    "Continued": (t.Continued([1], [257]), [32, [1], [257]]),
    "TextBatch": (
        t.TextBatch(
            [1], [0], [256], [7], [2], _IDS, ["é€𝄞"], [3],
            [t.End(0, t.EndReason.ERROR, "</s>", "gone", 500, 300)],
            [t.RowStart(0, 16, 0.25)],
            [t.RowDetails(0, NamedLogprobs(2, _IDS, [b"a"], [4]), None, "echo")],
            [t.RowEvents(0, _EVENTS, t.Released(3, 1, 1, 2, 5))],
        ),
        [
            31, [1], [0], [256], [7], [2], _IDS, ["é€𝄞"], [3],
            [[0, 4, "</s>", "gone", 500, 300, -1, 0, 0]], [[0, 16, 0.25, "", 0, -1.0]],
            [[0, [2, _IDS, [b"a"], [4]], None, "echo"]],
            [[0, _EVENT_ROWS, [3, 1, 1, 2, 5]]],
        ],
    ),
    "Attach": (
        s.Attach(1, "ipc:///s", [7, 300], "h:1"), [40, 1, "ipc:///s", [7, 300], "h:1"]
    ),
    "Attached": (
        s.Attached(
            1, 2, e.EngineSizes(*_SIZES, _GROUPS, "all", 2),
            e.StepShape([256, 128], 512, 1.5, 0.5, 4.0, 0.75, 0.25, 0.125), ["embed"], False,
            ["no"], _ADAPTERS, b"space", 300, 70, 2, ["ab12"], True,
        ),
        [
            41, 1, 2, [*_SIZES, _GROUPS_ROW, "all", 2],
            [[256, 128], 512, 1.5, 0.5, 4.0, 0.75, 0.25, 0.125], ["embed"], False, ["no"],
            _ADAPTERS_ROW, b"space", 300, 70, 2, ["ab12"], True,
        ],
    ),
    "LoadAdapter": (s.LoadAdapter("sql", "/lora/sql"), [45, "sql", "/lora/sql"]),
    "AdapterLoaded": (
        s.AdapterLoaded("sql", "/lora/sql", "ab12", "no", 20),
        [46, "sql", "/lora/sql", "ab12", "no", 20],
    ),
    "BringAdapter": (s.BringAdapter(3, "ab12", ["cd34"]), [48, 3, "ab12", ["cd34"]]),
    "AdapterBrought": (s.AdapterBrought(3, "ab12", "no"), [49, 3, "ab12", "no"]),
    "DropAdapter": (s.DropAdapter("ab12"), [47, "ab12"]),
    "NameAdapters": (s.NameAdapters(_ADAPTERS), [50, _ADAPTERS_ROW]),
    "StepPlan": (
        s.StepPlan(
            1, 2, True, [0], [_SLOT], [1, 9], [s.Chunk(3, 0, 2, True, [7])],
            [_IDS], 1,
        ),
        [
            *(42, 1, 2, True, [0], [_SLOT_ROW], [1, 9], [[3, 0, 2, True, [7]]]),
            [_IDS], 1,
        ],
    ),
    "StepResult": (
        s.StepResult(
            1, 2, _IDS, [1], 0.125,
            [s.SampledLogprobs(1, _PACKED)], [s.ChunkLogprobs(3, 16, _PACKED)],
            [s.RowFailure(1, "no", 503)], [2], b"\x01", [t.RowPooled(1, _IDS)], b"\x02",
        ),
        [
            *(43, 1, 2, _IDS, [1], 0.125, [[1, [2, _IDS]]], [[3, 16, [2, _IDS]]]),
            *([[1, "no", 503]], [2], b"\x01", [[1, _IDS]], b"\x02"),
        ],
    ),
    "StepFailed": (s.StepFailed(1, 2, "boom", True), [44, 1, 2, "boom", True]),
    "TierOpen": (k.TierOpen(b"space", 300, 70, "ipc:///s"), [60, b"space", 300, 70, "ipc:///s"]),
    "TierOpened": (
        k.TierOpened(b"space", "/proc/7/fd/9", 300, [5, 200], "no"),
        [61, b"space", "/proc/7/fd/9", 300, [5, 200], "no"],
    ),
    "TierKeys": (k.TierKeys(b"space", b"come", b"gone"), [62, b"space", b"come", b"gone"]),
    "TierGet": (k.TierGet(7, b"keys", "ipc:///s"), [63, 7, b"keys", "ipc:///s"]),
    "TierGot": (k.TierGot(7, [5, 200], True), [64, 7, [5, 200], True]),
    "TierRelease": (k.TierRelease(7, "ipc:///s"), [65, 7, "ipc:///s"]),
    "TierStored": (
        k.TierStored(b"keys", [5], [200], "ipc:///s"), [66, b"keys", [5], [200], "ipc:///s"],
    ),
    "TierLent": (k.TierLent([5, 200]), [67, [5, 200]]),
    "TierDrop": (k.TierDrop(b"keys", True, "ipc:///s"), [68, b"keys", True, "ipc:///s"]),
    "KVCopies": (
        k.KVCopies(1, 2, 7, "/proc/7/fd/9", True, [3], [200], b"keys"),
        [70, 1, 2, 7, "/proc/7/fd/9", True, [3], [200], b"keys"],
    ),
    "KVCopied": (
        k.KVCopied(1, 7, 3, 0.25, True, "gone"), [71, 1, 7, 3, 0.25, True, "gone"],
    ),
    "KVForget": (k.KVForget(1, 7), [72, 1, 7]),
    "DecodeRoom": (o.DecodeRoom(6, 900), [80, 6, 900]),
}  # fmt: skip
"""Messages, by name."""

NESTED: dict[str, tuple[Any, list[Any]]] = {
    "Identity": (_IDENTITY, _IDENTITY_ROW),
    "MetricsReport": (_REPORT, _REPORT_ROW),
    "Work chat": (
        r.Work(
            _HEAD, r.Chat(b"[]", b"{}"), _PARAMS,
            [r.ChoiceState(0, _IDS, t.Released(4, 1, 0, 9), b"own")],
            r.OutputFormat(b"[{}]", "required", ["f"], ["g"], False, "hidden", 900), True,
            r.PoolingParams(64, True, False, "query", "document", 512),
            h.CacheHints([h.Breakpoint(300), h.Breakpoint(3600, 2, 40)], True),
        ),
        [
            _HEAD_ROW, ["chat", b"[]", b"{}"], _PARAMS_ROW, [[0, _IDS, [4, 1, 0, 9, 0], b"own"]],
            [b"[{}]", "required", ["f"], ["g"], False, "hidden", 900], True,
            [64, True, False, "query", "document", 512],
            [[[300, None, 0], [3600, 2, 40]], True],
        ],
    ),
    "Work text": (
        r.Work(r.RequestHead(), r.PromptText("hi", False), _PARAMS, [r.ChoiceState(0)]),
        [
            _PLAIN_HEAD_ROW, ["text", "hi", False], _PARAMS_ROW, [[0, b"", [0, 0, 0, 0, 0], b""]],
            None, False, None, None,
        ],
    ),
    "Work tokens": (
        r.Work(r.RequestHead(), r.Tokens(_IDS), SamplingParams(), []),
        [_PLAIN_HEAD_ROW, ["tokens", _IDS], _NO_PARAMS_ROW, [], None, False, None, None],
    ),
    "Work pair": (
        r.Work(r.RequestHead(), r.Pair("a", "b"), SamplingParams(), []),
        [_PLAIN_HEAD_ROW, ["pair", "a", "b"], _NO_PARAMS_ROW, [], None, False, None, None],
    ),
    "Work inputs": (
        r.Work(
            r.RequestHead(), r.Inputs([r.Tokens(_IDS), r.PromptText("hi"), r.Pair("a", "b")]),
            SamplingParams(), [],
        ),
        [
            _PLAIN_HEAD_ROW,
            ["inputs", [["tokens", _IDS], ["text", "hi", True], ["pair", "a", "b"]]],
            _NO_PARAMS_ROW, [], None, False, None, None,
        ],
    ),
    "TokenWork": (
        r.TokenWork(
            *(_HEAD, _IDS, b"sampling", [r.ChoiceState(1)], [2, 3], 16, 5, True, True, 2),
            *(b"prefix", [1, 2], [0, 7], True, [h.RetainedSpan(900, 300)], True),
        ),
        [
            *(_HEAD_ROW, _IDS, b"sampling", [[1, b"", [0, 0, 0, 0, 0], b""]], [2, 3], 16, 5),
            *(True, True, 2),
            b"prefix", [1, 2], [0, 7], True, [[900, 300]], True,
        ],
    ),
    "SlotSampling": (_SAMPLING, _SAMPLING_ROW),
}  # fmt: skip
"""Structs that travel encoded inside a message's bytes field."""

SCHEMA_HASH = "6cb7b9e2641ba0d5"
"""The schema hash of this protocol version."""

GOLDEN: dict[str, str] = {
    "Hello": (
        "9701a6776f726b6572b16970633a2f2f2f72756e2f772e736f636bcf7fffffffffffffff01b03031323334"
        "3536373839616263646566c40200ff"
    ),
    "Refused": "9302a36f6c64a775706772616465",
    "Beat": (
        "dc001103a97463703a2f2f683a3109a76c6f6164696e67a434352025ce00011170cb3fd0000000000000cb"
        "402400000000000005dc0010cd03e81040cd0800cd1000cd7d00059292a466756c6c0092a677696e646f77"
        "cd0200a577686f6c650391a5656d626564c291a26e6f9193a373716ca461623132149102c3c4016d029197"
        "4606ce00011170cd038440a26d650291a26d659403cd012cc40868656c6468656c64c408676f6e65676f6e"
        "6591a3796f759197a474696e7991a174a661736c656570dc0010cd03e81040cd0800cd1000cd7d00059292"
        "a466756c6c0092a677696e646f77cd0200a577686f6c650391a5656d626564c291a26e6f9193a373716ca4"
        "61623132149102c3cb4004000000000000a46e6f6e65c3"
    ),
    "BeatAnswer": "9404cf7fffffffffffffff91974606ce00011170cd038440a26d6502cd012c",
    "WhoAreYou": "920505",
    "Goodbye": "9206ccc8",
    "Died": "9307ce00010000a6686f73742d61",
    "Fenced": "920801",
    "Members": (
        "9a0909039198a6776f726b6572b16970633a2f2f2f72756e2f772e736f636b079acd1092a6686f73742d61"
        "a13001a47177656e92a47177656ea26d65ae3132372e302e302e313a38303030a463306465a3683a31a664"
        "65636f6465a57265616479a0dc0010cd03e81040cd0800cd1000cd7d00059292a466756c6c0092a677696e"
        "646f77cd0200a577686f6c650391a5656d626564c291a26e6f9193a373716ca461623132149102c303920b"
        "0c0291ccc891a26d6591a3796f759197a474696e7991a174a661736c656570dc0010cd03e81040cd0800cd"
        "1000cd7d00059292a466756c6c0092a677696e646f77cd0200a577686f6c650391a5656d626564c291a26e"
        "6f9193a373716ca461623132149102c3cb4004000000000000a46e6f6e65c3"
    ),
    "MetricsQuery": "920aa86970633a2f2f2f66",
    "MetricsAnswer": (
        "920b9194a6726f7574657200919194ab73746570735f746f74616c91a16192cb3ff8000000000000cb4000"
        "000000000000919401a434626639cb3fd0000000000000cb402000000000000003"
    ),
    "Trace": "930ca86970633a2f2f2f6fcb4004000000000000",
    "Traced": "960d91a4706c616ec4066576656e7473cd012cc3a462757379",
    "Ask": "950ea86970633a2f2f2f6607ac66696e645f72657175657374c40561626f7574",
    "Told": "930f07c406616e73776572",
    "Submit": "981401cd0100a86970633a2f2f2f66c404776f726ba47177656e02a430302d61",
    "Taken": "931501cd0100",
    "Enqueue": (
        "9e1601cd0101a86970633a2f2f2f74c404776f726ba47177656ec4067072656669780264a5656d626564a4"
        "30302d61a26431c3c3"
    ),
    "Accepted": "961701cd0101c40801000000ff7f000010920102",
    "Rejected": (
        "9b1801cd0101cd01adb06f7665726c6f616465645f6572726f72a462757379a16ecb3ff8000000000000c3"
        "a466756c6c03"
    ),
    "Cancel": "941992010292cd0100cd020092ff00",
    "Holding": "941aa86970633a2f2f2f74910191cd0100",
    "Unknown": "951b910191cd01009102c3",
    "TokenBatch": (
        "9b1e9101910091cd010091079102c40801000000ff7f00009199000102a0000703050691960010cb3fd000"
        "0000000000a13010cb3fe00000000000009193009202c40801000000ff7f00009202c40801000000ff7f00"
        "00919200c40801000000ff7f0000"
    ),
    "Continued": "9320910191cd0101",
    "TextBatch": (
        "9d1f9101910091cd010091079102c40801000000ff7f000091a9c3a9e282acf09d849e910391990004a43c"
        "2f733ea4676f6e65cd01f4cd012cff000091960010cb3fd0000000000000a000cbbff00000000000009194"
        "009402c40801000000ff7f000091c401619104c0a46563686f9193009792a474657874a16192a972656173"
        "6f6e696e67a16294a463616c6c00a663616c6c2d31a16693a9617267756d656e747300a27b7d92a6766563"
        "746f72c40801000000ff7f000092a673636f726573c40801000000ff7f000092a3696473c40801000000ff"
        "7f0000950301010205"
    ),
    "Attach": "952801a86970633a2f2f2f739207cd012ca3683a31",
    "Attached": (
        "9f2901029acd03e81040cd0800cd1000cd7d00059292a466756c6c0092a677696e646f77cd0200a3616c6c"
        "029892cd0100cc80cd0200cb3ff8000000000000cb3fe0000000000000cb4010000000000000cb3fe80000"
        "00000000cb3fd0000000000000cb3fc000000000000091a5656d626564c291a26e6f9193a373716ca46162"
        "313214c4057370616365cd012c460291a461623132c3"
    ),
    "LoadAdapter": "932da373716ca92f6c6f72612f73716c",
    "AdapterLoaded": "962ea373716ca92f6c6f72612f73716ca461623132a26e6f14",
    "BringAdapter": "943003a46162313291a463643334",
    "AdapterBrought": "943103a461623132a26e6f",
    "DropAdapter": "922fa461623132",
    "NameAdapters": "92329193a373716ca46162313214",
    "StepPlan": (
        "9a2a0102c3910091dc001103c40801000000ff7f00000100920506c40873616d706c696e6701020400a565"
        "6d62656407a461623132a430302d6163c406636f72707573149201099195030002c3910791c40801000000"
        "ff7f000001"
    ),
    "StepResult": (
        "9d2b0102c40801000000ff7f00009101cb3fc00000000000009192019202c40801000000ff7f0000919303"
        "109202c40801000000ff7f0000919301a26e6fcd01f79102c40101919201c40801000000ff7f0000c40102"
    ),
    "StepFailed": "952c0102a4626f6f6dc3",
    "TierOpen": "953cc4057370616365cd012c46a86970633a2f2f2f73",
    "TierOpened": "963dc4057370616365ac2f70726f632f372f66642f39cd012c9205ccc8a26e6f",
    "TierKeys": "943ec4057370616365c404636f6d65c404676f6e65",
    "TierGet": "943f07c4046b657973a86970633a2f2f2f73",
    "TierGot": "9440079205ccc8c3",
    "TierRelease": "934107a86970633a2f2f2f73",
    "TierStored": "9542c4046b657973910591ccc8a86970633a2f2f2f73",
    "TierLent": "92439205ccc8",
    "TierDrop": "9444c4046b657973c3a86970633a2f2f2f73",
    "KVCopies": "9946010207ac2f70726f632f372f66642f39c3910391ccc8c4046b657973",
    "KVCopied": "9747010703cb3fd0000000000000c3a4676f6e65",
    "KVForget": "93480107",
    "DecodeRoom": "935006cd0384",
    "Identity": (
        "9acd1092a6686f73742d61a13001a47177656e92a47177656ea26d65ae3132372e302e302e313a38303030"
        "a463306465a3683a31a66465636f6465"
    ),
    "MetricsReport": (
        "919194ab73746570735f746f74616c91a16192cb3ff8000000000000cb4000000000000000919401a43462"
        "6639cb3fd0000000000000cb4020000000000000"
    ),
    "Work chat": (
        "98dc0013a57265712d31a47177656ea5656d626564a463686174a46c6f7261a26d65fba473616c74cb4004"
        "000000000000cb3fe0000000000000a930302d612d622d303191a26431c206c3c203c31493a463686174c4"
        "025b5dc4027b7ddc0033cb3fe0000000000000cb3fd000000000000028ff026491a10a9102c3cb3fc00000"
        "00000000cb3ff8000000000000cbbff8000000000000cb3ff4000000000000038107cbc000000000000000"
        "92070891a364616dc3c2c2090200c398a57265676578a2612bc3af726573706f6e73655f666f726d6174c4"
        "0405000000c40405000000c3c3cb3fe0000000000000cb3ff8000000000000cb4000000000000000cb3ff8"
        "000000000000cb3fd0000000000000cb3fe8000000000000cb3fc0000000000000cb3fb0000000000000cb"
        "3fe0000000000000cb3fd0000000000000cb3ff8000000000000cb3fd0000000000000cb3fe00000000000"
        "0002cb4010000000000000cb3fd0000000000000cbbfe0000000000000c39206a3787463cb3fe000000000"
        "0000cb3ff4000000000000034091a12e0491a364616d919400c40801000000ff7f0000950401000900c403"
        "6f776e97c4045b7b7d5da8726571756972656491a16691a167c2a668696464656ecd0384c39640c3c2a571"
        "75657279a8646f63756d656e74cd0200929293cd012cc00093cd0e100228c3"
    ),
    "Work text": (
        "98dc0013a0a0a867656e6572617465a474657874a0a000a0c0cb0000000000000000a090c301c2c300c200"
        "93a474657874a26869c2dc0033cb3fe0000000000000cb3fd000000000000028ff026491a10a9102c3cb3f"
        "c0000000000000cb3ff8000000000000cbbff8000000000000cb3ff4000000000000038107cbc000000000"
        "00000092070891a364616dc3c2c2090200c398a57265676578a2612bc3af726573706f6e73655f666f726d"
        "6174c40405000000c40405000000c3c3cb3fe0000000000000cb3ff8000000000000cb4000000000000000"
        "cb3ff8000000000000cb3fd0000000000000cb3fe8000000000000cb3fc0000000000000cb3fb000000000"
        "0000cb3fe0000000000000cb3fd0000000000000cb3ff8000000000000cb3fd0000000000000cb3fe00000"
        "0000000002cb4010000000000000cb3fd0000000000000cbbfe0000000000000c39206a3787463cb3fe000"
        "0000000000cb3ff4000000000000034091a12e0491a364616d919400c400950000000000c400c0c2c0c0"
    ),
    "Work tokens": (
        "98dc0013a0a0a867656e6572617465a474657874a0a000a0c0cb0000000000000000a090c301c2c300c200"
        "92a6746f6b656e73c40801000000ff7f0000dc0033c0c0c0c001c09090c2c0cb0000000000000000cb0000"
        "000000000000c00080c090c2c3c3c0c0c0c2c0cb0000000000000000cb0000000000000000cb3ff0000000"
        "000000cb0000000000000000cb0000000000000000cb3ff0000000000000cb0000000000000000cb000000"
        "0000000000cb3ff0000000000000cb0000000000000000cb3ff0000000000000cb3fb999999999999acb00"
        "0000000000000000cb4014000000000000cb3fb999999999999acb0000000000000000c290cb0000000000"
        "000000cb3ffc000000000000020094a10aa13aa122a12a009090c0c2c0c0"
    ),
    "Work pair": (
        "98dc0013a0a0a867656e6572617465a474657874a0a000a0c0cb0000000000000000a090c301c2c300c200"
        "93a470616972a161a162dc0033c0c0c0c001c09090c2c0cb0000000000000000cb0000000000000000c000"
        "80c090c2c3c3c0c0c0c2c0cb0000000000000000cb0000000000000000cb3ff0000000000000cb00000000"
        "00000000cb0000000000000000cb3ff0000000000000cb0000000000000000cb0000000000000000cb3ff0"
        "000000000000cb0000000000000000cb3ff0000000000000cb3fb999999999999acb000000000000000000"
        "cb4014000000000000cb3fb999999999999acb0000000000000000c290cb0000000000000000cb3ffc0000"
        "00000000020094a10aa13aa122a12a009090c0c2c0c0"
    ),
    "Work inputs": (
        "98dc0013a0a0a867656e6572617465a474657874a0a000a0c0cb0000000000000000a090c301c2c300c200"
        "92a6696e707574739392a6746f6b656e73c40801000000ff7f000093a474657874a26869c393a470616972"
        "a161a162dc0033c0c0c0c001c09090c2c0cb0000000000000000cb0000000000000000c00080c090c2c3c3"
        "c0c0c0c2c0cb0000000000000000cb0000000000000000cb3ff0000000000000cb0000000000000000cb00"
        "00000000000000cb3ff0000000000000cb0000000000000000cb0000000000000000cb3ff0000000000000"
        "cb0000000000000000cb3ff0000000000000cb3fb999999999999acb000000000000000000cb4014000000"
        "000000cb3fb999999999999acb0000000000000000c290cb0000000000000000cb3ffc0000000000000200"
        "94a10aa13aa122a12a009090c0c2c0c0"
    ),
    "TokenWork": (
        "dc0010dc0013a57265712d31a47177656ea5656d626564a463686174a46c6f7261a26d65fba473616c74cb"
        "4004000000000000cb3fe0000000000000a930302d612d622d303191a26431c206c3c203c314c408010000"
        "00ff7f0000c40873616d706c696e67919401c400950000000000c4009202031005c3c302c4067072656669"
        "78920102920007c39192cd0384cd012cc3"
    ),
    "SlotSampling": (
        "97cb3fe000000000000028cb3fd0000000000000cfffffffffffffffffcb3fc00000000000009fcb3ff400"
        "0000000000cbbff8000000000000cb3ff8000000000000c40801000000ff7f0000c40801000000ff7f0000"
        "c40801000000ff7f000091c40801000000ff7f000003c40801000000ff7f000098a57265676578a2612bc3"
        "af726573706f6e73655f666f726d6174c40405000000c40405000000c3c39192a378746392cb3fd0000000"
        "000000cb3fe000000000000095cb3fe0000000000000cb3ffc0000000000000240c40801000000ff7f0000"
        "04c40801000000ff7f00000905"
    ),
}
"""The bytes of each sample, without the frame's prefix, in hex."""

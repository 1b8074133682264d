"""The state that a server tells of itself, as far as it can be understood.

Whoever answers at an address may be another program, or a newer server: a field of another type is
left out and named, and one that is not known here is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_Name = Annotated[str, Meta(max_length=512)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class _Model(msgspec.Struct):
    name: _Name
    max_model_len: _Count | None = None


class _Process(msgspec.Struct):
    service: _Name
    pid: _Count
    phase: _Name
    load: _Count
    host: _Name
    engine: _Name | None = None
    rank: _Count | None = None
    note: _Name | None = None
    role: _Name | None = None


class _Spread(msgspec.Struct):
    """An empty object is none yet."""

    p50: _Seconds
    p99: _Seconds


_COUNTS = (
    *("running", "waiting", "kv_blocks_used", "kv_blocks_total", "prefix_cache_query_tokens"),
    *("prefix_cache_hit_tokens", "prompt_tokens", "generation_tokens"),
)
_NAMED_COUNTS = dict[_Name, _Count]
_FIELDS: dict[str, Any] = {
    "version": _Name,
    "url": _Name,
    "folder": _Name,
    "ready": bool,
    "draining": bool,
    "uptime_s": _Seconds,
    "queue_depth": _NAMED_COUNTS,
    "requests_finished": _NAMED_COUNTS,
    "time_to_first_token_s": _Spread,
    "inter_token_latency_s": _Spread,
    **dict.fromkeys(_COUNTS, _Count),
}
_LISTS: dict[str, Any] = {"models": _Model, "processes": _Process}
MAX_LISTED = 4096


def understood(told: Any) -> dict[str, Any]:
    """``told`` without the fields that are not what they should be. ``not_understood`` names these,
    each with the reason; it is missing where there are none."""
    wrong: list[str] = []
    if not isinstance(told, Mapping):
        told, wrong = {}, ["the answer is no JSON object"]
    state = dict(told)
    for name, kind in _FIELDS.items():
        if state.get(name) is None:
            state.pop(name, None)
        elif state[name] == {} and kind is _Spread:
            continue
        elif (reason := _unlike(state[name], kind)) is not None:
            del state[name]
            wrong.append(f"{name}: {reason}")
    for name, kind in _LISTS.items():
        listed = state.get(name) or []
        if not isinstance(listed, list):
            wrong.append(f"{name}: Expected `array`")
            listed = []
        if len(listed) > MAX_LISTED:
            wrong.append(f"{name}: {len(listed)} of them, of which {MAX_LISTED} are read")
        state[name] = kept = []
        for number, one in enumerate(listed[:MAX_LISTED]):
            if (reason := _unlike(one, kind)) is None:
                kept.append(one)
            else:
                wrong.append(f"{name}[{number}]: {reason}")
    if wrong:
        state["not_understood"] = wrong
    else:
        state.pop("not_understood", None)
    return state


def _unlike(value: Any, kind: Any) -> str | None:
    """Why it is no such value; ``None``: it is one."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return None

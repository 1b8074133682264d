"""The state of a server, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.config.terminal import Style
from penstock.services.commands.printable import one_line
from penstock.services.commands.table import table

BAR_WIDTH = 20
MAX_NAMED = 5
"""Fields of a server's answer that could not be understood, in the line that says so."""
_RED, _GREEN, _YELLOW = "\x1b[31m", "\x1b[32m", "\x1b[33m"
_COUNTED = {
    "prompt_tokens_per_s": "prompt_tokens",
    "generation_tokens_per_s": "generation_tokens",
}


def rates(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """What happened a second between two states. A router that began anew counts from 0."""
    found = {
        name: _rate(before.get(counter, 0), now.get(counter, 0), seconds)
        for name, counter in _COUNTED.items()
    }
    ended = [sum((state.get("requests_finished") or {}).values()) for state in (before, now)]
    return {**found, "requests_per_s": _rate(ended[0], ended[1], seconds)}


def _rate(before: float, now: float, seconds: float) -> float:
    return round(max(0.0, now - before) / seconds, 2) if seconds > 0 else 0.0


def status_text(state: Mapping[str, Any], style: Style) -> str:
    """Lines for a terminal of 80 columns."""
    speed = state["rates"]
    rows = [
        ("models", ", ".join(_model(one) for one in state.get("models", ())) or "none yet"),
        ("requests", _requests(state) + f"; {speed['requests_per_s']:,.1f} a second end"),
        (
            "tokens",
            f"{speed['prompt_tokens_per_s']:,.0f} a second read, "
            f"{speed['generation_tokens_per_s']:,.0f} written",
        ),
        ("KV memory", _share(state.get("kv_blocks_used", 0), state.get("kv_blocks_total", 0))),
        ("prefixes", _prefixes(state)),
        ("TTFT", _latency(state.get("time_to_first_token_s"))),
        ("ITL", _latency(state.get("inter_token_latency_s"))),
    ]
    lines = [_head(state, style), ""]
    lines += [f"  {style.dim(f'{name:9}')}  {text}" for name, text in rows if text]
    if wrong := state.get("not_understood"):
        lines += ["", f"  not understood: {_named(wrong)}"]
    return "\n".join([*lines, "", _processes(state.get("processes", ()))])


def _named(wrong: Sequence[str]) -> str:
    """The first few of fields and reasons; ``--json`` has them all."""
    said = []
    for one in wrong[:MAX_NAMED]:
        field, colon, reason = one.partition(": ")
        said.append(one_line(f"{field} ({reason})" if colon else field))
    more = len(wrong) - MAX_NAMED
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def _head(state: Mapping[str, Any], style: Style) -> str:
    phase, colour = "not ready", _RED
    if state.get("draining"):
        phase, colour = "draining", _YELLOW
    elif state.get("ready"):
        phase, colour = "ready", _GREEN
    parts = [
        f"Penstock {one_line(str(state.get('version', '')))}",
        one_line(str(state.get("url") or state.get("folder") or "")),
        style.paint(colour, phase),
    ]
    if "uptime_s" in state:
        parts.append(f"up {_duration(state['uptime_s'])}")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _model(model: Mapping[str, Any]) -> str:
    context = model.get("max_model_len")
    return one_line(str(model["name"])) + (f" ({context:,} tokens)" if context else "")


def _requests(state: Mapping[str, Any]) -> str:
    waiting = {hop: count for hop, count in (state.get("queue_depth") or {}).items() if count}
    waiting.pop("frontend", None)  # all that are open
    where = ", ".join(f"{count:,} at {one_line(hop)}" for hop, count in waiting.items())
    text = f"{state.get('running', 0):,} running, {state.get('waiting', 0):,} waiting"
    return text + (f" ({where})" if where else "")


def _share(used: int, total: int) -> str:
    if not total:
        return ""
    done = min(BAR_WIDTH, BAR_WIDTH * used // total)
    return f"[{'=' * done}{' ' * (BAR_WIDTH - done)}] {100 * used // total} % of {total:,} blocks"


def _prefixes(state: Mapping[str, Any]) -> str:
    asked = state.get("prefix_cache_query_tokens", 0)
    if not asked:
        return ""
    return (
        f"{100 * state.get('prefix_cache_hit_tokens', 0) // asked} % of prompt tokens were cached"
    )


def _latency(spread: Mapping[str, float] | None) -> str:
    """Of all tokens since the server started."""
    return f"{_time(spread['p50'])}, p99 {_time(spread['p99'])}" if spread else ""


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _processes(processes: Any) -> str:
    rows = [
        (
            one_line(_label(one)),
            str(one["pid"]),
            one_line(str(one["phase"])),
            str(one["load"] or ""),
            one_line(str(one.get("note") or "")),
        )
        for one in processes
    ]
    several_hosts = len({one["host"] for one in processes}) > 1
    hosts = [one_line(str(one["host"])) if several_hosts else "" for one in processes]
    cells = [(*row, host) for row, host in zip(rows, hosts, strict=True)]
    text = table(("process", "pid", "phase", "load", "note", "host"), cells, ("pid", "load"))
    return "\n".join("  " + line for line in text.split("\n"))


def _label(process: Mapping[str, Any]) -> str:
    """Its service, and which of several: the engine, the rank within it; and the engine's role."""
    label = str(process["service"])
    if process.get("engine"):
        label += f" {process['engine']}"
    label += f".{process['rank']}" if process.get("rank") else ""
    return label + (f" ({process['role']})" if process.get("role") else "")

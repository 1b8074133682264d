"""A whole answer of each API put together from the events of its stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.services.frontend.bodies.anthropic_answers import MessageEvent


def folded_chat(events: list[Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """A whole answer put together from the frames of a stream. ``wanted``: for the names of it."""
    assert events.pop() == "[DONE]"
    last = events.pop()
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        (chunk,) = event["choices"]
        choice = choices.setdefault(chunk["index"], {"index": chunk["index"], "logprobs": None})
        delta = chunk["delta"] if "delta" in chunk else {"content": chunk["text"]}
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                choice[name] = choice.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = choice.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({name: call[name] for name in ("id", "type", "function")})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for name, values in (chunk["logprobs"] or {}).items():
            found = choice["logprobs"] = choice["logprobs"] or {}
            found[name] = (found.get(name) or []) + values if values is not None else None
        choice["finish_reason"] = chunk["finish_reason"]
        choice["stop_reason"] = chunk.get("stop_reason")
    for choice in choices.values():
        if "message" in wanted["choices"][0]:
            names = ("content", "reasoning", "reasoning_content", "tool_calls")
            said = {name: choice.pop(name) for name in names if name in choice}
            choice["message"] = {"role": "assistant", "content": "", "refusal": None, **said}
        else:
            choice["text"] = choice.pop("content")
    return {
        **{name: wanted[name] for name in ("id", "object", "created")},
        "model": last["model"],
        "choices": [choices[index] for index in sorted(choices)],
        "usage": last["usage"],
    }


def message_events(raw: bytes) -> list[dict[str, Any]]:
    """A strict reader of the event stream format, for the parts of it that are used here."""
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        msgspec.json.decode(data.removeprefix("data: "), type=MessageEvent)
        found.append(event)
    return found


def check_message_events(events: list[dict[str, Any]]) -> None:
    """The rules of a stream: https://docs.anthropic.com/en/api/messages-streaming."""
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    kinds = {
        "text": {"text_delta"},
        "thinking": {"thinking_delta", "signature_delta"},
        "tool_use": {"input_json_delta"},
    }
    index, block = -1, None
    last = ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert block is None
            index += 1
            block, last = event["content_block"], ""
            assert block.get("input", {}) == {}
        elif event["type"] == "content_block_delta":
            assert block is not None and event["delta"]["type"] in kinds[block["type"]]
            assert last != "signature_delta"
            last = event["delta"]["type"]
        else:
            assert event["type"] == "content_block_stop" and block is not None
            assert block["type"] != "thinking" or last == "signature_delta"
            block = None
        assert event["index"] == index
    assert block is None


def response_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events of a stream make, by their small steps alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        if "output_index" not in event or kind == "output_item.done":
            continue
        item = items[event["output_index"]]
        assert event["item_id"] == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta":
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_summary_part.added":
                item["summary"].append(event["part"])
            case "reasoning_summary_text.delta":
                item["summary"][event["summary_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == item["content"][event["content_index"]]["text"]
            case "reasoning_summary_text.done":
                assert event["text"] == item["summary"][event["summary_index"]]["text"]
            case "content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "custom_tool_call_input.done":
                assert event["input"] == item["input"]
    return items

"""Calling one of the offered tools, saying what it answered, and seeing that none fits."""

from __future__ import annotations

import json

from penstock.demo.exchange import Exchange, Random
from penstock.demo.skills.toolbox import KNOWN, Known, Value, invented
from penstock.demo.words import invented_word

NONE_FITS = "None of my tools can do that."


def _offered(source: Random) -> list[Known]:
    """One to four tools with different names."""
    count = source.choice((1, 2, 2, 3, 3, 4))
    tools: dict[str, Known] = {}
    while len(tools) < count:
        tool = invented(source) if source.random() < 0.4 else source.choice(KNOWN)
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def _wanted(source: Random, tool: Known) -> tuple[str, dict[str, Value]]:
    """A request, and the arguments in it."""
    values = {parameter.name: parameter.draw(source) for parameter in tool.parameters}
    return source.choice(tool.requests).format(**values), values


def call_text(name: str, values: dict[str, Value]) -> str:
    """A call as Hermes models write it."""
    call = json.dumps({"name": name, "arguments": values}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def tool_call(source: Random) -> Exchange:
    """The right one of the offered tools with the right arguments."""
    offered = _offered(source)
    tool = source.choice(offered)
    question, values = _wanted(source, tool)
    return Exchange(
        question,
        call_text(tool.name, values),
        f"tool:{tool.name}:{question}",
        check="tool",
        tools=[each.offer() for each in offered],
    )


def tool_result(source: Random) -> Exchange:
    """What a known tool answered, as a sentence."""
    tool = source.choice(KNOWN)
    question, values = _wanted(source, tool)
    result = source.choice(
        (str(source.randint(1, 9999)), f"{source.randint(-20, 40)} degrees", invented_word(source))
    )
    call = Exchange(question, call_text(tool.name, values), f"tool:{tool.name}:{question}",
                    check="tool")  # fmt: skip
    return Exchange(
        json.dumps({"result": result}),
        tool.result.format(r=result, **values),
        f"result:{tool.name}:{question}:{result}",
        role="tool",
        before=[call],
        tools=[tool.offer()],
    )


def no_tool(source: Random) -> Exchange:
    """A request for a known tool that is not on offer."""
    offered = _offered(source)
    missing = source.choice([tool for tool in KNOWN if tool not in offered])
    question, _ = _wanted(source, missing)
    return Exchange(
        question,
        NONE_FITS,
        f"notool:{question}",
        tools=[each.offer() for each in offered],
    )

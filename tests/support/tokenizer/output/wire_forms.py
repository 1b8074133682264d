"""Writes tool calls as models of each wire form do, after the descriptions of these forms.

Nothing here knows how outputs are read. A form says which calls it cannot carry: where an end tag
stands within a text, or a text reads as a value of another type that its parameter may have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]
Types = Mapping[str, Mapping[str, str]]
"""Tool → parameter → its JSON type; one that is missing is not declared."""


class Form(NamedTuple):
    family: str
    write: Callable[[Sequence[Call]], str]
    lacks: Callable[[Call, Types], bool] = lambda call, types: False
    """Whether the form cannot carry a call."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _object(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return f'{{"name": {_json(name)}, "{key}": {_json(arguments)}}}'


def _json_tags(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def _xml_parameters(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{_shown(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _xml_pairs(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_shown(v)}</arg_value>\n"
            for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _minimax(calls: Sequence[Call]) -> str:
    inside = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{_shown(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inside}\n</minimax:tool_call>"


def _dsml(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        is_text = "true" if isinstance(value, str) else "false"
        begin = f'<｜DSML｜parameter name="{key}" string="{is_text}">'
        return f"{begin}{_shown(value)}</｜DSML｜parameter>\n"

    inside = "\n".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(parameter(*item) for item in arguments.items())
        + "</｜DSML｜invoke>"
        for name, arguments in calls
    )
    return f"<｜DSML｜function_calls>\n{inside}\n</｜DSML｜function_calls>"


def _deepseek(calls: Sequence[Call]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _deepseek_fenced(calls: Sequence[Call]) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def _array(opening: str, closing: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{opening}[{', '.join(_object(*call) for call in calls)}]{closing}"


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _command(calls: Sequence[Call]) -> str:
    items = [
        f'    {{"tool_call_id": "{index}", "tool_name": {_json(name)}, '
        f'"parameters": {_json(arguments)}}}'
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(items) + "\n]<|END_ACTION|>"


def _apertus(calls: Sequence[Call]) -> str:
    items = ", ".join(f"{{{_json(name)}: {_json(arguments)}}}" for name, arguments in calls)
    return f"<|tools_prefix|>[{items}]<|tools_suffix|>"


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(_object(name, arguments, "parameters") for name, arguments in calls)


def _literal(value: Any, constants: tuple[str, str, str]) -> str:
    match value:
        case None:
            return constants[0]
        case bool():
            return constants[1 if value else 2]
        case str():
            inside = re.sub(r"[\\'\n\r\t\x00-\x1f]", _escaped, value)
            return f"'{inside}'"
        case list():
            return "[" + ", ".join(_literal(one, constants) for one in value) + "]"
        case dict():
            items = (
                f"{_literal(k, constants)}: {_literal(v, constants)}" for k, v in value.items()
            )
            return "{" + ", ".join(items) + "}"
    return repr(value)


def _escaped(found: re.Match[str]) -> str:
    names = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return names.get(found[0], f"\\x{ord(found[0]):02x}")


_PYTHON, _JSON = ("None", "True", "False"), ("null", "true", "false")


def _python_call(call: Call, constants: tuple[str, str, str] = _PYTHON) -> str:
    name, arguments = call
    inside = ", ".join(f"{k}={_literal(v, constants)}" for k, v in arguments.items())
    return f"{name}({inside})"


def _pythonic(opening: str, closing: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{opening}[{', '.join(map(_python_call, calls))}]{closing}"


def _olmo(calls: Sequence[Call]) -> str:
    lines = "\n".join(_python_call(call, _JSON) for call in calls)
    return f"<function_calls>\n{lines}\n</function_calls>"


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _internlm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<|action_start|><|plugin|>\n{_object(*call, 'parameters')}<|action_end|>"
        for call in calls
    )


def _kimi_channels(calls: Sequence[Call]) -> str:
    types = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}

    def argument(key: str, value: Any) -> str:
        kind = "null" if value is None else types.get(type(value), "object")
        begin = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
        return f"{begin}{_shown(value)}<|close|>argument<|sep|>"

    inside = "".join(
        f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        + "".join(argument(*item) for item in arguments.items())
        + "<|close|>call<|sep|>"
        for number, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inside}<|close|>tools<|sep|><|close|>message<|sep|>"


def _inkling(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|message_model|>{name}<|content_invoke_tool_json|>{_object(name, arguments, 'args')}"
        "<|end_message|>"
        for name, arguments in calls
    )


def _muse(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f'<atem:parameter name="{key}">{_shown(value)}</atem:parameter>\n'

    inside = "\n".join(
        f'<atem:invoke name="{name}">\n'
        + "".join(parameter(*item) for item in arguments.items())
        + "</atem:invoke>"
        for name, arguments in calls
    )
    block = f"<atem:function_calls>\n{inside}\n</atem:function_calls>"
    return f"<|start|>assistant to={calls[0][0]}<|message|>{block}<|eom|>"


def _gemma(opening: str, closing: str, quote: str) -> Callable[[Sequence[Call]], str]:
    def shown(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, list):
            return "[" + ",".join(map(shown, value)) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key(k)}:{shown(v)}" for k, v in value.items()) + "}"
        return _json(value)

    def key(name: str) -> str:
        return name if re.fullmatch(r"[\w.$-]+", name) else f"{quote}{name}{quote}"

    return lambda calls: "".join(
        f"{opening}call:{name}{shown(dict(arguments))}{closing}" for name, arguments in calls
    )


def _texts(value: Any) -> list[str]:
    """All strings in a value, keys included."""
    match value:
        case str():
            return [value]
        case list():
            return [text for one in value for text in _texts(one)]
        case dict():
            return [*value, *(text for one in value.values() for text in _texts(one))]
    return []


def _holds(*marks: str) -> Callable[[Call, Types], bool]:
    """Whether one of these stands within a text, which it would end."""
    return lambda call, _: any(mark in text for text in _texts(dict(call[1])) for mark in marks)


def _ambiguous(*ends: str) -> Callable[[Call, Types], bool]:
    """A parameter's value is text: an end tag ends it, and its type is that of its schema."""

    def lacks(call: Call, types: Types) -> bool:
        for key, value in call[1].items():
            if any(end in _shown(value) for end in ends):
                return True
            kind = types.get(call[0], {}).get(key)
            if isinstance(value, str) and kind != "string" and _reads(value):
                return True
            if not isinstance(value, str) and kind == "string":
                return True
        return False

    return lacks


def _reads(text: str) -> bool:
    """Whether a text is also the JSON of something, or a number or constant of Python's."""
    try:
        return not isinstance(json.loads(text), str)
    except ValueError:
        return text.strip().lower() in ("none", "null", "true", "false") or (
            text.strip()[:1] in ("[", "{", "(") or _is_number(text)
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_XML_ENDS = ("</parameter>", "</function>", "<parameter=", "</tool_call>")

FORMS: dict[str, Form] = {
    "JSON in tags": Form("json_tags", _json_tags),
    "XML parameters": Form("xml_parameters", _xml_parameters, _ambiguous(*_XML_ENDS)),
    "XML pairs": Form(
        "xml_pairs", _xml_pairs, _ambiguous("</arg_value>", "</tool_call>", "<arg_key>")
    ),
    "XML invoke": Form(
        "xml_invoke_minimax",
        _minimax,
        _ambiguous("</parameter>", "</invoke>", "</minimax:tool_call>"),
    ),
    "XML invoke, DSML": Form("xml_invoke_dsml", _dsml, _holds("</｜DSML｜")),
    "special tokens, DeepSeek V3.1": Form("special_tokens_deepseek_v31", _deepseek),
    "special tokens, DeepSeek V3": Form("special_tokens_deepseek_v3", _deepseek_fenced),
    "special tokens, Kimi": Form("special_tokens_kimi", _kimi),
    "JSON array, Mistral old": Form("json_array_mistral", _array("[TOOL_CALLS]", "")),
    "JSON array, Mistral new": Form("json_array_mistral", _mistral),
    "JSON array, Granite": Form("json_array_granite", _array("<|tool_call|>", "")),
    "JSON array, Command": Form("json_array_command", _command),
    "JSON array, Apertus": Form("json_array_apertus", _apertus),
    "bare JSON": Form("bare_json", _llama),
    "Python calls": Form("python_calls", _pythonic("", "")),
    "Python calls, Olmo": Form("python_calls_lines", _olmo),
    "Python calls, LFM2": Form(
        "python_calls_lfm2", _pythonic("<|tool_call_start|>", "<|tool_call_end|>")
    ),
    "harmony": Form("harmony", _harmony),
    "JSON in tags, InternLM": Form("json_tags_internlm", _internlm),
    "channels, Kimi K3": Form("kimi_channels", _kimi_channels, _holds("<|open|>", "<|close|>")),
    "channels, Inkling": Form("inkling", _inkling),
    "channels, Muse": Form(
        "muse",
        _muse,
        _ambiguous("</atem:parameter>", "</atem:invoke>", "</atem:function_calls>", "<|"),
    ),
    "own quoting, FunctionGemma": Form(
        "own_quoting_functiongemma",
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        _holds("<escape>"),
    ),
    "own quoting, Gemma 4": Form(
        "own_quoting_gemma4", _gemma("<|tool_call>", "<tool_call|>", '<|"|>'), _holds('<|"|>')
    ),
}

from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, reasoning, text

from penstock.services.tokenizer.output.families import FAMILIES

ROME, NOW = call("weather", {"city": "Rome"}), call("now")
OBJECT = '{"name": "weather", "arguments": {"city": "Rome"}}'
PARAMETERS = OBJECT.replace("arguments", "parameters")
EMPTY = '{"name": "now", "arguments": {}}'
MISTRAL = [
    Case(f"[TOOL_CALLS][{OBJECT}]", [ROME]),
    Case(f"[TOOL_CALLS] [ {OBJECT} , {EMPTY} ] ", [ROME, NOW]),
    Case(f"Well. [TOOL_CALLS] [{OBJECT}]\nSo.", [text("Well."), ROME, text("So.")]),
    Case(f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcdefghi"}}]', [ROME]),
    Case('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', [ROME]),
    Case("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", [NOW, NOW]),
    Case("[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", [call("now", id="abcdefghi")]),
    Case("[THINK]Why[/THINK][TOOL_CALLS]now[ARGS]{}", [reasoning("Why"), NOW]),
    Case('[TOOL_CALLS]weather[ARGS]{"city": "[TOOL_', [call("weather", '{"city": "[TOOL_')]),
    Case("[TOOL_CALLS]now[ARGS]{} and", [NOW, text("and")]),
    Case("[TOOL_CALLS][]", [text("[TOOL_CALLS][]")]),
    Case("[TOOL_CALLS]", [text("[TOOL_CALLS]")]),
    Case("[TOOL_CALLS]no call", [text("[TOOL_CALLS]no call")]),
    Case(f"[TOOL_CALLS][{OBJECT}", [ROME]),
    Case(f"[TOOL_CALLS][{OBJECT}, 5]", [ROME, text(", 5]")]),
    Case("see [TOOL] and [", [text("see [TOOL] and [")]),
]
COMMAND_ONE = '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}'
COMMAND = [
    Case(f"<|START_ACTION|>[\n    {COMMAND_ONE}\n]<|END_ACTION|>", [ROME]),
    Case(f"<|START_ACTION|>[{COMMAND_ONE},{COMMAND_ONE}]<|END_ACTION|>", [ROME, ROME]),
    Case(
        f"<|START_THINKING|>Plan<|END_THINKING|><|START_ACTION|>[{COMMAND_ONE}]<|END_ACTION|>",
        [reasoning("Plan"), ROME],
    ),
    Case('<|START_ACTION|>[{"tool_name": "now"}]<|END_ACTION|>', [NOW]),
    Case(f"<|START_ACTION|>[{COMMAND_ONE}<|END_ACTION|>x", [ROME, text("x")]),
    Case('<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": <|END_ACTION|>',
         [call("weather", {"city": None})]),
    Case("<|START_ACTION|>[]<|END_ACTION|>", [text("<|START_ACTION|>[]<|END_ACTION|>")]),
]  # fmt: skip
APERTUS = [
    Case('<|tools_prefix|>[{"weather": {"city": "Rome"}}, {"now": {}}]<|tools_suffix|>',
         [ROME, NOW]),
    Case('<|inner_prefix|>Hm<|inner_suffix|><|tools_prefix|>[{"now": {}}]<|tools_suffix|>So',
         [reasoning("Hm"), NOW, text("So")]),
    Case("<|tools_prefix|>[5]<|tools_suffix|>", [text("<|tools_prefix|>[5]<|tools_suffix|>")]),
]  # fmt: skip
BARE = [
    Case(PARAMETERS, [ROME]),
    Case(f" \n{PARAMETERS}\n", [ROME]),
    Case(f"{PARAMETERS}; {PARAMETERS}", [ROME, ROME]),
    Case(f"[{OBJECT}, {EMPTY}]", [ROME, NOW]),
    Case(f"<|python_tag|>{PARAMETERS}<|eom_id|>", [ROME]),
    Case(f"So <|python_tag|>{PARAMETERS}", [text("So"), ROME]),
    Case('{"type": "function", "name": "now", "parameters": {}}', [NOW]),
    Case('{"name": "now"}', [NOW]),
    Case(f"{PARAMETERS} Done", [ROME, text("Done")]),
    Case(f"It is {PARAMETERS}", [text(f"It is {PARAMETERS}")]),
    Case('{"name": "Bob", "parameters": {}}', [text('{"name": "Bob", "parameters": {}}')]),
    Case('{"name": "weather", "age": 3}', [text('{"name": "weather", "age": 3}')]),
    Case('{"a": 1}', [text('{"a": 1}')]),
    Case("[1, 2]", [text("[1, 2]")]),
    Case("<|python_tag|>print(1)", [text("<|python_tag|>print(1)")]),
    Case('{"name": "weath', [text('{"name": "weath')]),
    Case('{"name": "weather", "parameters": {"city": "Ro', [call("weather", '{"city": "Ro')]),
    Case(f"<think>Hm</think>{PARAMETERS}", [reasoning("Hm"), ROME]),
]
CASES = {
    "json_array_mistral": MISTRAL,
    "json_array_command": COMMAND,
    "json_array_apertus": APERTUS,
    "bare_json": BARE,
}


@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family, cases in CASES.items() for case in cases]
)
def test_an_output_gives_its_events_however_it_is_cut(family: str, case: Case) -> None:
    check(FAMILIES[family], case)

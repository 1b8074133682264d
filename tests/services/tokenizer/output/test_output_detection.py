"""Which family is chosen for a model, and why."""

from __future__ import annotations

import pytest

from penstock.services.tokenizer.output.detection import Clues, UnknownParser, choose
from penstock.services.tokenizer.output.detection_rules import (
    REASONING_NAMES,
    REASONING_RULES,
    TOOL_NAMES,
    TOOL_RULES,
)
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import THINK_TAGS

CHATML = "{{ '<|im_start|>' + message.role }}"
HERMES = CHATML + """{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}"""
LLAMA = """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""
TEMPLATES = {
    "json_tags": HERMES + "{%- set content = content.split('</think>')[-1] %}",
    "xml_parameters": HERMES + "<function=example_function_name>\\n<parameter=example>",
    "xml_pairs": "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>",
    "xml_pairs_hunyuan": "<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>",
    "xml_invoke_minimax": '<minimax:tool_call><invoke name="{{ name }}">',
    "xml_invoke_dsml": "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}",
    "xml_invoke_dsml_v4": "{{ '<｜DSML｜tool_calls>' }}",
    "special_tokens_deepseek_v3": "<｜tool▁call▁begin｜>' + type + '\\n```json",
    "special_tokens_deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name",
    "special_tokens_kimi": "<|tool_calls_section_begin|>{{ '<|tool_call_begin|>' + id }}",
    "json_array_mistral": "{{ '[TOOL_CALLS] [' }}",
    "json_array_granite": "{{ '<|tool_call|>' + message.content }}",
    "json_array_command": "<|START_ACTION|>[\\n<|START_THINKING|><|END_THINKING|>",
    "json_array_apertus": "{%- set tool_calls_token = '<|tools_prefix|>' -%}<|inner_suffix|>",
    "json_array_nemotron": "{{ '<TOOLCALL>[' }}",
    "bare_json": LLAMA + "{{ '<|python_tag|>' }}",
    "python_calls": "put it in the format of [func_name1(params_name1=params_value1)]",
    "python_calls_lines": "\\n<function_calls>\\nget_weather(city='New York')",
    "python_calls_lfm2": "{{- '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' -}}",
    "json_tags_internlm": "{{ '<|action_start|><|plugin|>' + call }}",
    "kimi_channels": "{{ '<|open|>' + channel + '<|sep|>' }}",
    "inkling": "{{ '<|message_model|>' + name + '<|content_invoke_tool_json|>' }}",
    "muse": "<|start|>assistant to={{ to }}<|message|>{{ '<atem:function_calls>' }}",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "own_quoting_functiongemma": "<start_function_call>call:",
    "own_quoting_gemma4": "{{- '<|tool_call>call:' + name }}{{ '<|channel>thought\\n<channel|>' }}",
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_tells_the_family(family: str) -> None:
    form = choose(Clues(TEMPLATES[family], ()))
    assert form.family.name == family
    assert "the template writes" in form.describe()


def test_the_rule_that_fits_is_named() -> None:
    form = choose(Clues(TEMPLATES["xml_parameters"], ()))
    assert form.describe() == (
        "tool parser xml_parameters: the template writes <function= and <parameter=; "
        "thinking none: no rule fits the template or the vocabulary"
    )


def test_calls_that_are_not_read_are_told_and_taken_for_no_others() -> None:
    form = choose(Clues("]<]minimax[>[<tool_call><invoke name=</mm:think>", ()))
    assert form.describe() == (
        "tool parser none: the template writes ]<]minimax[>[, whose calls are not read; "
        "thinking <mm:think> … </mm:think>: the template writes </mm:think>"
    )


def test_a_template_counts_more_than_the_tokens_of_a_base_model() -> None:
    added = ["[TOOL_CALLS]", "<|python_tag|>", "<|tool_calls_section_begin|>"]
    assert choose(Clues(HERMES, added)).family.name == "json_tags"
    assert choose(Clues(CHATML, added[:1])).family.name == "json_array_mistral"
    assert choose(Clues(CHATML, added[1:2])).family.name == "bare_json"
    assert choose(Clues(None, added)).family.name == "special_tokens_kimi"


def test_the_form_that_most_models_know_is_taken_where_nothing_tells() -> None:
    form = choose(Clues(CHATML, ()))
    assert form.family.name == "json_tags"
    assert form.family.reasoning is None


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("{{ content.split('</think>') }}", "<think>"),
        (TEMPLATES["own_quoting_gemma4"], "<|channel>"),
        (TEMPLATES["json_array_command"], "<|START_THINKING|>"),
        (TEMPLATES["json_array_apertus"], "<|inner_prefix|>"),
        ("[TOOL_CALLS][THINK]{{ text }}[/THINK]", "[THINK]"),
        ("Write your thoughts after 'Here is my thought process:'", "Here is my thought process:"),
    ],
)
def test_a_template_tells_how_thinking_is_written(template: str, opening: str) -> None:
    reasoning = choose(Clues(template, ())).family.reasoning
    assert reasoning is not None
    assert reasoning.open == opening


def test_parsers_are_chosen_by_the_names_that_other_servers_use() -> None:
    clues = Clues(HERMES, ())
    for name, family in [
        ("deepseek-v3", "special_tokens_deepseek_v3"),
        ("gpt-oss", "harmony"),
        ("Qwen3_Coder", "xml_parameters"),
        ("bare_json", "bare_json"),
    ]:
        form = choose(clues, name)
        assert form.family.name == family
        assert f"--tool-parser {name}" in form.describe()
    assert choose(clues, reasoning_parser="deepseek-r1").family.reasoning == THINK_TAGS
    assert choose(clues, "hermes", "none").family.reasoning is None
    assert choose(clues, "none").family.openers == ()


def test_an_unknown_name_gets_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UnknownParser, match=r"'hermess'; did you mean 'hermes'\? Known are auto"):
        choose(Clues(HERMES, ()), "hermess")
    with pytest.raises(UnknownParser, match=r"no reasoning parser 'qwen33'; did you mean 'qwen3'"):
        choose(Clues(HERMES, ()), "auto", "qwen33")
    with pytest.raises(UnknownParser, match=r"no tool parser '§§'\. Known"):
        choose(Clues(HERMES, ()), "§§")


def test_a_response_template_counts_more_than_rules_and_less_than_names() -> None:
    spec = {
        "start_anchor": "<a>",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "tool_calls": {
                "open": "<c>",
                "close": "</c>",
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {},
        },
    }
    form = choose(Clues(HERMES, (), spec))
    assert form.family.name == "response_template"
    assert form.family.reasoning is not None
    assert form.family.reasoning.open == "<t>"
    assert choose(Clues(HERMES, (), spec), "hermes").family.name == "json_tags"
    bad = choose(Clues(HERMES, (), {"fields": {"images": {}}}))
    assert bad.family.name == "json_tags"
    assert "response_template is not read: response_template.fields.images" in bad.describe()


def test_all_rules_and_names_lead_to_a_family() -> None:
    values = {rule.value for rule in TOOL_RULES} | set(TOOL_NAMES.values())
    assert values <= {*FAMILIES, "none"}
    assert all(rule.template or rule.vocabulary for rule in (*TOOL_RULES, *REASONING_RULES))
    assert all(marks.open and marks.close for marks in REASONING_NAMES.values())


def test_one_family_object_serves_all_models_that_are_read_alike() -> None:
    first, second = (choose(Clues(TEMPLATES["json_array_command"], ())) for _ in range(2))
    assert first.family is second.family

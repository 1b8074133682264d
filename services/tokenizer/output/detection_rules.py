"""The rules by which a model's form of output is told, and the names that parsers are known by."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from penstock.services.tokenizer.output.family import THINK_TAGS, ReasoningMarks

Value = TypeVar("Value", covariant=True)


class Rule(NamedTuple, Generic[Value]):
    """``value``, if the template has all texts of ``template`` and none of ``without``, or the
    vocabulary all those of ``vocabulary``."""

    value: Value
    template: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def _token(family: str, text: str) -> Rule[str]:
    """The template or the vocabulary has a text that only this family has."""
    return Rule(family, (text,), (text,))


TOOL_RULES: tuple[Rule[str], ...] = (
    _token("none", "]<]minimax[>["),
    Rule("harmony", ("<|channel|>", "<|message|>"), ("<|channel|>", "<|message|>", "<|call|>")),
    Rule("kimi_channels", ("<|open|>", "<|sep|>"), ("<|open|>", "<|close|>", "<|sep|>")),
    _token("inkling", "<|content_invoke_tool_json|>"),
    Rule("muse", ("atem:function_calls",)),
    _token("json_tags_internlm", "<|action_start|>"),
    Rule("own_quoting_gemma4", ("<|tool_call>",), ("<|tool_call>", "<tool_call|>")),
    _token("own_quoting_functiongemma", "<start_function_call>"),
    _token("json_array_apertus", "<|tools_prefix|>"),
    _token("special_tokens_kimi", "<|tool_calls_section_begin|>"),
    _token("xml_invoke_minimax", "<minimax:tool_call>"),
    Rule("xml_invoke_dsml", ("｜DSML｜", "function_calls")),
    Rule("xml_invoke_dsml_v4", ("｜DSML｜",), ("｜DSML｜",)),
    Rule("xml_invoke_step3", ("steptml:invoke",), ("<｜tool_calls_begin｜>",)),
    Rule("special_tokens_deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    _token("special_tokens_deepseek_v31", "<｜tool▁call▁begin｜>"),
    _token("python_calls_lfm2", "<|tool_call_start|>"),
    Rule("python_calls_lines", ("<function_calls>",)),
    Rule("json_tags_longcat", ("<longcat_tool_call>",), ("<longcat_tool_call>",)),
    Rule("xml_pairs_hunyuan", ("<tool_sep>",), ("<tool_sep>", "<arg_key>")),
    _token("xml_pairs", "<arg_key>"),
    Rule("xml_parameters", ("<function=", "<parameter=")),
    Rule("xml_invoke_minicpm", ("<function name=", "<param name=")),
    _token("json_array_command", "<|START_ACTION|>"),
    Rule("json_array_nemotron", ("<TOOLCALL>",)),
    Rule("json_array_jamba", ("<tool_calls>",)),
    Rule("json_array_phi4", ("<|tool_call|>", "<|/tool_call|>")),
    Rule("json_array_granite", ("<|tool_call|>",)),
    Rule("json_array_functools", ("functools[",)),
    Rule("json_array_mistral", ("[TOOL_CALLS]",)),
    Rule("json_array_granite_tag", ("<tool_call>[",)),
    Rule("json_tags", ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    Rule("python_calls", ("[func_name1(",)),
    Rule("python_calls", ("pythonic",)),
    Rule("bare_json", ('"name"', '"parameters"', "<|python_tag|>")),
    Rule("bare_json", ('"name": function name', '"parameters"')),
    Rule("bare_json", ('{"name": ', '"parameters": ')),
    Rule("python_calls", ("<|python_start|>",), ("<|python_start|>",)),
    Rule("json_array_mistral", (), ("[TOOL_CALLS]",)),
    Rule("bare_json", (), ("<|python_tag|>",)),
)
"""Tool calls; the value is a family's name. ``none`` (MiniMax M3, whose arguments are nested tags):
another one would be wrong."""

_GEMMA_4 = ReasoningMarks("<|channel>", "<channel|>", label="thought")
_MISTRAL = ReasoningMarks("[THINK]", "[/THINK]")
_COMMAND = ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>")
_APERTUS = ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>")
_LONGCAT = ReasoningMarks("<longcat_think>", "</longcat_think>")
_SEED = ReasoningMarks("<seed:think>", "</seed:think>")
_KIMI = ReasoningMarks("◁think▷", "◁/think▷")
_MINIMAX_3 = ReasoningMarks("<mm:think>", "</mm:think>")
_GRANITE = ReasoningMarks("Here is my thought process:", "Here is my response:")

REASONING_RULES: tuple[Rule[ReasoningMarks], ...] = (
    Rule(_GEMMA_4, ("<|channel>",), ("<|channel>", "<channel|>")),
    *(
        Rule(marks, (marks.close,), (marks.open, marks.close))
        for marks in (_COMMAND, _APERTUS, _LONGCAT, _SEED, _KIMI, _MINIMAX_3, _MISTRAL)
    ),
    Rule(_GRANITE, ("Here is my thought process",)),
    Rule(THINK_TAGS, ("</think>",)),
    Rule(THINK_TAGS, ("<think>",)),
)
"""Thinking. ``<think>`` as a token alone says nothing: models that do not think inherit it."""

TOOL_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("hermes", "qwen", "qwen25", "qwen3_json", "trinity", "granite4", "ernie45"), "json_tags"
    ),
    "longcat": "json_tags_longcat",
    **dict.fromkeys(("internlm", "internlm2", "interns1"), "json_tags_internlm"),
    "kimi_k3": "kimi_channels",
    "inkling": "inkling",
    "muse": "muse",
    **dict.fromkeys(
        ("qwen3_coder", "qwen3_xml", "mimo", "step3p5", "nanbeige", "nemotron_v3"),
        "xml_parameters",
    ),
    **dict.fromkeys(("glm", "glm45", "glm47", "ling3", "poolside_v1", "spark25"), "xml_pairs"),
    **dict.fromkeys(("hunyuan", "hy_v3"), "xml_pairs_hunyuan"),
    "minimax_m2": "xml_invoke_minimax",
    "deepseek_v32": "xml_invoke_dsml",
    "deepseek_v4": "xml_invoke_dsml_v4",
    "step3": "xml_invoke_step3",
    "minicpm5": "xml_invoke_minicpm",
    **dict.fromkeys(("deepseek_v3", "deepseek_r1"), "special_tokens_deepseek_v3"),
    "deepseek_v31": "special_tokens_deepseek_v31",
    "kimi_k2": "special_tokens_kimi",
    "mistral": "json_array_mistral",
    "granite": "json_array_granite",
    **dict.fromkeys(("cohere_command3", "cohere_command4", "command"), "json_array_command"),
    **dict.fromkeys(("apertus", "apertus2509"), "json_array_apertus"),
    **dict.fromkeys(("jamba", "hunyuan_a13b"), "json_array_jamba"),
    "phi4_mini_json": "json_array_functools",
    **dict.fromkeys(("llama3", "llama3_json", "llama4_json", "xlam"), "bare_json"),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), "python_calls"),
    "olmo3": "python_calls_lines",
    "lfm2": "python_calls_lfm2",
    **dict.fromkeys(("openai", "gpt_oss"), "harmony"),
    "functiongemma": "own_quoting_functiongemma",
    "gemma4": "own_quoting_gemma4",
}
"""Names of tool parsers, as users of vLLM and SGLang know them, and the families that they mean."""

REASONING_NAMES: dict[str, ReasoningMarks] = {
    **dict.fromkeys(
        (
            "think", "deepseek_r1", "deepseek_v3", "deepseek_v4", "qwen3", "qwen3_thinking",
            "glm45", "glm47", "kimi_k2", "mimo", "minimax_m2", "minimax", "nemotron_3",
            "nemotron_v3", "step3", "step3p5", "hunyuan", "hunyuan_a13b", "hy_v3", "ernie45",
            "holo2", "olmo3", "poolside_v1", "ling3", "interns1", "nanbeige",
            "granite_thinking_parser",
        ),
        THINK_TAGS,
    ),
    "gemma4": _GEMMA_4,
    "mistral": _MISTRAL,
    **dict.fromkeys(("cohere_command3", "cohere_command4", "command"), _COMMAND),
    **dict.fromkeys(("apertus", "apertus2509"), _APERTUS),
    "longcat": _LONGCAT,
    "seed_oss": _SEED,
    "kimi": _KIMI,
    "minimax_m3": _MINIMAX_3,
    "granite": _GRANITE,
    **dict.fromkeys(("openai_gptoss", "openai", "gpt_oss"), THINK_TAGS),
}  # fmt: skip
"""Names of reasoning parsers. Those of harmony matter only without its tool parser, whose channels
tell thinking by themselves."""

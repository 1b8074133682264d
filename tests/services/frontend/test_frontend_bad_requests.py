"""Bad requests: a clear 400 that names the parameter, the value and the limit."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from support.frontend.frontend_scripted import MAX_MODEL_LEN, Client, run

from penstock.protocol.config.server_fields import ServerConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HUGE = 10**3999
ONE = {"prompt": "x"}
HI = {"messages": [{"role": "user", "content": "hi"}]}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    # body without the prompt, param, words in the message
    ({"temperature": -1}, "temperature", "-1; 0 to 100"),
    ({"temperature": 100.5}, "temperature", "100.5; 0 to 100"),
    ({"temperature": "1"}, "temperature", "number '1'"),
    ({"temperature": True}, "temperature", "number true"),
    ({"temperature": HUGE}, "temperature", "digits"),
    ({"temperature": [1]}, "temperature", "array"),
    ({"temperature": {}}, "temperature", "object"),
    ({"top_p": 1.01}, "top_p", "1.01; 0 to 1"),
    ({"top_p": -0.1}, "top_p", "-0.1; 0 to 1"),
    ({"top_k": -2}, "top_k", "-1 -2"),
    ({"top_k": 1.5}, "top_k", "whole 1.5"),
    ({"top_k": 2**31}, "top_k", "2147483647 2147483648"),
    ({"top_k": HUGE}, "top_k", "2147483647 digits"),
    ({"seed": 2**63}, "seed", str(2**63 - 1)),
    ({"seed": "x"}, "seed", "whole"),
    ({"n": 0}, "n", "0; 1 to 128"),
    ({"n": 129}, "n", "128 129"),
    ({"n": 1e6}, "n", "whole"),
    ({"max_tokens": -5}, "max_tokens", "-5; 0 to"),
    ({"max_tokens": 2**31}, "max_tokens", "2147483647"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "-1; 0 to"),
    ({"nsigma": -1}, "nsigma", "-1; 0 to 100"),
    ({"tfs": 0}, "tfs", "0; above 0 and at most 1"),
    ({"dynatemp_exponent": 0}, "dynatemp_exponent", "0; above 0 and at most 100"),
    ({"dynatemp_min": 2, "dynatemp_max": 1}, "dynatemp_min", "2; dynatemp_max, 1, is allowed"),
    ({"mirostat_mode": 1}, "mirostat_mode", "1; 2 0"),
    ({"smoothing_curve": 0.5}, "smoothing_curve", "0.5; 1 to 10"),
    ({"dry_base": 0.5}, "dry_base", "0.5; 1 to 100"),
    ({"dry_allowed_length": 0}, "dry_allowed_length", "0; 1 to"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers", "empty 1 64"),
    ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers", "64 65"),
    ({"no_repeat_ngram_size": 1025}, "no_repeat_ngram_size", "1025; 0 to 1024"),
    ({"sampler_order": ["top"]}, "sampler_order", "sampler_order[0] 'top' 'top_k' 0 to 6"),
    ({"sampler_order": ["top_p", 2]}, "sampler_order", "top_p twice 2"),
    ({"sampler_order": ["xtc"], "temperature_last": True}, "temperature_last", "contradict"),
    ({"sampler_order": ["xtc", 6], "presence_penalty": 1}, "sampler_order", "6 place 2 first"),
    (
        {"max_tokens": 5, "max_completion_tokens": 7},
        "max_completion_tokens",
        "max_tokens max_completion_tokens contradict 5 7",
    ),
    ({"max_tokens": -1, "max_completion_tokens": 7}, "max_tokens", "-1; 0 to"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens", "max_tokens, 0 1"),
    ({"stop": 5}, "stop", "string array strings 16 5"),
    ({"stop": True}, "stop", "string array strings true"),
    ({"stop": {"a": 1}}, "stop", "string array strings object"),
    ({"stop": [""]}, "stop", "stop[0] empty 1 512"),
    ({"stop": ["x"] * 17}, "stop", "16 17"),
    ({"stop": "x" * 513}, "stop", "512"),
    ({"stop": [None]}, "stop", "string"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "0"),
    ({"stop_token_ids": [1000]}, "stop_token_ids", "1000"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "stop_token_ids[0] true number"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "64 65"),
    ({"ignore_eos": 1}, "ignore_eos", "true false 1"),
    ({"min_p": 1.5}, "min_p", "1.5; 0 to 1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2.5; -2 to 2"),
    ({"presence_penalty": False}, "presence_penalty", "number false"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "-2.5; -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0; above 0 10"),
    ({"repetition_penalty": 11}, "repetition_penalty", "11; above 0 10"),
    ({"min_tokens": -1}, "min_tokens", "0 -1"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "max_tokens 5 6"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "['5'] 101; -100 to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "whole key"),
    ({"logit_bias": {"1000": 1}}, "logit_bias", "vocabulary 1000"),
    ({"logit_bias": [5]}, "logit_bias", "object array"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "1"),
    ({"allowed_token_ids": [1000]}, "allowed_token_ids", "vocabulary 1000"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "0"),
    ({"bad_words": ["x"] * 129}, "bad_words", "128"),
    ({"bad_words": [""]}, "bad_words", "bad_words[0] empty 256"),
    ({"bad_words": "x"}, "bad_words", "array"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "true false 1"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "true false 'no'"),
    ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens", "true false 0"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 0"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "0 -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "20 21"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "number true"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"stream": "yes"}, "stream", "true false 'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": 5}, "stream_options", "object 5"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "unknown x"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "true",
    ),
    ({"model": 5}, "model", "string 5"),
    ({"user": "x" * 129}, "user", "128"),
    ({"user": "a\x00b"}, "user", "printable"),
    ({"user": 5}, "user", "string"),
    ({"priority": 2**31}, "priority", "2147483647 2147483648"),
    ({"priority": -(2**31) - 1}, "priority", "-2147483648 -2147483649"),
    ({"priority": 0.5}, "priority", "whole 0.5"),
    ({"priority": "1"}, "priority", "whole '1'"),
    ({"priority": True}, "priority", "whole true"),
    ({"priority": HUGE}, "priority", "digits"),
    ({"cache_salt": "x" * 129}, "cache_salt", "128"),
    ({"cache_salt": "a\nb"}, "cache_salt", "printable"),
    ({"cache_salt": 5}, "cache_salt", "string 5"),
    ({"deadline_s": 0}, "deadline_s", "above 0 86400"),
    ({"deadline_s": 1e9}, "deadline_s", "86400 1000000000"),
    ({"deadline_s": "5"}, "deadline_s", "number '5'"),
    ({"deadline_s": True}, "deadline_s", "number true"),
    ({"metadata": "x"}, "metadata", "object"),
    ({"metadata": {"a": 5}}, "metadata", "string"),
    ({"store": True}, "store", "supported stored false"),
    ({"service_tier": 5}, "service_tier", "string"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true"),
]

_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
_NAMELESS = {"type": "json_schema", "json_schema": {"schema": {}}}
PARAMETERS += [
    ({"tools": {}}, "tools", "array object"),
    ({"tools": ""}, "tools", "array ''"),
    ({"functions": {}}, "functions", "array object"),
    ({"logits_processors": "x"}, "logits_processors", "array 'x'"),
    ({"response_format": "json_object"}, "response_format", "object 'json_object'"),
    ({"response_format": {"type": "xml"}}, "response_format", "'json_object' 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema object"),
    ({"response_format": _NAMELESS}, "response_format", "json_schema.name missing"),
    ({"response_format": {"type": "json_object"}, "bad_words": ["a"]}, "response_format", "bad"),
    ({"response_format": _SCHEMA, "allowed_token_ids": [1]}, "response_format", "allowed_token"),
    (
        {"response_format": _SCHEMA, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "response_format structured_outputs contradict",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one none of"),
    (
        {"structured_outputs": {"regex": "a"}, "no_repeat_ngram_size": 2},
        "structured_outputs",
        "no_repeat_ngram_size contradict",
    ),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "json regex"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown regexp mean regex?"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "choice[0] string 1"),
    ({"structured_outputs": True}, "structured_outputs", "object"),
]

UNSUPPORTED: list[dict[str, Any]] = [
    {"structural_tag": "{}"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "required"},
    {"guided_json": {}},
    {"suffix": "x"},
]

PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({}, "missing"),
    ({"prompt": None}, "missing"),
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, "empty"),
    ({"prompt": [[]]}, "prompt[0] empty"),
    ({"prompt": [""]}, "prompt[0] empty"),
    ({"prompt": ["a", ""]}, "prompt[1] empty"),
    ({"prompt": 5}, "string 5"),
    ({"prompt": {"a": 1}}, "object"),
    ({"prompt": [1, "a"]}, "whole"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1] true number"),
    ({"prompt": [1.5]}, "whole number"),
    ({"prompt": [-1]}, "at least 0"),
    ({"prompt": [1, 1000]}, "1000 position 1"),
    ({"prompt": [2**31]}, "2147483648"),
    ({"prompt": [HUGE]}, "4000"),
    ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, f"{MAX_MODEL_LEN + 1} {MAX_MODEL_LEN}"),
    ({"prompt": ["a"] * 129}, "128 129"),
    ({"prompt": ["a"] * 128, "n": 3}, "384 256"),
]

MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({}, "missing"),
    ({"messages": []}, "empty"),
    ({"messages": "hi"}, "array 'hi'"),
    ({"messages": [5]}, "messages[0] object 5"),
    ({"messages": [{"content": "x"}]}, "messages[0].role missing user"),
    ({"messages": [{"role": "king", "content": "x"}]}, "role user 'king'"),
    ({"messages": [{"role": 5, "content": "x"}]}, "role 5"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"),
    (user(None), "content null"),
    (user(5), "content 5"),
    (user([]), "content empty 1 1024"),
    (user([5]), "content[0] 5"),
    (user([{"type": "image_url", "image_url": {"url": "http://x"}}]), "text 'image_url'"),
    (user([{"type": "text"}]), "content[0].text missing"),
    (
        user([{"type": "text", "text": "a", "x": 1}]),
        "unknown messages[0].content[0]: x known text",
    ),
    (user("x", colour="red"), "unknown messages[0]: colour known role,"),
    (user("x", name=5), "messages[0].name 5"),
    (user("x", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function missing"),
    (
        user("x", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls assistant user",
    ),
    ({"messages": [{"role": "user", "content": "x"}] * 8193}, "8192 8193"),
    ({**HI, "chat_template_kwargs": {"tokenize": True}}, "tokenize known enable_thinking"),
    ({**HI, "chat_template_kwargs": {"enable_thinking": "yes"}}, "enable_thinking"),
    ({**HI, "chat_template": "{{ x }}"}, "chat_template supported"),
    (user("x", tool_calls={}), "messages[0].tool_calls array"),
    (user("x", function_call={}), "function_call supported"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0].content null"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id missing"),
    (
        {"messages": [{"role": "tool", "content": "5", "tool_call_id": ""}]},
        "messages[0].tool_call_id missing",
    ),
    (
        {"messages": [{"role": "tool", "content": "5", "tool_call_id": None}]},
        "messages[0].tool_call_id missing",
    ),
    ({"messages": [{"role": "tool", "content": None, "tool_call_id": "a"}]}, "content null"),
    (
        {**HI, "add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt continue_final_message contradict",
    ),
    ({**HI, "add_generation_prompt": 1}, "add_generation_prompt true false 1"),
    ({**HI, "continue_final_message": "yes"}, "continue_final_message true false 'yes'"),
    ({**HI, "chat_template_kwargs": {"continue_final_message": True}}, "continue_final_message"),
]

BODIES: list[tuple[bytes, str]] = [
    (b"", "empty"),
    ('{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b'"x"', "object"),
    (b"null", "object"),
    (b'{"prompt": "x", "temperature": NaN}', "JSON"),
    (b'{"prompt": "x", "temperature": Infinity}', "JSON"),
    (b'{"prompt": "x", "temperature": 1e400}', "range"),
    (b'{"prompt": "x", "seed": %s}' % (b"1" * 5000), "range"),
    (b'{"prompt": "\\ud800"}', "JSON"),
    (b'{"prompt": "\\udc00 x"}', "JSON"),
    (b'{"prompt": "\xed\xa0\x80"}', "JSON"),
    (b'{"prompt": "\xff"}', "JSON"),
    (b'{"prompt": ' + b"[" * 65 + b"1" + b"]" * 65 + b"}", "64"),
    (b'{"prompt": "x", "junk": ' + b"[" * 100_000, "64"),
    (b'{"prompt": "x", "junk": ' + b'{"a":' * 100_000, "64"),
    (b"[" * 1_000_000, "64"),
    (b'{"prompt": [' + b"[1]," * 100_001 + b"[1]]}", "100000"),
    (b"\xef\xbb\xbf{}", "byte order mark"),
    (b'{"prompt": "x"} trailing', "JSON"),
]


def check(path: str, cases: list[tuple[Any, str | None, str]], config: ServerConfig) -> None:
    """Post every case to one server; nothing may reach the gateway."""

    async def use(client: Client) -> None:
        for body, param, words in cases:
            started = time.process_time()
            status, answer, response = await client.post(path, body)
            case = str(body)[:200]
            assert time.process_time() - started < 1.0, case
            assert status == 400, (case, answer)
            assert set(answer) == {"error"}
            error = answer["error"]
            assert set(error) == {"message", "type", "param", "code"}, case
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 600, case
            for word in words.split():
                assert word in error["message"], (case, error["message"])
            if param is not None:
                assert error["param"] == param, case
            assert response.headers["x-request-id"]
        status, _, _ = await client.post(TEXT, ONE)
        assert status == 200

    assert len(run(use, config=config).works) == 1


def test_each_bad_parameter_is_named_with_its_value_and_limit() -> None:
    cases = [({**ONE, **fields}, param, words) for fields, param, words in PARAMETERS]
    check(TEXT, list(cases), ServerConfig())
    cases = [({**HI, **fields}, param, words) for fields, param, words in PARAMETERS]
    check(CHAT, list(cases), ServerConfig())


SENTENCES = [
    ({"temperature": 300}, "temperature is 300; 0 to 100 is allowed"),
    ({"top_k": 0.5}, "top_k is 0.5; a whole number from -1 to 2147483647 is allowed"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; above 0 and at most 10 is allowed"),
    ({"stop": ["a", "b" * 600]}, "stop[1] has 600 characters; at most 512 are allowed"),
    (
        {"stop": 5},
        "stop is 5; a string of 1 to 512 characters or an array of at most 16 strings is allowed",
    ),
    ({"logit_bias": {"7": "x"}}, "logit_bias['7'] is 'x'; a number from -100 to 100 is allowed"),
    ({"stream": 1}, "stream is 1; true or false is allowed"),
    (
        {"metadata": {"a": None}},
        "metadata['a'] is null; a string of at most 512 characters is allowed",
    ),
]


def test_a_wrong_value_is_told_in_one_sentence_with_its_place_and_what_is_allowed() -> None:
    async def use(client: Client) -> None:
        for path, good in ((TEXT, ONE), (CHAT, HI)):
            for fields, sentence in SENTENCES:
                _, answer, _ = await client.post(path, {**good, **fields})
                assert answer["error"]["message"] == sentence
        turns = [*HI["messages"], {"role": "user", "content": [{"type": "text", "text": "a"}, 5]}]
        _, answer, _ = await client.post(CHAT, {"messages": turns})
        assert answer["error"]["message"] == "messages[1].content[1] is 5; an object is allowed"
        assert answer["error"]["param"] == "messages"

    run(use)


def test_logprobs_are_asked_for_as_the_endpoint_has_it() -> None:
    cases: list[tuple[Any, str | None, str]] = [
        ({**ONE, "logprobs": 21}, "logprobs", "20 21"),
        ({**ONE, "logprobs": True}, "logprobs", "number true"),
        ({**ONE, "top_logprobs": 2}, "top_logprobs", "supported top_logprobs"),
        ({**ONE, "echo": 1}, "echo", "true false 1"),
    ]
    check(TEXT, cases, ServerConfig())
    cases = [
        ({**HI, "logprobs": 3}, "logprobs", "true false 3"),
        ({**HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20 21"),
        ({**HI, "top_logprobs": 2}, "top_logprobs", "logprobs: true 2"),
        ({**HI, "logprobs": True, "include_reasoning": False}, "logprobs", "thinking too"),
        ({**HI, "return_token_ids": True, "include_reasoning": False}, "return_token_ids", "ids"),
        ({**HI, "echo": True}, "echo", "supported echo"),
    ]
    check(CHAT, cases, ServerConfig())


def test_parameters_that_are_not_supported_yet_are_refused_by_name() -> None:
    cases = [({**ONE, **f}, next(iter(f)), f"supported {next(iter(f))}") for f in UNSUPPORTED]
    check(TEXT, list(cases), ServerConfig())


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "did you mean temperature?"),
    ({"max_new_tokens": 5}, "use max_tokens"),
    ({"stop_sequences": ["x"]}, "use stop"),
    ({"guided_json": {"type": "object"}}, 'use structured_outputs: {"json"'),
    ({"guided_regex": "a"}, 'use structured_outputs: {"regex"'),
    ({"guided_choice": ["a"]}, 'use structured_outputs: {"choice"'),
    ({"guided_grammar": "a"}, 'use structured_outputs: {"grammar"'),
    ({"reasoning_effort": "low"}, "use /v1/chat/completions"),
    ({"mirostat": 1}, "use mirostat_mode"),
    ({"top_n_sigma": 1}, "use nsigma"),
    ({"dry_max_ngram": 12}, "every repetition is found"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "did you mean include_usage?"),
]


def test_names_of_other_servers_and_slips_are_told_the_way_out() -> None:
    check(TEXT, [({**ONE, **body}, None, words) for body, words in FOREIGN], ServerConfig())
    check(TEXT, [({**ONE, **HI}, "messages", "use /v1/chat/completions")], ServerConfig())
    check(CHAT, [({**HI, **ONE}, "prompt", "use /v1/completions")], ServerConfig())
    wrong = {"messages": [{"role": "user", "contnet": "hi", "content": "x"}]}
    check(CHAT, [(wrong, "messages", "did you mean content?")], ServerConfig())


def test_a_model_with_a_slip_is_told_the_one_that_is_meant() -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(TEXT, {**ONE, "model": "Org/modle"})
        assert status == 404
        assert "did you mean" in answer["error"]["message"]

    run(use)


def test_all_unknown_and_unsupported_parameters_are_named_at_once() -> None:
    body = {**ONE, "foo": 1, "bar": 2, "tools": [1], "suffix": "x", "x" * 500: 1}
    check(TEXT, [(body, "foo", "unknown foo bar tools suffix supported")], ServerConfig())
    many = {**ONE, **{f"p{number}": 1 for number in range(1000)}}
    check(TEXT, [(many, "p0", "p0 p15 984 more")], ServerConfig())


def test_all_wrong_values_are_told_at_once_with_what_is_allowed() -> None:
    wrong = {"temperature": 300, "top_p": 2, "max_tokens": "many", "stop": 5, "sead": 1}
    words = "sead seed temperature 300; 0 to 100 top_p 2; max_tokens 'many'; stop 5;"
    check(CHAT, [({**HI, **wrong}, "sead", words)], ServerConfig())


def test_bad_prompts_are_refused() -> None:
    check(TEXT, [(body, None, words) for body, words in PROMPTS], ServerConfig())


def test_bad_messages_are_refused() -> None:
    check(CHAT, [(body, None, words) for body, words in MESSAGES], ServerConfig())


def test_bodies_that_are_no_good_json_are_refused() -> None:
    check(TEXT, [(body, None, words) for body, words in BODIES], ServerConfig())


def test_an_unknown_model_is_a_404_that_names_the_served_ones() -> None:
    async def use(client: Client) -> None:
        for name in ("gpt-5", "", "Org/model", "../x", "x" * 5000):
            status, answer, _ = await client.post(TEXT, {**ONE, "model": name})
            assert status == 404
            assert "org/model" in answer["error"]["message"]
            assert len(answer["error"]["message"]) < 400
            assert answer["error"]["code"] == "model_not_found"

    assert run(use).works == []


def test_a_body_over_the_limit_is_a_413_with_and_without_a_declared_length() -> None:
    limit = 4096

    def body(size: int) -> bytes:
        start = b'{"prompt": "'
        return start + b"x" * (size - len(start) - 2) + b'"}'

    async def chunks(data: bytes) -> Any:
        yield data[:1000]
        yield data[1000:]

    async def use(client: Client) -> None:
        assert (await client.post(TEXT, body(limit)))[0] == 200
        status, answer, _ = await client.post(TEXT, body(limit + 1))
        assert status == 413
        assert "4096" in answer["error"]["message"]
        url = client.url + TEXT
        async with client.session.post(url, data=chunks(body(limit))) as response:
            assert response.status == 200
        async with client.session.post(url, data=chunks(body(limit + 1))) as response:
            assert response.status == 413
            assert "error" in json.loads(await response.read())

    run(use, config=ServerConfig(max_body_bytes=limit))


def test_a_declared_length_over_the_limit_is_refused_before_the_body_is_sent() -> None:
    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: 9999999999\r\n\r\n"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()

    run(use)


def test_a_compressed_bomb_is_refused_by_its_decoded_size() -> None:
    import zlib

    async def use(client: Client) -> None:
        bomb = zlib.compress(b" " * 50_000_000)
        headers = {"Content-Encoding": "deflate"}
        status, _, _ = await client.post(TEXT, bomb, headers=headers)
        assert status == 413
        status, _, _ = await client.post(TEXT, b"not compressed", headers=headers)
        assert status == 400

    run(use)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v2/embed", "/v1/embeddings"),
        ("/v2/nothing/", ""),
        ("/" * 3000, ""),
    ],
)
def test_a_path_that_a_wrong_base_url_makes_is_told_the_one_that_there_is(
    path: str, meant: str
) -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(path, ONE)
        message = answer["error"]["message"]
        assert status == 404
        assert message.endswith(f"; there is {meant}") if meant else "there is /" not in message

    run(use)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("DELETE", "/", 405),
        ("GET", "/v1", 404),
        ("POST", "/v1/chat/completion", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/nothing/%0d%0aX: y", 404),
    ],
)
def test_unknown_routes_and_methods_have_the_error_shape(
    method: str, path: str, status: int
) -> None:
    async def use(client: Client) -> None:
        async with client.session.request(method, client.url + path) as response:
            answer = json.loads(await response.read())
            assert response.status == status
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert response.headers["x-request-id"]
            assert ("Allow" in response.headers) == (status == 405)

    run(use)


def test_a_crash_in_a_handler_is_a_500_that_tells_nothing_of_its_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(client: Client) -> None:
        def models() -> Any:
            raise RuntimeError("secret at 0xdeadbeef")

        client.gateway.models = models  # type: ignore[method-assign]
        status, answer, response = await client.post(TEXT, ONE)
        assert status == 500
        assert answer["error"]["type"] == "server_error"
        assert "secret" not in json.dumps(answer)
        assert response.headers["x-request-id"] in answer["error"]["message"]

    run(use)
    assert "secret" in caplog.text

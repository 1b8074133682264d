"""Configuration: each field by every road, precedence, and errors that name all that is wrong."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from msgspec.inspect import LiteralType

from penstock.protocol.config import Config, ConfigError, build_parser, resolve
from penstock.protocol.config.flags import TEST_ONLY
from penstock.protocol.config.resolve import Field, fields
from penstock.protocol.config.shown import show
from penstock.protocol.keys.key_file import change_keys

FIELDS = fields()
GROUPS = list(msgspec.structs.asdict(Config()))


SECRETS = tempfile.TemporaryDirectory()
KEYS_FILE = Path(SECRETS.name) / "keys"
change_keys(KEYS_FILE, lambda lines: lines)

# Fields whose values have a form that their type does not say.
SPELLED: dict[str, Any] = {
    "router": "tcp://127.0.0.1:5570",
    "join": "tcp://127.0.0.1:5570",
    "pipeline_layers": "even",
    "port_range": "20000-20099",
    "gpu_memory_utilization": 0.5,
    "max_tenant_share": 0.4,
    "retained_cache_share": 0.2,
    "tenant_cache_share": 0.2,
    "memory_share": [0.5],
    "speculative": "suffix",
    "model_dirs": [SECRETS.name],
    "keep_alive": ["10m"],
    "lora": ["one=/adapters/one"],
    "lora_dirs": [SECRETS.name],
    "allowed_origins": ["https://one.example", "http://two.example:3000"],
    "keys_file": str(KEYS_FILE),
    "tls_cert": __file__,
    "tls_key": __file__,
    "uds": "/run/penstock.sock",
    "uds_mode": "660",
    "grpc_uds": "/run/penstock-grpc.sock",
    "root_path": "/llm",
    "trusted_proxies": ["10.0.0.0/8", "::1"],
}


def bare_type(field: Field) -> inspect.Type:
    """The declared type without descriptions, and without ``None`` if there is something else."""
    kind: inspect.Type = inspect.type_info(field.type)
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        (kind,) = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
    return kind


def other_value(field: Field) -> Any:
    """A valid value that is not the default."""
    if field.name in SPELLED:
        return SPELLED[field.name]
    match bare_type(field):
        case inspect.BoolType():
            return not field.default
        case inspect.LiteralType(values=values):
            return next(value for value in values if value != field.default)
        case inspect.IntType(ge=low, le=high):
            assert low is not None, f"{field.name}: a number needs both bounds"
            assert high is not None, f"{field.name}: a number needs both bounds"
            return low + 1 if low + 1 != field.default else low
        case inspect.FloatType() as kind:
            assert kind.le is not None, f"{field.name}: a number needs both bounds"
            assert kind.ge is not None or kind.gt is not None, f"{field.name}: both bounds"
            return 1.5
        case inspect.StrType():
            return "other"
        case inspect.ListType():
            return ["one", "two"]
    raise TypeError(field.type)


# Fields that must be set together to be free of conflicts.
COMPANIONS: dict[str, dict[str, Any]] = {
    "max_num_batched_tokens": {"max_num_seqs": 1},
    "null_step_ms": {"device": "null"},
    "join_timeout_s": {"executor": "ray"},
    "nodes": {
        "router": "tcp://10.0.0.5:5570",
        "secret": "a secret of all hosts",
        "data_parallel_size": 2,
    },
    "host": {"insecure": True},
    "grpc_host": {"grpc_port": 9000, "insecure": True},
    "grpc_tokenizer": {"grpc_port": 9000},
    "published_host": {"insecure": True},
    "limits_url": {"keys_file": str(KEYS_FILE)},
    "uds_mode": {"uds": "/run/penstock.sock"},
    "tls_cert": {"tls_key": __file__},
    "tls_key": {"tls_cert": __file__},
    "kv_tier_disk_bytes": {"kv_tier_disk": "/var/cache/penstock"},
    "kv_tier_store_after": {"kv_tier_memory_bytes": 2**30},
    "role": {"kv_tier_memory_bytes": 2**30},
    "prefill_engines": {"decode_engines": 1, "kv_tier_memory_bytes": 2**30},
    "decode_engines": {"prefill_engines": 1, "kv_tier_memory_bytes": 2**30},
    "min_awake_s": {"resident": 1},
    "prepare_engines": {"keep_alive": ["10m"]},
    "speculative_tokens": {"speculative": "suffix"},
    "speculative_history": {"speculative": "suffix"},
    "speculative_model": {"speculative": "eagle3"},
}


@functools.cache
def parser_of(*groups: str) -> argparse.ArgumentParser:
    return build_parser("penstock", "test", list(groups), positional_model=True)


def command(*arguments: str, groups: list[str] = GROUPS) -> argparse.Namespace:
    return parser_of(*groups).parse_args(arguments)


def as_flags(name: str, value: Any) -> list[str]:
    flag = FIELDS[name].flag
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [argument for each in value for argument in (flag, str(each))]
    return [flag, str(value)]


def as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).removesuffix(".0")


def got(config: Config, name: str) -> Any:
    return getattr(getattr(config, FIELDS[name].group), name)


def fault_of(*arguments: str, environment: dict[str, str] | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(GROUPS, command(*arguments, **options), environment or {})
    return str(caught.value)


def written(path: Path, values: dict[str, Any]) -> str:
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return str(path)


# --- every field by every road


def test_names_are_unique_over_all_groups() -> None:
    kinds = [getattr(Config(), group) for group in GROUPS]
    declared = [f.name for kind in kinds for f in struct(kind) if f.name != "models"]
    assert len(declared) == len(FIELDS)
    assert sorted(declared) == sorted(FIELDS)


def struct(kind: Any) -> Any:
    return msgspec.structs.fields(kind)


def test_without_settings_every_field_has_its_default() -> None:
    config, sources = resolve(GROUPS, command(), {})
    assert config == Config()
    assert {source.origin for source in sources.values()} == {"default"}
    assert sources.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_a_flag_sets_the_field(name: str) -> None:
    value = other_value(FIELDS[name])
    arguments = as_flags(name, value)
    for other, its_value in COMPANIONS.get(name, {}).items():
        arguments += as_flags(other, its_value)
    config, sources = resolve(GROUPS, command(*arguments), {})
    assert got(config, name) == value
    assert type(got(config, name)) is type(value)
    assert (sources[name].origin, sources[name].detail) == ("flag", FIELDS[name].flag)


@pytest.mark.parametrize("name", FIELDS)
def test_an_environment_variable_sets_the_field(name: str) -> None:
    value = other_value(FIELDS[name])
    environment = {FIELDS[name].variable: as_text(value), "UNRELATED": "x"}
    for other, its_value in COMPANIONS.get(name, {}).items():
        environment[FIELDS[other].variable] = as_text(its_value)
    config, sources = resolve(GROUPS, command(), environment)
    assert got(config, name) == value
    assert type(got(config, name)) is type(value)
    assert (sources[name].origin, sources[name].detail) == ("environment", FIELDS[name].variable)


def in_files() -> Iterator[Any]:
    """Each field in files of one style and a few of every style; all of them in the long run."""
    styles = ["flat", "dashes", "group", "yaml"]
    for number, name in enumerate(FIELDS):
        for place, style in enumerate(styles):
            usual = number % 10 == 0 or place == number % len(styles)
            yield pytest.param(name, style, marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize(("name", "style"), in_files())
def test_a_file_sets_the_field(name: str, style: str, tmp_path: Path) -> None:
    value = other_value(FIELDS[name])
    values = {name: value, **COMPANIONS.get(name, {})}
    path = tmp_path / ("c.yaml" if style == "yaml" else "c.toml")
    if style == "yaml":
        pytest.importorskip("yaml")
        path.write_text(json.dumps({FIELDS[name].group: values}))
    elif style == "group":
        written(path, values)
        path.write_text(f"[{FIELDS[name].group}]\n{path.read_text()}")
    else:
        dashes = style == "dashes"
        written(path, {n.replace("_", "-") if dashes else n: v for n, v in values.items()})
    config, sources = resolve(GROUPS, command("--config", str(path)), {})
    assert got(config, name) == value
    assert type(got(config, name)) is type(value)
    assert (sources[name].origin, sources[name].detail) == ("file", str(path))


@functools.cache
def help_of(group: str) -> str:
    """All that the help says of a group's flags, with single blanks."""
    parser = build_parser("penstock", "test", [group])
    parser.show_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        return re.sub(r"\s+", " ", parser.format_help())


@pytest.mark.parametrize("name", FIELDS)
def test_help_names_flag_default_variable_and_purpose(name: str) -> None:
    field = FIELDS[name]
    assert len(field.help) > 10, f"{name} needs a description"
    text = help_of(field.group)
    if name in TEST_ONLY:
        assert field.flag not in text
        return
    assert field.flag in text
    assert f"({field.variable})" in text
    assert re.sub(r"\s+", " ", field.help) in text
    default = {None: "[derived]", "": "[none]"}.get(
        field.default if not isinstance(field.default, list) else "", f"[{field.default}]"
    )
    assert default in text


CHOICES = {n: k.values for n, f in FIELDS.items() if isinstance(k := bare_type(f), LiteralType)}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_no_choice_is_told_the_choices(name: str) -> None:
    field = FIELDS[name]
    fault = fault_of(field.flag, "gpus")
    assert fault.startswith(f"{field.flag} 'gpus': ")
    text = help_of(field.group)
    for choice in CHOICES[name]:
        assert re.search(rf"\b{choice}\b", fault)
        assert re.search(rf"\b{choice}\b", text)


def test_a_command_offers_only_the_flags_of_its_groups() -> None:
    parser = build_parser("penstock", "test", ["cluster"])
    assert "--router" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-model-len", "5"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--rout", "x"])  # no abbreviations: they change meaning later


# --- precedence


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", {"port": 1001, "host": "127.0.0.3", "rank": 5})
    environment = {"PENSTOCK_PORT": "1002", "PENSTOCK_HOST": "127.0.0.2"}
    config, sources = resolve(GROUPS, command("--config", path, "--port", "1003"), environment)
    assert (config.server.port, config.server.host, config.cluster.rank) == (1003, "127.0.0.2", 5)
    origins = [sources[name].origin for name in ("port", "host", "rank", "device")]
    assert origins == ["flag", "environment", "file", "default"]


def test_a_flag_beats_the_environment_with_the_default_too() -> None:
    config, _ = resolve(GROUPS, command("--port", "8000"), {"PENSTOCK_PORT": "9000"})
    assert config.server.port == 8000
    off = {"PENSTOCK_ENABLE_PREFIX_CACHING": "false"}
    config, _ = resolve(GROUPS, command("--enable-prefix-caching"), off)
    assert config.cache.enable_prefix_caching


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", {"port": 1001})
    config, _ = resolve(GROUPS, command(), {"PENSTOCK_CONFIG": path})
    assert config.server.port == 1001
    other = written(tmp_path / "d.toml", {"port": 1002})
    config, _ = resolve(GROUPS, command("--config", other), {"PENSTOCK_CONFIG": path})
    assert config.server.port == 1002


def test_the_model_may_be_given_without_a_flag(tmp_path: Path) -> None:
    config, sources = resolve(GROUPS, command("/models/a"), {"PENSTOCK_MODEL": "/models/b"})
    assert config.model.model == "/models/a"
    assert sources["model"].origin == "flag"
    config, _ = resolve(GROUPS, command("/models/a", "--model", "/models/a"), {})
    assert config.model.model == "/models/a"
    assert "/models/a" in (text := fault_of("/models/a", "--model", "/models/b"))
    assert "/models/b" in text


def test_settings_of_other_commands_are_left_alone(tmp_path: Path) -> None:
    """One file and one environment serve all processes."""
    path = written(tmp_path / "c.toml", {"port": 70000, "rank": 3})
    environment = {"PENSTOCK_MAX_NUM_SEQS": "nonsense", "PENSTOCK_CONFIG": path}
    config, sources = resolve(["cluster"], command(groups=["cluster"]), environment)
    assert config.cluster.rank == 3
    assert config.server.port == 8000
    assert sources["port"].origin == "default"


def test_a_plain_mapping_serves_as_well_as_parsed_flags() -> None:
    config, _ = resolve(GROUPS, {"port": 5, "api_key": ["a"], "enable_prefix_caching": False}, {})
    assert (config.server.port, config.server.api_key) == (5, ["a"])
    assert not config.cache.enable_prefix_caching


# --- kinds of value


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("false", False), ("1", True), ("0", False), ("True", True), ("FALSE", False)],
)
def test_a_truth_value_has_the_usual_spellings(text: str, value: bool) -> None:
    config, _ = resolve(GROUPS, command(), {"PENSTOCK_ENABLE_PREFIX_CACHING": text})
    assert config.cache.enable_prefix_caching is value


@pytest.mark.parametrize("text", ["yes", "", "2", "truth"])
def test_a_truth_value_of_another_spelling_is_an_error(text: str) -> None:
    fault = fault_of(environment={"PENSTOCK_ENABLE_PREFIX_CACHING": text})
    assert fault.startswith(f"PENSTOCK_ENABLE_PREFIX_CACHING {text!r}: ")


def test_a_flag_takes_one_value_and_leaves_the_model_alone() -> None:
    for flag in ("--served-model-name", "--api-key", "--allowed-origins", "--fault"):
        parsed = command(flag, "https://one.example", "/models/a", flag, "https://two.example")
        assert parsed.MODEL == "/models/a"
        name = flag.removeprefix("--").replace("-", "_")
        assert getattr(parsed, name) == ["https://one.example", "https://two.example"]


def test_a_second_value_behind_a_flag_is_told_to_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command("/models/a", "--api-key", "one", "two")
    text = capsys.readouterr().err
    assert "'two'" in text
    assert "/models/a" in text
    assert "repeat" in text


def test_a_list_is_separated_by_commas_in_the_environment_and_its_flag_is_repeated() -> None:
    config, _ = resolve(GROUPS, command(), {"PENSTOCK_SERVED_MODEL_NAME": "a,b,,c"})
    assert config.model.served_model_name == ["a", "b", "c"]
    config, _ = resolve(GROUPS, command(*as_flags("served_model_name", ["a", "b,c"])), {})
    assert config.model.served_model_name == ["a", "b,c"]


@pytest.mark.parametrize(
    "keys", [["a,b", "c"], ["a"], ["[a"], ['["a"]', "b"], ["a", "b"], ["ä\\", 'q"'], [""]]
)
def test_a_json_array_in_the_environment_may_hold_values_with_commas(keys: list[str]) -> None:
    environment = {"PENSTOCK_API_KEY": json.dumps(keys)}
    if "" not in keys:
        assert resolve(["server"], {}, environment)[0].server.api_key == keys
    text = FIELDS["api_key"].text(keys)
    assert FIELDS["api_key"].convert(text) == keys, "what children are told is read back"


@pytest.mark.parametrize("text", ["[a,b", "[1]", '["a"'])
def test_what_begins_like_a_json_array_and_is_none_is_an_error(text: str) -> None:
    fault = fault_of(environment={"PENSTOCK_SERVED_MODEL_NAME": text})
    assert fault.startswith(f"PENSTOCK_SERVED_MODEL_NAME {text!r}: ")
    assert "JSON array" in fault


NUMBERS = [n for n, f in FIELDS.items() if isinstance(bare_type(f), inspect.IntType)]
REALS = [n for n, f in FIELDS.items() if isinstance(bare_type(f), inspect.FloatType)]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_whole_number_outside_its_bounds_is_an_error_that_names_the_bound(name: str) -> None:
    kind = bare_type(FIELDS[name])
    assert isinstance(kind, inspect.IntType)
    assert kind.ge is not None
    assert kind.le is not None
    for value, bound in ((kind.ge - 1, kind.ge), (kind.le + 1, kind.le), (10**30, kind.le)):
        fault = fault_of(f"{FIELDS[name].flag}={value}")
        assert fault.startswith(f"{FIELDS[name].flag} '{value}': ")
        assert str(bound) in fault or "range" in fault


@pytest.mark.parametrize("name", NUMBERS + REALS)
def test_what_is_no_number_in_range_is_an_error(name: str) -> None:
    for text in ("", "x", "nan", "inf", "-inf", "1e999", "0x10", "1_000", "1 2"):
        assert fault_of(f"{FIELDS[name].flag}={text}").startswith(f"{FIELDS[name].flag} {text!r}: ")


def test_what_is_no_choice_is_an_error_that_names_it() -> None:
    for name, field in FIELDS.items():
        if isinstance(bare_type(field), inspect.LiteralType):
            assert "'12345'" in fault_of(field.flag, "12345"), name


@pytest.mark.parametrize(("text", "number"), [("32k", 32_000), ("32K", 32_768), ("1m", 10**6)])
def test_a_length_may_be_written_short_by_every_road(
    text: str, number: int, tmp_path: Path
) -> None:
    path = written(tmp_path / "c.toml", {"max_model_len": text})
    for arguments, environment in (
        (["--max-model-len", text], {}),
        ([], {"PENSTOCK_MAX_MODEL_LEN": text}),
        (["--config", path], {}),
    ):
        config, _ = resolve(GROUPS, command(*arguments), environment)
        assert config.model.max_model_len == number
    assert resolve(GROUPS, {"max_model_len": text}, {})[0].model.max_model_len == number


def test_no_error_speaks_of_types_of_python() -> None:
    for name in NUMBERS + REALS:
        fault = fault_of(f"{FIELDS[name].flag}=x")
        assert "number" in fault, fault
        assert name in REALS or "32k is 32,000" in fault  # how a number is written
        assert not re.search(r"`|\bnull\b|\bint\b|\bfloat\b", fault.partition(": ")[2]), fault


def test_of_a_number_out_of_bounds_the_bound_alone_is_told() -> None:
    for name in ("port", "max_num_seqs"):
        fault = fault_of(f"{FIELDS[name].flag}=-5")
        assert ">= " in fault and "32k" not in fault


# --- errors


def flag_error(capsys: pytest.CaptureFixture[str], *arguments: str, **options: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        command(*arguments, **options)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_wrong_flag_is_told_in_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--foo", "1", "/models/a"], ["--port"], ["--enable-prefix-caching=1"]):
        lines = flag_error(capsys, *arguments).splitlines()
        assert len(lines) == 3
        assert lines[0] == "usage: penstock [MODEL] [flags]"
        assert arguments[0].partition("=")[0] in lines[1]
        assert "--help" in lines[2]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--prot", "did you mean --port?"),
        ("--no-enable-prefix-cachin", "did you mean --no-enable-prefix-caching?"),
        ("--max_model_len", "did you mean --max-model-len?"),
        ("--max-seq-len", "use --max-model-len"),
        ("--context-length", "use --max-model-len"),
        ("--mem-fraction-static", "use --gpu-memory-utilization"),
        ("--dp", "use --data-parallel-size"),
        ("-tp", "use --tensor-parallel-size"),
        ("--tp", "use --tensor-parallel-size"),
        ("--nnodes", "use --nodes"),
        ("--node-rank", "use --nodes on the first host and --join on the others"),
        ("--distributed-executor-backend", "use --executor"),
        ("--enable-expert-parallel", "not supported yet"),
        ("--max-new-tokens", "give max_tokens in each request; --max-model-len bounds"),
        ("--n-predict", "give max_tokens in each request"),
        ("--temperature", "give it in each request"),
        ("--torchao-config", "not supported yet: torchao; --quantization int8"),
        ("--quantize", "use --quantization"),
        ("--chat-template", "not supported yet"),
        ("--trust-remote-code", "leave it out"),
    ],
)
def test_a_flag_of_another_server_or_with_a_slip_is_told_the_way_out(
    flag: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([flag, "2"], [f"{flag}=2"], ["/models/a", flag, "2"]):
        (line,) = flag_error(capsys, *arguments).splitlines()[1:-1]
        assert f"unknown flag {flag}: {words}" in line


def test_each_unknown_flag_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = flag_error(capsys, "--tp", "2", "--prot", "80", "--xyzzy")
    assert [line.rpartition("unknown flag ")[2].split(":")[0] for line in text.splitlines()] == [
        text.splitlines()[0].split(":")[0], "--tp", "--prot", "--xyzzy", text.splitlines()[-1],
    ]  # fmt: skip


def test_a_flag_of_another_command_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = flag_error(capsys, "--max-num-seqs", "3", groups=["cluster"])
    assert "`penstock serve` does" in text
    text = flag_error(capsys, "--role", "decode", groups=["cluster"])
    assert "`penstock scheduler` does" in text, "serve takes it of no command"


def test_an_unknown_key_or_variable_is_told_the_way_out(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", {"prot": 1, "max-seq-len": 2, "torchao-config": 2})
    lines = fault_of("--config", path).splitlines()
    assert [line.partition("key ")[2] for line in lines[:2]] == [
        "'prot': did you mean port?",
        "'max_seq_len': use max_model_len",
    ]
    assert "not supported yet" in lines[2]
    (tmp_path / "d.toml").write_text("[modle]\nport = 1\n")
    assert "'modle': did you mean model?" in fault_of("--config", str(tmp_path / "d.toml"))
    environment = {"PENSTOCK_PROT": "1", "PENSTOCK_MAX_SEQ_LEN": "1"}
    lines = fault_of(environment=environment).splitlines()
    assert lines[0].endswith("PENSTOCK_PROT: did you mean PENSTOCK_PORT?")
    assert lines[1].endswith("PENSTOCK_MAX_SEQ_LEN: use PENSTOCK_MAX_MODEL_LEN")


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", {"port": 99999, "prot": 1})
    fault = fault_of(
        "--config", path, "--max-num-seqs", "0", "--dtype", "int3",
        environment={"PENSTOCK_RANK": "x", "PENSTOCK_NONSENSE": "1"},
    )  # fmt: skip
    lines = fault.splitlines()
    assert len(lines) == 6
    for part in ("port", "'prot'", "--max-num-seqs '0'", "int3", "PENSTOCK_RANK", "NONSENSE"):
        assert sum(part in line for line in lines) >= 1, part


def test_an_unknown_variable_or_key_is_an_error_that_names_it(tmp_path: Path) -> None:
    assert "PENSTOCK_MAX_MODELLEN" in fault_of(environment={"PENSTOCK_MAX_MODELLEN": "5"})
    path = written(tmp_path / "c.toml", {"max_modellen": 5})
    assert "'max_modellen'" in (text := fault_of("--config", path))
    assert path in text
    (tmp_path / "d.toml").write_text("[modle]\nport = 1\n")
    assert "'modle'" in fault_of("--config", str(tmp_path / "d.toml"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", b"port = "),
        ("b.toml", b"\xff\xfe\x00"),
        ("c.toml", b"port = 1\nport = 2"),
        ("d.yaml", b"{"),
        ("e.yaml", b"- 1\n- 2"),
        ("f.yaml", b"just text"),
        ("g.yaml", b"1: 2"),
        ("h.yaml", b""),
        ("i.yaml", b"[" * 5000),
        ("j.yaml", b"\xff\xfe\x00"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert str(tmp_path / name) in fault_of("--config", str(tmp_path / name))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.toml" in fault_of("--config", f"{tmp_path}/none.toml")
    assert str(tmp_path) in fault_of("--config", str(tmp_path))


def test_a_key_given_twice_in_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("port = 1\n[server]\nport = 2\n")
    assert "port" in fault_of("--config", f"{tmp_path}/c.toml")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["--max-num-seqs", "100", "--max-num-batched-tokens", "50"],
            ["--max-num-seqs 100", "--max-num-batched-tokens 50"],
        ),
        (
            ["--max-model-len", "1000", "--num-kv-blocks", "10", "--block-size", "32"],
            ["--max-model-len 1000", "--num-kv-blocks 10", "32", "320"],
        ),
    ],
)
def test_a_conflict_names_both_settings_and_their_values(
    arguments: list[str], parts: list[str]
) -> None:
    fault = fault_of(*arguments)
    assert all(part in fault for part in parts)


def test_all_conflicts_are_reported_together() -> None:
    fault = fault_of(
        "--max-num-seqs", "100", "--max-num-batched-tokens", "50",
        "--max-model-len", "1000", "--num-kv-blocks", "10",
    )  # fmt: skip
    assert len(fault.splitlines()) == 2


# --- what is shown, and what is not


def test_show_config_says_each_value_and_its_source(tmp_path: Path) -> None:
    path = written(tmp_path / "c.toml", {"rank": 3})
    arguments = command("--config", path, "--port", "5")
    config, sources = resolve(GROUPS, arguments, {"PENSTOCK_HOST": "localhost"})
    text = show(config, sources, GROUPS)
    lines = text.splitlines()
    assert "port = 5  # flag --port" in lines
    assert 'host = "localhost"  # environment PENSTOCK_HOST' in lines
    assert f"rank = 3  # file {path}" in lines
    assert "block_size = 16  # default" in lines
    assert [line for line in lines if line.startswith("[")] == [f"[{group}]" for group in GROUPS]
    assert len(lines) == len(FIELDS) + len(GROUPS)


def test_secrets_are_neither_shown_nor_in_errors(tmp_path: Path) -> None:
    arguments = command(
        "--secret", "hush-hush-hush-hush", *as_flags("api_key", ["sk-1234", "sk-5678"])
    )
    text = show(*resolve(GROUPS, arguments, {}), GROUPS)
    assert "hush" not in text
    assert "sk-" not in text
    assert text.count("<hidden>") == 3
    text = show(*resolve(GROUPS, command("--response-store", "redis://:hush@host"), {}), GROUPS)
    assert "hush" not in text
    text = show(*resolve(GROUPS, command("--response-store", "redis://host"), {}), GROUPS)
    assert 'response_store = "redis://host"' in text
    text = show(*resolve(GROUPS, command(), {}), GROUPS)
    assert "<hidden>" not in text, "that there is none is no secret"
    path = written(tmp_path / "c.toml", {"secret": ["hush-hush"], "api_key": [1234567]})
    fault = fault_of("--config", path)
    assert "hush" not in fault
    assert "1234567" not in fault
    assert len(fault.splitlines()) == 2


def test_a_resolved_configuration_is_frozen() -> None:
    config, _ = resolve(GROUPS, command(), {})
    with pytest.raises(AttributeError):
        config.server.port = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config.server = Config().server  # type: ignore[misc]


def test_nothing_else_reads_the_environment() -> None:
    """Configuration is resolved in one place; Triton alone decides where its cache lies."""
    root = Path(__file__).parents[2]
    found = [
        str(path.relative_to(root))
        for folder in ("protocol",)
        for path in (root / folder).rglob("*.py")
        if re.search(r"os\.environ|getenv", path.read_text())
    ]
    assert sorted(found) == ["protocol/config/machine.py", "protocol/config/terminal.py"]


def test_parsing_flags_imports_nothing_heavy() -> None:
    code = (
        "import sys, penstock.protocol.config as c; c.build_parser('p', 'd', ['model']);"
        "print([m for m in ('torch', 'transformers', 'aiohttp', 'zmq') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_wrong_values_and_contradictions_of_others_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(
            GROUPS,
            {"port": "99999", "max_num_seqs": "64", "max_num_batched_tokens": "32"},
            {"PENSTOCK_PROT": "1"},
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "--port '99999'" in lines[1]
    assert "PENSTOCK_PROT" in lines[0]
    assert "--max-num-seqs 64" in lines[2]
    assert "--max-num-batched-tokens 32" in lines[2]


def test_a_value_that_cannot_be_read_contradicts_nobody() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(GROUPS, {"max_num_seqs": "many", "max_num_batched_tokens": "1"}, {})
    (line,) = str(caught.value).splitlines()
    assert "--max-num-seqs 'many'" in line

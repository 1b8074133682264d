"""``penstock serve`` on a host with several GPUs: which layout it takes, and which it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_worker_layouts import show
from test_worker_plan import LLAMA_8B, LLAMA_70B

from penstock.loadtest import own_server as measured_server
from penstock.protocol.config import complete as completing
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.terminal import style_of
from penstock.services import cli
from penstock.services.commands.chat import own_server as chat_server
from penstock.services.launcher import serve

H100 = "NVIDIA H100 80GB HBM3"
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 30_522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}

TWO_HEADS = LLAMA_8B | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 48}


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with eight H100s, as far as the launcher sees."""
    host(monkeypatch, *[H100] * 8)


def host(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    show(monkeypatch, *names)
    machine = Machine(cores=32, physical_cores=16, gpus=len(names))
    monkeypatch.setattr(completing, "this_machine", lambda: machine)
    monkeypatch.setattr(cli, "read_machine", lambda **_: machine)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """What the launcher is given: the configuration, and the line about the layout."""
    found: list[tuple[Any, str]] = []

    def run(name: str, configs: Any, *more: Any) -> int:
        found.append((configs[0], more[-1]))
        return 0

    monkeypatch.setattr(cli, "_run", run)
    return found


def model(folder: Path, shape: dict[str, Any], **changed: Any) -> str:
    (folder / "config.json").write_text(json.dumps(shape | changed))
    return str(folder)


def sizes(config: Any) -> tuple[int, int, int]:
    cluster = config.cluster
    engines: int = config.launch.data_parallel_size
    return cluster.tensor_parallel_size, cluster.pipeline_parallel_size, engines


@pytest.mark.usefixtures("eight")
def test_a_large_model_is_divided_as_the_plan_says(
    tmp_path: Path, starts: list[tuple[Any, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model(tmp_path, LLAMA_70B)
    assert cli.main(["plan", folder, "--gpus", "auto", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["layouts"][0]
    assert cli.main(["serve", folder, "--load-format", "dummy"]) == 0
    ((config, line),) = starts
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    assert sizes(config) == tuple(planned[name] for name in names) == (4, 1, 2)
    assert line.startswith(f"TP 4 × PP 1 × DP 2 on 8 × {H100}: the most tokens a second, about ")
    assert f"{planned['tokens_per_second']:,.0f}," in line


@pytest.mark.usefixtures("eight")
def test_a_small_model_has_an_engine_on_each_gpu(
    tmp_path: Path, starts: list[tuple[Any, str]]
) -> None:
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), "--load-format", "dummy"]) == 0
    assert sizes(starts[0][0]) == (1, 1, 8)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-cache-dtype", "fp8"],
        ["--kv-tier-memory-bytes", "1G"],
        ["--speculative", "suffix"],
        ["--deterministic"],
    ],
    ids=" ".join,
)
def test_no_layout_is_chosen_that_a_setting_is_refused_with(
    tmp_path: Path,
    starts: list[tuple[Any, str]],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    # Unless it is refused, the layout of two GPUs an engine is chosen.
    fits_one = model(tmp_path, LLAMA_8B, num_hidden_layers=64)
    assert cli.main(["serve", fits_one, "--load-format", "dummy", *flags]) == 0
    assert sizes(starts[0][0]) == (1, 1, 8)
    fits_none = model(tmp_path, LLAMA_70B)
    assert cli.main(["serve", fits_none, "--load-format", "dummy", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.usefixtures("eight")
def test_gpus_before_the_first_device_are_left_alone(
    tmp_path: Path, starts: list[tuple[Any, str]]
) -> None:
    flags = ["--load-format", "dummy", "--device-index", "6"]
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), *flags]) == 0
    assert sizes(starts[0][0]) == (1, 1, 2)


def test_a_number_of_gpus_that_divides_nothing_leaves_some_idle(
    tmp_path: Path, starts: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 3)
    assert cli.main(["serve", model(tmp_path, LLAMA_70B), "--load-format", "dummy"]) == 0
    config, line = starts[0]
    assert sizes(config)[0] == 2 or sizes(config)[1] > 1, line
    assert "on 3 ×" in line


@pytest.mark.usefixtures("eight")
def test_what_was_chosen_and_why_is_shown_with_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model(tmp_path, LLAMA_70B)
    assert cli.main(["serve", folder, "--load-format", "dummy", "--show-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [one for one in lines if one.startswith("tensor_parallel_size")]
    assert line.startswith("tensor_parallel_size = 4  # derived penstock plan: TP 4 × PP 1 × DP 2")


@pytest.mark.usefixtures("eight")
def test_sizes_that_are_given_stay_and_nothing_is_chosen_beside_them(
    tmp_path: Path, starts: list[tuple[Any, str]]
) -> None:
    flags = ["--load-format", "dummy", "--tensor-parallel-size", "2"]
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), *flags]) == 0
    assert (sizes(starts[0][0]), starts[0][1]) == ((2, 1, 1), "")


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("flags", "engines"), [((), 1), (("--data-parallel-size", "2"), 2)])
def test_an_encoder_starts_with_the_engines_that_were_given(
    tmp_path: Path, starts: list[tuple[Any, str]], flags: tuple[str, ...], engines: int
) -> None:
    assert cli.main(["serve", model(tmp_path, BERT), "--load-format", "dummy", *flags]) == 0
    config, line = starts[0]
    assert sizes(config) == (1, 1, engines)
    assert line.startswith("one GPU of 8 is used: plans are for decoders") is (engines == 1)


@pytest.mark.usefixtures("eight")
def test_a_model_with_adapters_is_not_divided(
    tmp_path: Path, starts: list[tuple[Any, str]]
) -> None:
    flags = ["--load-format", "dummy", "--lora", f"one={tmp_path}"]
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), *flags]) == 0
    config, line = starts[0]
    assert sizes(config) == (1, 1, 1)
    assert line.startswith("one GPU of 8 is used: adapters on GPUs are for models on one device")


@pytest.mark.usefixtures("eight")
def test_less_kv_memory_than_plans_reckon_with_is_no_reason_to_refuse(
    tmp_path: Path, starts: list[tuple[Any, str]]
) -> None:
    flags = ["--load-format", "dummy", "--num-kv-blocks", "64"]
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), *flags]) == 0
    config, line = starts[0]
    assert sizes(config) == (1, 1, 8), line
    assert " in sequences of 1,024 tokens (the longest that fit), of " in line


def foreign(folder: Path, elements: int, **changed: Any) -> str:
    """A model that transformers' code computes, with a file of so many weights that has none."""
    tensor = {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}
    header = json.dumps({"some.weight": tensor}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 4 * elements)
    return model(folder, LLAMA_8B, architectures=["SomeForCausalLM"], **changed)


@pytest.mark.usefixtures("eight")
def test_a_model_by_transformers_that_seems_too_large_is_left_to_its_worker(
    tmp_path: Path, starts: list[tuple[Any, str]]
) -> None:
    assert cli.main(["serve", foreign(tmp_path, 60 * 10**9)]) == 0
    config, line = starts[0]
    assert sizes(config) == (1, 1, 1)
    assert line.startswith("one GPU of 8 is used: by an estimate no layout of this model fits on 8")
    assert "use more" in line


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("flags", "changed", "said"),
    [
        (("--load-format", "dummy"), {}, "told by its files alone"),
        ((), {"num_attention_heads": None}, "none of num_attention_heads, n_head"),
        (("--max-model-len", "1"), {}, "--output-len 0"),
    ],
)
@pytest.mark.parametrize("engines", [1, 2])
def test_a_model_of_which_a_plan_can_tell_nothing_starts_as_on_one_gpu(
    tmp_path: Path,
    starts: list[tuple[Any, str]],
    flags: tuple[str, ...],
    changed: dict[str, Any],
    said: str,
    engines: int,
) -> None:
    given = ("--data-parallel-size", "2") if engines == 2 else ()
    assert cli.main(["serve", foreign(tmp_path, 10**9, **changed), *flags, *given]) == 0
    config, line = starts[0]
    assert sizes(config) == (1, 1, engines)
    assert (said in line) is (engines == 1)
    assert line.startswith("one GPU of 8 is used: ") is (engines == 1)


@pytest.mark.usefixtures("eight")
def test_given_sizes_that_do_not_fit_are_refused_with_the_bytes_and_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], starts: list[tuple[Any, str]]
) -> None:
    flags = ["--load-format", "dummy", "--data-parallel-size", "8"]
    assert cli.main(["serve", model(tmp_path, LLAMA_70B), *flags]) == 2
    said = capsys.readouterr().err
    assert "--data-parallel-size 8: a GPU has 131.4 GiB of weights and needs" in said
    assert "GiB that may be used (--gpu-memory-utilization 0.9)" in said
    fits = said.partition("what fits on 8 ×")[2]
    assert "--tensor-parallel-size 4" in fits
    assert fits.count(", or ") == 2, "the smallest three"
    assert starts == []


def test_a_model_that_no_layout_holds_is_refused_with_the_bytes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    starts: list[tuple[Any, str]],
) -> None:
    host(monkeypatch, H100, H100)
    folder = model(tmp_path, LLAMA_70B, num_hidden_layers=320)
    assert cli.main(["serve", folder, "--load-format", "dummy"]) == 2
    said = capsys.readouterr().err
    assert f"no layout of this model fits on 2 × {H100}; TP 2 × PP 1 × DP 1: a GPU has 2" in said
    assert "GiB of weights and needs" in said
    assert starts == []


def test_gpus_that_no_plan_knows_leave_it_at_one_and_say_so(
    tmp_path: Path, starts: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, "NVIDIA Future", "NVIDIA Future")
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), "--load-format", "dummy"]) == 0
    config, line = starts[0]
    assert sizes(config) == (1, 1, 1)
    assert line.startswith("one GPU of 2 is used (a plan for the GPUs of this host: what a NVIDIA")
    assert "--data-parallel-size use more" in line


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    "flags", [("--device", "null"), ("--device", "cpu"), ("--nodes", "1", "--executor", "process")]
)
def test_without_several_gpus_to_choose_from_nothing_is_said(
    tmp_path: Path,
    starts: list[tuple[Any, str]],
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "cpu" not in flags and "null" not in flags:
        host(monkeypatch, H100)
    dummy = () if "null" in flags else ("--load-format", "dummy")
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), *dummy, *flags]) == 0
    assert (sizes(starts[0][0]), starts[0][1]) == ((1, 1, 1), "")


@pytest.mark.usefixtures("eight")
def test_models_that_are_loaded_later_keep_their_gpus(
    tmp_path: Path, starts: list[tuple[Any, str]]
) -> None:
    flags = ["--load-format", "dummy", "--model-dirs", str(tmp_path)]
    assert cli.main(["serve", model(tmp_path, LLAMA_8B), *flags]) == 0
    config, line = starts[0]
    assert sizes(config) == (1, 1, 1)
    assert line.startswith("one GPU of 8 is used: --model-dirs")


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("shape", "gpus"), [(LLAMA_8B, 1), (LLAMA_70B, 3)])
def test_a_server_of_one_conversation_or_measurement_takes_the_fewest_gpus(
    tmp_path: Path, starts: list[tuple[Any, str]], shape: dict[str, Any], gpus: int
) -> None:
    flags = ["--load-format", "dummy", "--one-engine", "1"]
    assert cli.main(["serve", model(tmp_path, shape), *flags]) == 0
    assert cli.main(["serve", str(tmp_path), *flags, "--tensor-parallel-size", "4"]) == 0
    (config, line), (given, _) = starts
    tensor, pipeline, engines = sizes(config)
    assert (tensor * pipeline, engines) == (gpus, 1)
    assert line.endswith(": one engine on the fewest GPUs that hold the model")
    assert sizes(given) == (4, 1, 1)


@pytest.mark.parametrize("module", [chat_server, measured_server])
def test_conversations_and_measurements_start_such_a_server(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each hands to ``penstock serve``, read as that reads it."""

    class Started(Exception):
        pass

    def start(command: list[str], **_: Any) -> None:
        raise Started(command)

    monkeypatch.setattr(module.subprocess, "Popen", start)
    more = ("m", (), {}, style_of(2)) if module is chat_server else (["m"],)
    with pytest.raises(Started) as started, module.own_server(*more):
        pass
    internal, _ = cli._internal(started.value.args[0][4:])
    assert internal.one_engine == 1


@pytest.mark.parametrize(
    ("shape", "flags", "words"),
    [
        (BERT, (), "--tensor-parallel-size 2: BertModel is an encoder, which one device computes"),
        (TWO_HEADS, ("--quantization", "int4"), "divides no quantized weights like these"),
        (
            LLAMA_8B | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"},
            (),
            "only families of our own can be divided",
        ),
    ],
    ids=["encoder", "groups", "foreign"],
)
@pytest.mark.parametrize("library", [False, True])
def test_a_model_that_cannot_be_divided_is_refused_before_any_process_starts(
    shape: dict[str, Any],
    flags: tuple[str, ...],
    words: str,
    library: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: Any, **__: Any) -> int:
        raise AssertionError("a server starts")

    monkeypatch.setattr(serve, "run_headless" if library else "run", start)
    monkeypatch.setattr(cli, "_be_called", lambda title: None)
    folder = model(tmp_path, shape)
    headless = ("--headless", "1") if library else ()
    size = ("--device", "cpu", "--tensor-parallel-size", "2")
    assert cli.main(["serve", folder, *size, *flags, *headless]) == 2
    assert words in capsys.readouterr().err

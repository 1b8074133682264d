"""``penstock plan --gpus``: which layouts fit, what each GPU has, and what is printed."""

from __future__ import annotations

import ctypes
import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_worker_plan import GEMMA3_12B, LLAMA_8B, LLAMA_70B, config_for, planned

from penstock.kernels.quantized_kinds import SPACE_BYTES
from penstock.protocol.config import (
    ClusterConfig,
    Config,
    ConfigError,
    DeviceConfig,
    LoadingConfig,
)
from penstock.protocol.model_info import read_model_info
from penstock.protocol.process.limited_process import LimitedAnswer
from penstock.services import cli
from penstock.services.launcher import named_model
from penstock.services.worker import cuda_driver
from penstock.services.worker.cuda_driver import CudaDevice
from penstock.services.worker.gpus import GPUS
from penstock.services.worker.layouts import given_gpus
from penstock.services.worker.layouts.division import Layout, layouts
from penstock.services.worker.layouts.evaluation import (
    Engine,
    Evaluator,
    Outcome,
    Refused,
    Workload,
)
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.memory_plan import RANKS_BYTES
from penstock.services.worker.plan import CANNOT_FIT, Planner, device_of

PAGE = (Path(__file__).resolve().parents[3] / "docs/planning.md").read_text()
WORK, GPU = Workload(1024, 1024), DeviceConfig(device="cuda")
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "dtype": "bfloat16",
}


def evaluator(
    folder: Path,
    shape: dict[str, Any],
    gpus: str,
    work: Workload = WORK,
    cluster: ClusterConfig | None = None,
    **groups: Any,
) -> Evaluator:
    """Without compressed weights, whose room differs from layout to layout."""
    (folder / "config.json").write_text(json.dumps(shape))
    plain = LoadingConfig(load_format="dummy", compress_weights="never")
    config = replace(config_for(folder, **groups), loading=plain, device=GPU)
    config = replace(config, cluster=cluster or ClusterConfig())
    return Evaluator(read_model_info(folder), config, given_gpus.given_gpus(gpus), work)


def accounts(found: Evaluator, layout: Layout) -> list[MemoryAccount]:
    engine = found.engine(layout)
    assert isinstance(engine, Engine), engine.reason
    return engine.accounts


def test_all_ways_to_use_all_gpus_are_looked_at_once() -> None:
    for count in (1, 6, 8, 12):
        found = layouts(count)
        sizes = itertools.product(range(1, count + 1), repeat=3)
        wanted = {Layout(*one) for one in sizes if one[0] * one[1] * one[2] == count}
        assert len(found) == len(wanted) and set(found) == wanted


def test_the_stages_have_the_weights_of_one_gpu_together(tmp_path: Path) -> None:
    found = evaluator(tmp_path, LLAMA_70B, "4xb200")
    (alone,) = accounts(found, Layout(1, 1, 1))
    stages = accounts(found, Layout(1, 4, 1))
    together = sum(one.bytes_of("weights") for one in stages)
    assert together == pytest.approx(alone.bytes_of("weights"), rel=1e-6), "but for a norm each"


def test_stages_are_even_on_gpus_unless_balanced_ones_are_asked_for(tmp_path: Path) -> None:
    for rule, counts in (("auto", (16, 16)), ("balanced", (17, 15)), ("20,12", (20, 12))):
        cluster = ClusterConfig(pipeline_parallel_size=2, pipeline_layers=rule)
        found = evaluator(tmp_path, LLAMA_8B, "2xh100", cluster=cluster)
        engine = found.engine(Layout(1, 2, 1))
        assert isinstance(engine, Engine), engine.reason
        assert engine.stages.counts == counts and engine.stages.reason


def test_one_gpu_is_planned_as_without_layouts(tmp_path: Path) -> None:
    found = evaluator(tmp_path, LLAMA_8B, "1xh100")
    (account,) = accounts(found, Layout(1, 1, 1))
    plain = LoadingConfig(load_format="dummy", compress_weights="never")
    config = replace(config_for(tmp_path), loading=plain, device=GPU)
    alone = Planner(read_model_info(tmp_path), device_of(GPUS["h100"])).account(config)
    assert account == alone


def test_ranks_divide_the_weights_and_the_kv_memory(tmp_path: Path) -> None:
    found = evaluator(tmp_path, LLAMA_70B, "8xh200")
    one, eight = (accounts(found, Layout(ranks, 1, 1))[0] for ranks in (2, 8))
    assert eight.bytes_of("ranks") == RANKS_BYTES
    # Norms alone are on every rank.
    assert one.bytes_of("weights") / 4 == pytest.approx(eight.bytes_of("weights"), rel=0.001)
    assert one.block_bytes == 4 * eight.block_bytes


def test_ranks_beyond_the_kv_heads_keep_the_same_ones(tmp_path: Path) -> None:
    found = evaluator(tmp_path, QWEN2_7B | {"num_attention_heads": 32}, "8xh100")
    four, eight = (accounts(found, Layout(ranks, 1, 1))[0] for ranks in (4, 8))
    assert four.block_bytes == eight.block_bytes


def test_the_stage_that_holds_the_fewest_tokens_counts(tmp_path: Path) -> None:
    found = evaluator(tmp_path, LLAMA_70B, "8xh200")
    tokens = [one.kv_tokens for one in accounts(found, Layout(1, 4, 1))]
    outcome = found.outcome(Layout(1, 4, 1))
    assert isinstance(outcome, Outcome)
    assert outcome.kv_tokens == min(tokens) < max(tokens)


def test_windows_leave_room_for_more_sequences_in_every_layout(tmp_path: Path) -> None:
    work = Workload(60_000, 4000)
    held = []
    for window in (1024, 131_072):
        model = GEMMA3_12B | {"sliding_window": window}
        found = evaluator(tmp_path, model, "4xh100", work, scheduler={"max_num_seqs": 8192})
        outcomes, _ = found.evaluate(4, "throughput")
        held.append({one.layout: one.sequences for one in outcomes})
    assert len(held[1]) > 4
    for layout, sequences in held[1].items():
        assert held[0][layout] > 3 * sequences


def test_heads_that_cannot_be_divided_are_refused_with_the_sizes_that_work(tmp_path: Path) -> None:
    found = evaluator(tmp_path, QWEN2_7B, "8xh100")
    fitting, refused = found.evaluate(8, "throughput")
    (one,) = refused
    assert one.layout == Layout(8, 1, 1)
    assert "--tensor-parallel-size 8: 28 attention heads are no multiple of it" in one.reason
    assert "sizes that work: 1, 2, 4" in one.reason
    assert {each.layout.tensor for each in fitting} == {1, 2, 4}


def test_more_stages_than_layers_and_layers_across_hosts_are_refused(tmp_path: Path) -> None:
    found = evaluator(tmp_path, LLAMA_8B | {"num_hidden_layers": 2}, "16xh100")
    _, refused = found.evaluate(16, "throughput")
    reasons = {each.layout: each.reason for each in refused}
    assert "the model has 2 layers; at most 2 stages work" in reasons[Layout(1, 4, 4)]
    assert "within a host, which has 8 GPUs at most" in reasons[Layout(16, 1, 1)]


def test_what_does_not_fit_is_told_with_its_bytes(tmp_path: Path) -> None:
    found = evaluator(tmp_path, LLAMA_70B, "8xh100")
    outcome = found.outcome(Layout(1, 1, 8))
    assert isinstance(outcome, Refused)
    assert outcome.reason.startswith("a GPU has 131.4 GiB of weights and needs ")
    assert "of 70.9 GiB that may be used (--gpu-memory-utilization 0.9)" in outcome.reason
    short = evaluator(tmp_path, LLAMA_70B, "8xh100", Workload(100_000, 1000))
    outcome = short.outcome(Layout(2, 1, 4))
    assert isinstance(outcome, Refused)
    assert "and a sequence has 101,000: give a shorter --context" in outcome.reason
    given = evaluator(tmp_path, LLAMA_70B, "8xh100", model={"max_model_len": 131_072})
    outcome = given.outcome(Layout(2, 1, 4))
    assert isinstance(outcome, Refused)
    assert "--max-model-len 131072: KV memory holds" in outcome.reason


def test_models_of_other_code_have_one_gpu_each(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("mixtral")
    gpus = given_gpus.given_gpus("4xh100")
    found = Evaluator(read_model_info(folder), config_for(folder), gpus, Workload(100, 100))
    fitting, refused = found.evaluate(4, "throughput")
    assert [each.layout for each in fitting] == [Layout(1, 1, 4)]
    assert len(refused) == 5
    for each in refused:
        assert "transformers' code computes MixtralForCausalLM" in each.reason


def test_quantized_weights_take_fewer_bytes_in_every_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = evaluator(tmp_path, LLAMA_8B, "2xh100")
    found = evaluator(tmp_path, LLAMA_8B, "2xh100", model={"quantization": "int4"})
    (coded,), (whole,) = (accounts(each, Layout(1, 1, 1)) for each in (found, plain))
    assert coded.bytes_of("weights") < 0.4 * whole.bytes_of("weights")
    stages = accounts(found, Layout(1, 2, 1))
    together = sum(one.bytes_of("weights") for one in stages) - SPACE_BYTES
    assert together == pytest.approx(coded.bytes_of("weights"), rel=1e-5), "but for a norm"
    (half,) = accounts(found, Layout(2, 1, 1))
    halves = 2 * half.bytes_of("weights") - SPACE_BYTES
    assert halves == pytest.approx(coded.bytes_of("weights"), rel=0.001)
    assert cli.main(["plan", str(tmp_path), "--gpus", "2xh100", "--quantization", "int4"]) == 0
    text = capsys.readouterr().out
    assert "in bfloat16, quantized (int8, " in text
    assert "times are those of plain weights" in text


def test_what_stands_first_is_what_was_asked_for(tmp_path: Path) -> None:
    """Copies of a small model make more tokens than one that is divided, which answers sooner."""
    found = evaluator(tmp_path, LLAMA_8B, "8xh100")
    most, _ = found.evaluate(8, "throughput")
    soonest, _ = found.evaluate(8, "latency")
    assert {one.layout for one in most} == {one.layout for one in soonest}
    assert most[0].layout == Layout(1, 1, 8)
    assert soonest[0].layout.tensor > 1 == soonest[0].layout.pipeline
    rates = [one.tokens_per_second for one in most]
    assert rates == sorted(rates, reverse=True)
    answers = [one.answer_seconds(WORK) for one in soonest]
    assert answers == sorted(answers)
    assert soonest[0].ttft < most[0].ttft and soonest[0].tpot[1] < most[0].tpot[1]


def test_a_link_that_is_slow_makes_dividing_layers_dear(tmp_path: Path) -> None:
    def gain(gpus: str) -> float:
        found = evaluator(tmp_path, LLAMA_8B, gpus)
        whole, divided = (found.outcome(Layout(ranks, 1, 1)) for ranks in (1, 8))
        assert isinstance(whole, Outcome) and isinstance(divided, Outcome)
        return whole.ttft / divided.ttft

    assert gain("8xh100") > 2 * gain("8xl40s")
    assert gain("8xh100") > 2 * gain("8xh100-pcie") > 0


def test_the_table_names_the_layout_to_take_and_needs_neither_weights_nor_torch(
    tmp_path: Path,
) -> None:
    flags = ["--gpus", "8xh100", "--gpu-memory-utilization", "0.95", "--context", "4k"]
    text, code = planned(tmp_path, LLAMA_70B, *flags)
    assert code == 0, text
    assert f"{tmp_path.name}: 70.55 B parameters in bfloat16, on 8 × NVIDIA H100, NVLink 4" in text
    assert "sequences of 4,000 tokens, 2,000 of them the answer" in text
    head, best = text.split("\n\n")[1].splitlines()[:2]
    cells = dict(zip(head.split()[:3], best.split()[:3], strict=True))
    command = shlex.split(text.split("Take the first:\n")[1].splitlines()[0])
    assert command[:3] == ["penstock", "serve", str(tmp_path)]
    given = dict(zip(command[3::2], command[4::2], strict=True))
    assert given["--gpu-memory-utilization"] == "0.95"
    for column, name in (("TP", "tensor"), ("PP", "pipeline"), ("DP", "data")):
        assert given.get(f"--{name}-parallel-size", "1") == cells[column]
    assert "--context" not in given and "--gpus" not in given
    assert "\n  TP 1 × PP 1 × DP 8: a GPU has 131.4 GiB of weights" in text


def test_json_has_what_the_table_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    command = ["plan", str(tmp_path), "--gpus", "8xh100", "--output-len", "48", "--json"]
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"]["count"] == 8 and found["gpus"]["link_bytes_per_second"] == 450e9
    assert (found["prompt_tokens"], found["answer_tokens"]) == (2000, 48)
    assert len(found["layouts"]) == 9 and len(found["refused"]) == 1
    assert found["refused"][0]["tensor_parallel_size"] == 8
    for one in found["layouts"]:
        assert one["tpot_ms"]["1"] <= one["tpot_ms"]["64"] <= one["full_tpot_ms"]
        engines = one["data_parallel_size"]
        rate = 1e3 * engines * one["sequences"] / one["full_tpot_ms"]
        assert one["tokens_per_second"] == pytest.approx(rate)
    assert cli.main([*command, "--data-parallel-size", "2"]) == 0
    kept = json.loads(capsys.readouterr().out)["layouts"]
    assert kept == [one for one in found["layouts"] if one["data_parallel_size"] == 2]
    assert cli.main([*command, "--tensor-parallel-size", "2"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["parameters"] == found["parameters"], "of the whole model"
    assert kept["layouts"] == [one for one in found["layouts"] if one["tensor_parallel_size"] == 2]
    assert "--tensor-parallel-size 2" in kept["layouts"][0]["command"]


def test_a_model_that_is_too_large_ends_with_the_number_of_gpus_that_hold_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert cli.main(["plan", str(tmp_path), "--gpus", "2x4090"]) == CANNOT_FIT
    assert "8 of these GPUs hold it: TP " in capsys.readouterr().out
    assert cli.main(["plan", str(tmp_path), "--gpus", "8x4090"]) == 0


def test_of_a_model_on_the_hub_only_the_settings_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    asked = []

    def find_model(name: str, config: Config, *, only_look: bool) -> Path:
        asked.append((name, config.loading.load_format))
        return tmp_path

    monkeypatch.setattr(named_model, "find_model", find_model)
    assert cli.main(["plan", "some-org/some-model", "--gpus", "1xh100"]) == 0
    assert asked == [("some-org/some-model", "dummy")]
    text = capsys.readouterr().out
    assert text.startswith("some-model: 7.62 B parameters")
    assert "\n  penstock serve some-org/some-model\n" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "8xh1000"], "--gpus 8xh1000: did you mean h100? known are t4, "),
        (["--gpus", "8"], "--gpus 8: expected a number and a kind, as in 8xh100"),
        (["--gpus", "h100"], "--gpus h100: expected a number and a kind, as in 8xh100"),
        (["--gpus", "0xh100"], "--gpus 0xh100: 0 GPUs; give 1 to 512"),
        (["--gpus", "8xh100", "--gpu", "h100"], "--gpus 8xh100 and --gpu h100 name two devices"),
        (["--gpus", "2xh100", "--device", "cpu"], "--gpus 2xh100 and --device cpu name two"),
        (["--gpus", "2xh100", "--context", "99k"], "--context 99000: a sequence of this "),
        (["--gpus", "2xh100", "--context", "9", "--output-len", "9"], "may have 1 to 8"),
        (["--gpus", "8xh100", "--data-parallel-size", "3"], "3: 8 GPUs cannot be laid out so"),
        (["--context", "4k"], "--context is about layouts over several GPUs: give --gpus"),
        (["--json"], "--json is about layouts over several GPUs: give --gpus"),
        (["--gpus", "2xh100", "--context", "0"], "'0' is no number of tokens; give 1 or more"),
        (["--gpus", "2xh100", "--context", "1.5"], "'1.5' is no number of tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_for_is_refused_with_what_can(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    assert cli.main(["plan", str(tmp_path), *flags]) == cli.BAD_SETTINGS
    assert words in capsys.readouterr().err


def test_kinds_are_found_however_they_are_spelled() -> None:
    for text in ("8xh100", "8 x H100", "8×NVIDIA H100", "8*h100"):
        found = given_gpus.given_gpus(text)
        assert (found.count, found.gpu) == (8, GPUS["h100"])
    assert given_gpus.given_gpus("4x4090").gpu == GPUS["4090"]


class FakeDriver:
    """libcuda with two devices."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._names)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: ctypes.c_int) -> int:  # noqa: N802
        total._obj.value = (80 - device.value) << 30
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> int:  # noqa: N802
        name.value = self._names[device.value].encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: ctypes.c_int) -> int:  # noqa: N802
        value._obj.value = {16: 132, 75: 9, 76: 0, 97: 232_448}[number]
        return 0


def show(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The CUDA devices of this host, also for the process that is asked for them."""

    def answer(command: list[str], limit_s: float) -> LimitedAnswer:
        assert (command[1:], limit_s) == (["-m", cuda_driver.__name__], cuda_driver.DRIVER_S)
        return LimitedAnswer(json.dumps(cuda_driver.read_devices()), True, "it ended with 0")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: FakeDriver(list(names)))
    monkeypatch.setattr(cuda_driver, "answer_within", answer)


def test_auto_is_what_the_driver_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    show(monkeypatch, h100, h100)
    assert cuda_driver.read_device() == CudaDevice(h100, (9, 0), 232_448, 80 << 30, 132)
    found = given_gpus.given_gpus("auto")
    assert (found.count, found.gpu) == (2, GPUS["h100"])
    assert found.device.total == 79 << 30, "the smaller of the two"
    assert str(found) == f"2 × {h100}"


def test_a_driver_that_hangs_is_named_and_waited_for_no_longer_than_its_limit() -> None:
    with pytest.raises(ConfigError, match=r"it took longer than 0 s\. nvidia-smi and dmesg may"):
        cuda_driver.read_devices_in_time(0)
    assert cuda_driver.read_devices_in_time() == cuda_driver.read_devices()


def test_auto_refuses_what_it_cannot_plan_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, words in (
        ([], "no CUDA device is here; name what to plan for"),
        (["NVIDIA L4", "NVIDIA A10"], "GPUs of 2 kinds are here (NVIDIA L4, NVIDIA A10)"),
        (["NVIDIA Future"], "what a NVIDIA Future does in a second is not known"),
    ):
        show(monkeypatch, *names)
        with pytest.raises(ConfigError) as caught:
            given_gpus.given_gpus("auto")
        assert words in str(caught.value)


def test_the_page_has_the_rates_that_are_counted_with() -> None:
    rows = [
        f"| `{name}` | {gpu.memory} | {gpu.bandwidth / 1e12:g} | {gpu.flops / 1e12:g} | "
        f"{gpu.link.name} | {gpu.link.bandwidth / 1e9:g} |"
        for name, gpu in sorted(GPUS.items())
    ]
    table = PAGE[PAGE.index("| kind | memory") :].split("\n\n")[0]
    assert rows == table.splitlines()[2:]


def test_the_page_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *lines = PAGE.split("```text\n$ ")[1].split("```")[0].splitlines()
    name = Path(shlex.split(command)[2]).name
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(LLAMA_70B))
    assert cli.main([*shlex.split(command)[1:2], str(tmp_path / name), "--gpus", "8xh100"]) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "/models").splitlines()
    shown = [line for line in lines if line.strip() != "…"]
    assert len(shown) > 9
    assert [line for line in shown if line not in printed] == []

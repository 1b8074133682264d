"""Layers of a pipeline's stages by times that ``penstock tune`` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.loadtest.tune import command as tune_command
from penstock.loadtest.tune import layer_times, measured_stages, tuning
from penstock.loadtest.tune.estimate import Given
from penstock.loadtest.tune.load_level import Level
from penstock.loadtest.tune.objective import Objective, Workload
from penstock.loadtest.tune.stage_choice import LayerTimes, StageChoice, Step, choose_stages
from penstock.loadtest.tune.time_limit import TimeLimit
from penstock.loadtest.tune.tuning import Found, Task, Tuning
from penstock.protocol.config.resolve import read_file
from penstock.services.worker.models.stage_division import StageRoom

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
ROWS, PROMPTS = Step(8), Step(1, 100)


def times(layers: list[float], head: float, embedding: float = 0.0) -> LayerTimes:
    return LayerTimes(layers, embedding, head)


def chosen(
    decode: LayerTimes, prompts: LayerTimes, stages: int = 2, room: StageRoom | None = None
) -> StageChoice:
    """Of prompts as long as answers: with 8 rows, 0.08 steps of 100 tokens for one that decodes."""
    return choose_stages(stages, (ROWS, decode), (PROMPTS, prompts), 1.0, room)


def test_the_slowest_stage_is_quickest_by_rows_and_the_prompts_that_come_for_them() -> None:
    free = times([0.0] * 8, 0.0)
    assert chosen(times([1e-3] * 8, 2e-3), free).counts == [5, 3]
    assert chosen(times([1e-3] * 8, 2e-3, 2e-3), free).counts == [4, 4]
    # Of a step of prompts 0.08 belong to a decode step: 1 ms more a layer, 2 ms less at the end.
    found = chosen(times([1e-3] * 8, 6e-3), times([12.5e-3] * 8, -25e-3))
    assert found.counts == [5, 3], "2 ms a layer, and 4 ms at the end"
    assert "with 8 rows a layer takes 1 ms, the last one with LM head and draw 7 ms" in found.reason
    assert "with 100 tokens of prompts a layer takes 12.5 ms" in found.reason
    assert "take 10 ms, 10 ms in the stages, with 4, 4 layers 8 ms, 12 ms" in found.reason


def test_layers_of_two_kinds_are_told_by_their_range() -> None:
    found = chosen(times([1e-3, 3e-3] * 4, 0.0), times([0.0] * 8, 0.0), stages=4)
    assert found.counts == [2, 2, 2, 2]
    assert "layers take 1 ms to 3 ms" in found.reason


def test_memory_rules_a_quicker_division_out_and_the_reason_says_so() -> None:
    decode, free = times([1e-3] * 8, 4e-3), times([0.0] * 8, 0.0)
    assert chosen(decode, free).counts == [6, 2]
    found = chosen(decode, free, room=StageRoom([2] * 8, 4, 2, 12))
    assert found.counts == [4, 4]
    assert "A quicker division has no room" in found.reason
    with pytest.raises(ValueError, match="do not fit"):
        chosen(decode, free, room=StageRoom([2] * 8, 4, 2, 8))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_layers_of_each_kind_are_timed_on_models_of_copies_of_them(
    quantization: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A window in every other layer: two kinds."""
    for name, value in (("MOST_STEPS", 8), ("ROUNDS", 1), ("POINT_SECONDS", 0.0)):
        monkeypatch.setattr(layer_times, name, value)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    flags = [str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--threads", "1"]
    flags += ["--quantization", quantization, "--tensor-parallel-size", "2"]
    flags += ["--rows", "2", "--prefill", "20", "--prompt", "20", "--answer", "10"]
    assert measured_stages.main([*flags, "--stages", "2", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [msgspec.json.decode(line, type=StageChoice) for line in lines]
    assert [sum(one.counts) for one in found] == [4, 4]
    assert [len(one.counts) for one in found] == [2, 3]
    assert measured_stages.main([*flags, "--stages", "5"]) == 1
    assert "at most 4 stages work" in capsys.readouterr().err


def test_only_layers_of_which_nothing_was_said_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = list[Task]()

    def tuned(task: Task, limit: TimeLimit) -> Found:
        tasks.append(task)
        level = Level(1.0, 100, 0, 1.0, 1.0, 1.0, 1, 100.0, 1.0)
        return Found({"pipeline_layers": "6,4"}, {"pipeline_layers": "why"}, level, [])

    monkeypatch.setattr(tune_command, "_tuned", tuned)
    flags = ["--objective", "tpot:9", "-o", str(tmp_path / "tuned.toml"), "--force"]
    two = ["--device", "cpu", "--pipeline-parallel-size", "2"]
    for more in (two, [*two, "--pipeline-layers", "even"], ["--device", "cpu"]):
        assert tune_command.main([*flags, *more]) == 0
    assert [task.measured_stages for task in tasks] == [2, 1, 1]
    assert read_file(str(tmp_path / "tuned.toml"))["pipeline_layers"] == "6,4"
    assert '# why.\npipeline_layers = "6,4"\n' in (tmp_path / "tuned.toml").read_text()


def test_what_was_found_is_a_setting_with_its_reason_and_what_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(
        Objective(tpot=9), Workload(100, 50), {}, Given(64, 2048), "cpu", 2, 2, 1, measured_stages=2
    )
    for answer, written in (
        (StageChoice([6, 4], "because"), {"pipeline_layers": "6,4"}),
        ("no", {}),
    ):
        monkeypatch.setattr(tuning, "measure_stages", lambda *_, answer=answer: answer)
        course = Tuning(task, TimeLimit(100, quiet=True), tmp_path)
        settings, reasons = dict[str, Any](), dict[str, str]()
        course._divide(settings, reasons)
        assert settings == written
        assert reasons.keys() == written.keys()
        assert course._told == ([] if written else [
            "Layers could not be timed, and are divided as by default: no."
        ])  # fmt: skip

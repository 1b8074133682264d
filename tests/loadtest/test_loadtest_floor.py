"""The floor of a model's work, beside figures that others have computed for the same shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.roofline.decoder_cost import decoder_config
from penstock.loadtest.roofline.device_limits import DeviceLimits
from penstock.loadtest.studies import floor
from penstock.protocol.model_info import read_model_info

H200 = DeviceLimits("H200", 4.31e12, 770e12, "measured")
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
SMALL = QWEN3 | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
LARGE = QWEN3 | {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(("config", "wanted"), [(SMALL, 36_200), (LARGE, 12_580)], ids=["A", "B"])
def test_throughput_is_bounded_as_published_for_qwen3_on_an_h200(
    config: dict[str, Any], wanted: int, tmp_path: Path
) -> None:
    model = decoder_config(read_model_info(folder_of(tmp_path, config)))
    assert floor.throughput(model, H200) == pytest.approx(wanted, rel=1e-3)


def test_a_step_of_one_row_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    """Qwen3-8B: 7.57e9 weights without the embedding, 147,456 bytes for each position."""
    model = decoder_config(read_model_info(folder_of(tmp_path, LARGE)))
    layer = 6144 * 4096 + 4096 * 4096 + 3 * 4096 * 12_288
    weights = 36 * layer + 151_936 * 4096
    wanted = (2 * weights + 256 * 2 * 36 * 8 * 128 * 2) / 4.31e12
    assert floor.batch_seconds(model, H200, 1) == pytest.approx(wanted)


def test_the_command_prints_each_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, SMALL)
    assert floor.main([str(folder), "--terabytes", "4.31", "--teraflops", "770"]) == 0
    assert folder.name in capsys.readouterr().out


def test_a_model_whose_cost_is_not_known_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, SMALL | {"architectures": ["MambaForCausalLM"]})
    code = floor.main([str(folder), "--terabytes", "1", "--teraflops", "1"])
    assert code == floor.WRONG_SETTINGS
    assert "MambaForCausalLM" in capsys.readouterr().err

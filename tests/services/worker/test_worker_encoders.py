"""Each family of encoders makes the numbers that transformers makes, prompt by prompt."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.worker.pooled_prompts import pooled
from support.worker.tiny_encoders import FAMILIES, make_encoder, write_encoder
from support.worker.tiny_models import make_model
from transformers import AutoModel, AutoModelForSequenceClassification

from penstock.kernels import linear
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.fields import CacheConfig, DeviceConfig, LoadingConfig, ModelConfig
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.encoders import attention
from penstock.services.worker.encoders.executor import EncoderExecutor
from penstock.services.worker.encoders.loading import load_encoder_executor
from penstock.services.worker.encoders.packed_rows import PackedRows

NO_SHARE, STORED = CacheConfig(), LoadingConfig()
SAMPLING = SlotSampling(0.0, 0, 1.0, 0).packed()
LENGTHS = [1, 7, 30, 7, 64, 2]


def prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    return [[5 + (7 * at + 11 * n) % 90 for at in range(n)] for n in lengths]


def executor_of(
    folder: Path, cache: CacheConfig = NO_SHARE, loading: LoadingConfig = STORED, **model: Any
) -> EncoderExecutor:
    config = Config(
        model=ModelConfig(model=str(folder), **model),
        cache=cache,
        loading=loading,
        device=DeviceConfig(device="cpu", threads=1),
    )
    return load_encoder_executor(config, read_model_info(folder), lambda note: None)


def states_of(model: Any, ids: list[int]) -> torch.Tensor:
    """[tokens, hidden]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def same(got: Any, wanted: torch.Tensor) -> None:
    np.testing.assert_allclose(got, wanted.numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_vectors_are_those_of_transformers_whatever_else_is_in_the_step(
    family: str, tmp_path: Path
) -> None:
    model = make_encoder(family)
    executor = executor_of(write_encoder(model, tmp_path))
    assert executor.capacity.task_prompts == "whole" and not executor.generates
    for got, ids in zip(pooled(executor, prompts()), prompts(), strict=True):
        same(got, states_of(model, ids).mean(0))


def test_rows_are_filled_up_once_for_all_packed_products_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_of(write_encoder(make_encoder("Bert"), tmp_path))
    wanted = [pooled(executor, [ids])[0] for ids in prompts()]
    filled: list[int] = []

    def recorded(x: torch.Tensor, missing: int) -> torch.Tensor:
        filled.append(missing)
        return x

    monkeypatch.setattr(linear, "_fill", recorded)
    for count in range(1, len(prompts()) + 1):
        for got, alone in zip(pooled(executor, prompts()[:count]), wanted, strict=False):
            np.testing.assert_allclose(got, alone, atol=1e-5)
    assert not any(filled)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_of_a_classifier_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_encoder(family, "ForSequenceClassification")
    executor = executor_of(write_encoder(model, tmp_path))
    assert list(executor.tasks) == ["classify"] and len(executor.labels) == 3
    for got, ids in zip(pooled(executor, prompts(), "classify"), prompts(), strict=True):
        with torch.inference_mode():
            same(got, model(torch.tensor([ids])).logits[0])


def test_the_second_text_of_a_pair_is_of_another_segment(tmp_path: Path) -> None:
    model = make_encoder("Bert", "ForSequenceClassification", num_labels=1)
    executor = executor_of(write_encoder(model, tmp_path))
    assert list(executor.tasks) == ["score", "classify"]
    seconds = [0, 3, 11, 0, 40, 1]
    found = pooled(executor, prompts(), "score", second=seconds)
    for got, ids, second in zip(found, prompts(), seconds, strict=True):
        segments = [int(0 < second <= at) for at in range(len(ids))]
        with torch.inference_mode():
            wanted = model(torch.tensor([ids]), token_type_ids=torch.tensor([segments])).logits[0]
        same(got, wanted)


def test_the_longest_prompt_fits_and_one_step_holds_it(tmp_path: Path) -> None:
    model = make_encoder("Roberta")
    folder = write_encoder(model, tmp_path)
    executor = executor_of(folder)
    assert executor.capacity.max_model_len == 78  # two rows of the table stand for no position
    (ids,) = prompts([78])
    same(pooled(executor, [ids])[0], states_of(model, ids).mean(0))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    assert executor_of(folder).capacity.max_model_len == 20


def test_modules_of_the_folder_follow_pooling(tmp_path: Path) -> None:
    model = make_encoder("Bert")
    folder = write_encoder(model, tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_N": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"}
               for path, kind in kinds.items()]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in list(kinds)[1:]:
        (folder / path).mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    dense = torch.nn.Linear(32, 8)
    (folder / "2_Dense/config.json").write_text(
        '{"in_features": 32, "out_features": 8, "bias": true, '
        '"activation_function": "torch.nn.modules.activation.Tanh"}'
    )
    from safetensors.torch import save_file

    save_file(
        {f"linear.{name}": tensor.detach() for name, tensor in dense.named_parameters()},
        folder / "2_Dense/model.safetensors",
    )
    executor = executor_of(folder)
    for got, ids in zip(pooled(executor, prompts()), prompts(), strict=True):
        with torch.inference_mode():
            same(got, torch.tanh(dense(states_of(model, ids)[0])))
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_weightedmean_tokens": true}')
    with pytest.raises(BadModelFolder, match="weightedmean_tokens is not supported"):
        executor_of(folder)


@pytest.mark.parametrize("first", [False, True], ids=["mean", "cls"])
def test_gemma_s_layers_attend_in_both_directions(tmp_path: Path, first: bool) -> None:
    causal = make_model("gemma3")
    folder = tmp_path / "model"
    causal.model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_bidirectional_attention": True, "sliding_window": 20}
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModel.from_pretrained(folder).float().eval()
    assert model.config.sliding_window == 11  # its bound is exclusive
    executor = executor_of(folder, pooling="cls" if first else "auto")
    lengths = [1, 50, 13, 50, 12]
    for got, ids in zip(pooled(executor, prompts(lengths)), prompts(lengths), strict=True):
        states = states_of(model, ids)
        same(got, states[0] if first else states.mean(0))


def test_requests_for_tokens_fail_alone_in_an_encoder_s_step(tmp_path: Path) -> None:
    model = make_encoder("Bert")
    executor = executor_of(write_encoder(model, tmp_path))
    wrong, right = prompts([5, 9])
    slots = [
        NewSlot(
            number, np.array(ids, "<i4").tobytes(), len(ids), 0, [number], SAMPLING, task=task
        )
        for number, (ids, task) in enumerate(((wrong, ""), (right, "embed"), (right, "fold")))
    ]  # fmt: skip
    chunks = [Chunk(slot.slot, 0, slot.prompt_len, True, []) for slot in slots]
    result = executor.execute(StepPlan(1, 1, True, [], slots, [], chunks))
    same(np.frombuffer(result.pooled[0].values, "<f4"), states_of(model, right).mean(0))
    assert sorted((one.row, one.reason) for one in result.failures) == [
        (0, "this engine does not do the task 'generate'"),
        (2, "this engine does not do the task 'fold'"),
    ]
    # Planned before that was known: the slot decodes.
    added = [NewSlot(3, slots[1].tokens, 9, 0, [3], SAMPLING, task="embed")]
    result = executor.execute(StepPlan(1, 2, False, [1, 2], added, [], [Chunk(3, 0, 9, True, [])]))
    assert [one.row for one in result.failures] == [0] and [p.row for p in result.pooled] == [1]
    same(np.frombuffer(result.pooled[0].values, "<f4"), states_of(model, right).mean(0))


def test_a_classifier_that_attends_in_both_directions_gives_its_labels(tmp_path: Path) -> None:
    config = make_model("gemma3").config
    config.num_labels, config.pad_token_id = 3, 0
    config.use_bidirectional_attention = True
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    executor = executor_of(write_encoder(model, tmp_path))
    assert list(executor.tasks) == ["classify"] and len(executor.labels) == 3
    for got, ids in zip(pooled(executor, prompts(), "classify"), prompts(), strict=True):
        with torch.inference_mode():
            same(got, model(torch.tensor([ids])).logits[0])


def test_a_bidirectional_decoder_takes_random_weights(tmp_path: Path) -> None:
    causal = make_model("gemma3")
    causal.model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"use_bidirectional_attention": True}
    path.write_text(json.dumps(config))
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    loading = LoadingConfig(load_format="dummy")
    first, second = (pooled(executor_of(tmp_path, loading=loading), prompts()) for _ in range(2))
    assert all(np.isfinite(vector).all() and vector.any() for vector in first)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("family", ["MPNet", "ModernBert", "Bert"])
def test_prompts_of_several_lengths_may_be_one_padded_batch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where launches cost more than padding."""
    model = make_encoder(family)
    executor = executor_of(write_encoder(model, tmp_path))
    sizes: list[int] = []

    def padded(rows: PackedRows, bias: Any, heads: int) -> Any:
        batch = attention.batch_of(0, rows.lengths, torch.device("cpu"))
        sizes.append(batch.size)
        return [batch]

    monkeypatch.setattr(attention, "_batches", padded)
    lengths = [60, 3, 41, 17, 60]
    for got, ids in zip(pooled(executor, prompts(lengths)), prompts(lengths), strict=True):
        same(got, states_of(model, ids).mean(0))
    assert sizes == [5]


@pytest.mark.parametrize("lengths", [None, [70, 9, 33]])
def test_attention_within_a_window_is_that_of_a_mask_over_all(lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    size, heads, length, window = 3, 4, 70, 8
    query = torch.randn(size, heads, length, 16)
    key, value = torch.randn(2, size, 2, length, 16)
    at = torch.arange(length)
    near = (at[:, None] - at).abs() <= window
    there = None if lengths is None else torch.tensor(lengths)
    got = attention.banded(query, key, value, window, there, 0.3)
    for number, count in enumerate(lengths or [length] * size):
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query[number, :, :count], key[number, :, :count], value[number, :, :count],
            attn_mask=near[:count, :count], scale=0.3, enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(got[number, :, :count], wanted)


def test_masks_are_made_once_a_step_and_one_bias_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    arange = torch.arange

    def counted(*args: Any, **more: Any) -> torch.Tensor:
        made.append(1)
        return arange(*args, **more)

    executor = executor_of(write_encoder(make_encoder("ModernBert", num_hidden_layers=9), tmp_path))
    monkeypatch.setattr(attention.torch, "arange", counted)
    pooled(executor, prompts([16, 14]))  # the masks of two lengths, with and without a window
    assert len(made) <= 4 + 2  # and the angles of two bases
    monkeypatch.undo()
    bias = attention.RelativeBias(torch.randn(32, 4))
    for length in (30, 64, 7, 50):
        wanted = attention.relative_bias(bias._table, length)
        torch.testing.assert_close(bias(length), wanted)
        assert bias(length).untyped_storage().nbytes() <= 4 * 4 * 64 * 64


def test_an_encoder_beside_other_models_lets_them_go_first(tmp_path: Path) -> None:
    folder = write_encoder(make_encoder("Bert"), tmp_path)
    found: list[int] = []

    def run(**cache: Any) -> None:
        executor = executor_of(folder, cache=CacheConfig(**cache))
        pooled(executor, prompts())
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    for settings in ({}, {"memory_share": [0.5]}):
        thread = threading.Thread(target=run, kwargs=settings)  # a thread cannot take it back
        thread.start()
        thread.join(60)
    assert found[1] == max(found[0], 10)


def test_an_encoder_refuses_another_s_code_by_name(tmp_path: Path) -> None:
    folder = write_encoder(make_encoder("Bert"), tmp_path)
    with pytest.raises(ConfigError, match="--model-impl transformers: BertModel is an encoder"):
        executor_of(folder, model_impl="transformers")


def test_an_encoder_has_no_kv_memory_to_quantize(tmp_path: Path) -> None:
    folder = write_encoder(make_encoder("Bert"), tmp_path)
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8: BertModel is an encoder"):
        executor_of(folder, CacheConfig(kv_cache_dtype="int8"))


def test_an_encoder_in_bfloat16_is_close(tmp_path: Path) -> None:
    model = make_encoder("ModernBert")
    executor = executor_of(write_encoder(model, tmp_path), dtype="bfloat16")
    for got, ids in zip(pooled(executor, prompts()), prompts(), strict=True):
        np.testing.assert_allclose(got, states_of(model, ids).mean(0).numpy(), atol=0.1)

"""Models computed by transformers' code give what that library's own generation gives."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.tiny_models import FAMILIES, OTHERS, generated, make_model, some_prompts
from support.worker.whole_logits import configured

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.wire.messages.engine import NO_BLOCK, EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, StepPlan
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.models.registry import is_native
from penstock.services.worker.models.transformers_loading import load_transformers_model
from penstock.services.worker.models.transformers_model import TransformersModel

CPU = torch.device("cpu")
Folder = Callable[[str], Path]
NATIVE_TOO = ("gemma2", "granite", "granite-swa", "smollm3", "cohere2")
"""Windows, soft caps, multipliers, sinks, layers without rotary embedding."""

IN_THE_LONG_RUN = (
    "gpt2-scales", "gpt-bigcode", "phi", "nemotron", "olmo", "arcee", "helium", "cwm", "llama4",
    "jetmoe", "granite", "smollm3", "cohere2",
)  # fmt: skip
"""Models whose attention is as that of another one."""


def load(folder: Path) -> TransformersModel:
    info = read_model_info(folder)
    return load_transformers_model(info, torch.float32, CPU, random=False, seed=0)


def assert_exact(variant: str, model: TransformersModel) -> None:
    prompts = some_prompts([1, 5, 33, 150])
    groups = group_layers(model.caches).groups
    capacity = EngineSizes(300, 8, 4, 64, 512, model.vocab_size, groups=groups)
    executor = ModelExecutor(model, capacity)
    got = PlanDriver(executor, 1).run(prompts, 8, chunk=24, preemptions=3)
    assert got == generated(variant, prompts, 8, got)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.slow if name in IN_THE_LONG_RUN else ())
        for name in (*OTHERS, *NATIVE_TOO)
    ],
)
def test_greedy_tokens_equal_those_of_transformers(variant: str, tiny_folder: Folder) -> None:
    folder = tiny_folder(variant)
    assert is_native(read_model_info(folder)) == (variant in FAMILIES)
    assert_exact(variant, load(folder))


def test_answers_go_on_into_the_next_chunk(tiny_folder: Folder) -> None:
    model, prompts = load(tiny_folder("llama4")), some_prompts([20, 45, 70])
    groups = group_layers(model.caches).groups
    executor = ModelExecutor(model, EngineSizes(200, 8, 4, 64, 512, 307, groups=groups))
    got = PlanDriver(executor, 1).run(prompts, 8)
    assert got == generated("llama4", prompts, 8, got)


def test_chunks_are_gone_on_with_behind_a_cached_prefix(tiny_folder: Folder) -> None:
    """Of the chunks that lie behind it no block is there."""
    model, (prompt,) = load(tiny_folder("llama4")), some_prompts([150])
    groups, size, cached = group_layers(model.caches).groups, 8, 112
    assert [group.kind for group in groups] == ["full"] * 2 + ["chunk"] * 3
    executor = ModelExecutor(model, EngineSizes(200, size, 2, 256, 512, 307, groups=groups))
    ids, asked = np.array(prompt, "<i4").tobytes(), GREEDY.packed()
    blocks = list(range(-(-len(prompt) // size) * len(groups)))
    whole = NewSlot(0, ids, len(prompt), 0, blocks, asked)
    first = executor.execute(
        StepPlan(1, 1, True, [], [whole], [], [Chunk(0, 0, len(prompt), True, [])])
    )
    prefix = [
        blocks[index * len(groups) + number] if index >= group.blocks_behind(cached, size) else -1
        for index in range(cached // size)
        for number, group in enumerate(groups)
    ]
    assert prefix.count(NO_BLOCK) == 3 * (96 // size)
    rest = Chunk(1, cached, len(prompt) - cached, True, list(range(100, 100 + 5 * len(groups))))
    again = NewSlot(1, ids, len(prompt), cached, prefix, asked)
    second = executor.execute(StepPlan(1, 2, False, [0], [again], [], [rest]))
    wanted = generated("llama4", [prompt], 1)[0]
    assert [np.frombuffer(each.tokens, "<i4").tolist() for each in (first, second)] == [wanted] * 2


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("bloom", "states no length.*attention of another form"),
        ("falcon", "0 of 2 layers attend"),
        ("gptj", "0 of 2 layers attend"),
        ("mamba", "states no length.*another state than keys and values"),
        ("jamba", "another state than keys and values"),
        ("deepseek-v3", "keys of 192 and values of 128"),
        ("doge", "its attention has .*attention_mask"),
        ("phimoe-window", "the window of 40 positions"),
        ("bart", "does not use the positions"),
        ("mbart", "does not use the positions"),
        ("pegasus", "does not use the positions"),
        ("blenderbot", "does not use the positions"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(
    variant: str, reason: str, tiny_folder: Folder
) -> None:
    """A release of the library may compute it another way: it is then exact (GPT-J since 5.24)."""
    refusal = ""
    try:
        model = load(tiny_folder(variant))
    except BadModelFolder as refused:
        refusal = str(refused)
    if refusal:
        assert re.search(rf"config\.json: .*architecture.*{reason}", refusal)
    else:
        assert_exact(variant, model)


def test_an_architecture_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["NoSuchForCausalLM"], "model_type": "no_such", "vocab_size": 10, '
        '"max_position_embeddings": 10}'
    )
    info = read_model_info(tmp_path)
    with pytest.raises(BadModelFolder, match=r"NoSuchForCausalLM.*transformers \d.*no_such"):
        load_transformers_model(info, torch.float32, CPU, random=True, seed=0)


@pytest.mark.parametrize(
    "kind", ["StableLmForSequenceClassification", "StableLmModel"], ids=["classifier", "no-head"]
)
def test_a_folder_of_another_class_than_the_one_computed_is_refused(
    kind: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    configured = make_model("stablelm").config
    getattr(transformers, kind)(configured).save_pretrained(tmp_path)
    with pytest.raises(BadModelFolder, match=rf"'{kind}' is not.*'StableLmForCausalLM'"):
        load(tmp_path)


def test_tensors_that_the_checkpoint_lacks_or_has_in_another_shape_are_named(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder("stablelm"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    for part in ("gate", "down"):
        del weights[f"model.layers.1.mlp.{part}_proj.weight"]
    weights["model.norm.bias"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModelFolder) as caught:
        load(folder)
    assert str(caught.value) == (
        f"{folder}: tensors missing: 'model.layers.1.mlp.down_proj.weight', "
        "'model.layers.1.mlp.gate_proj.weight'; of a wrong shape: "
        "'model.norm.bias': [3] instead of [64]"
    )


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = make_model("stablelm").config
    config.tie_word_embeddings = True
    transformers.StableLmForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load(tmp_path)


def test_an_exception_of_the_modelling_code_is_a_refusal(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise LookupError("no\nsuch expert" + "!" * 1000)

    monkeypatch.setattr(transformers.StableLmModel, "forward", fail)
    with pytest.raises(BadModelFolder, match=r"raises LookupError: no such expert!+$") as caught:
        load(tiny_folder("stablelm"))
    assert str(caught.value).count("!") == 200 - len("no such expert")


def test_longrope_beyond_the_trained_length_is_refused(tiny_folder: Folder) -> None:
    model = load(tiny_folder("phi3-longrope"))
    model.prepare(512)
    with pytest.raises(BadModelFolder, match=r"longest sequence of a batch.*--max-model-len 512"):
        model.prepare(513)


def test_longrope_of_one_kind_of_layers_is_refused_beyond_its_length(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e6,
        "short_factor": [1.1] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 256,
    }
    usual = {"rope_type": "default", "rope_theta": 1e4}
    folder = configured(
        tiny_folder("gemma3"),
        tmp_path / "model",
        rope_parameters={"full_attention": longrope, "sliding_attention": usual},
    )
    model = load(folder)
    model.prepare(256)
    with pytest.raises(BadModelFolder, match="--max-model-len 256"):
        model.prepare(257)

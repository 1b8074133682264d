"""What is looked at of LoRA adapters before and while they are loaded, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from support.pipeline.adapter_folders import write_adapter
from support.worker.tiny_adapters import CPU, adapted, modules_of, settings_for
from support.worker.tiny_models import make_model

from penstock.protocol.config import ConfigError
from penstock.protocol.config.adapters import contradictions_of_adapters
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.protocol.wire.messages.engine import Adapter
from penstock.services.worker import model_loading
from penstock.services.worker.adapters.loading import check_adapters, load_adapters
from penstock.services.worker.loaded_model import LoadedModel
from penstock.services.worker.model_memory import ModelMemory
from penstock.services.worker.model_weights import load_model

Folder = Callable[[str], Path]


def test_the_name_and_the_digest_of_each_are_told(tiny_folder: Folder, tmp_path: Path) -> None:
    modules = modules_of(make_model("llama"))
    one, same = (write_adapter(tmp_path / name, modules, seed=3) for name in ("one", "same"))
    other = write_adapter(tmp_path / "other", modules, seed=3, config={"lora_alpha": 9})
    model = tiny_folder("llama")
    decoder = load_model(read_model_info(model), torch.float32, CPU, print)
    found, _ = load_adapters(settings_for(model, one=one, same=same, other=other), decoder)
    assert [each.name for each in found] == ["one", "same", "other"]
    assert found[0] == Adapter("one", found[1].digest)
    assert found[2].digest != found[0].digest


def test_what_the_models_type_cannot_hold_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    """It is finite as stored, and is not once it is scaled."""
    modules = modules_of(make_model("llama"))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    large = torch.full((modules["model.layers.0.mlp.up_proj"][0], 4), 3e37)
    folder = write_adapter(
        tmp_path / "one", modules, tensors={name: large}, config={"lora_alpha": 400}
    )
    decoder = load_model(read_model_info(tiny_folder("llama")), torch.float32, CPU, print)
    with pytest.raises(BadModelFolder, match=r"up_proj.lora_B: scaled by 100, its largest number"):
        load_adapters(settings_for(tiny_folder("llama"), one=folder), decoder)


def test_an_adapter_that_does_not_fit_is_found_before_the_weights_are_read(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **options: Any) -> None:
        pytest.fail("the weights are read")

    bad = write_adapter(tmp_path / "bad", {"model.layers.9.mlp.up_proj": (4, 4)})
    monkeypatch.setattr(model_loading, "make_model", read)
    config = settings_for(tiny_folder("llama"), bad=bad)
    with pytest.raises(BadModelFolder, match=r"--lora 'bad': .* no such linear layer"):
        model_loading.load_model_executor(config, lambda note: None)


def test_a_model_for_other_tasks_takes_no_adapters(tiny_folder: Folder, tmp_path: Path) -> None:
    """Also where its folder says what it is for, and no flag."""
    info = read_model_info(tiny_folder("llama"))
    config = settings_for(tiny_folder("llama"), one=tmp_path / "nowhere")
    pooling = read_pooling(info, msgspec.structs.replace(config.model, task="embed"))
    with pytest.raises(ConfigError, match=r"--lora: the model is for embed .*generate alone"):
        check_adapters(config, info, pooling, "cpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"quantization": "int8"}}, "weights that are not quantized"),
        ({"cluster": {"tensor_parallel_size": 2}}, "models on one device"),
        ({"speculation": {"speculative": "ngram"}}, "steps without drafts"),
    ],
)
def test_what_gpus_do_not_adapt_is_refused_by_name(
    changes: dict[str, dict[str, Any]], reason: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", modules_of(make_model("llama")))
    config, info = (
        settings_for(tiny_folder("llama"), one=folder),
        read_model_info(tiny_folder("llama")),
    )
    pooling = read_pooling(info, config.model)
    check_adapters(config, info, pooling, "cuda")
    for group, values in changes.items():
        part = msgspec.structs.replace(getattr(config, group), **values)
        config = msgspec.structs.replace(config, **{group: part})
    with pytest.raises(ConfigError, match=f"--lora: on GPUs adapters are for {reason}"):
        check_adapters(config, info, pooling, "cuda")
    check_adapters(config, info, pooling, "cpu")


def test_the_account_of_memory_has_the_adapters(tiny_folder: Folder, tmp_path: Path) -> None:
    model = tiny_folder("llama")
    folder = write_adapter(tmp_path / "one", modules_of(make_model("llama")))
    config = settings_for(model, one=folder)
    decoder = adapted(model, one=folder)
    assert decoder.adapters is not None
    subject = LoadedModel(decoder, "a test", adapters=decoder.adapters)
    account = ModelMemory(subject, config, read_model_info(model)).counted()
    taken = sum(
        tensor.nbytes for tensor in load_file(folder / "adapter_model.safetensors").values()
    )
    assert account.bytes_of("adapters") == decoder.adapters.num_bytes == taken
    assert account.total > account.bytes_of("weights") + taken


def test_what_is_not_required_and_has_no_place_is_logged(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modules = modules_of(make_model("llama"))
    folders = {
        name: write_adapter(tmp_path / name, modules, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    config = settings_for(tiny_folder("llama"), **folders, gone=tmp_path / "gone")
    loading = msgspec.structs.replace(config.loading, max_loras=1, lora_required=False)
    config = msgspec.structs.replace(config, loading=loading)
    assert not list(contradictions_of_adapters(config))
    info = read_model_info(tiny_folder("llama"))
    check_adapters(config, info, read_pooling(info, config.model), "cpu")
    decoder = load_model(info, torch.float32, CPU, print)
    assert [one.name for one in load_adapters(config, decoder)[0]] == ["one"]
    said = [record.getMessage() for record in caplog.records]
    assert any("--lora 'gone'" in line and "no such folder" in line for line in said)
    assert any("--lora 'two'" in line and "--max-loras) allows 1" in line for line in said)

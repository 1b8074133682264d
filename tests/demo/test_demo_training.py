"""The training module is Qwen3, its checkpoints go on where they were, and the model ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import penstock.demo
from penstock.demo.training import plot, train
from penstock.demo.training.export import export, weights_digest
from penstock.demo.training.generate import answers, load
from penstock.demo.training.model import Qwen3, Shape, dense_mask
from penstock.demo.training.muon import orthogonal
from penstock.demo.training.rounding import round_changes

MODEL = Path(penstock.demo.__file__).parent / "model"
needs_model = pytest.mark.skipif(
    not (MODEL / "config.json").exists(), reason="demo/model is not there"
)
SHAPE = Shape(
    vocab_size=4096, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1,
    intermediate_size=96,
)  # fmt: skip


@needs_model
def test_demo_the_exported_module_is_what_transformers_computes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = Qwen3(SHAPE)
    for parameter in model.parameters():
        parameter.data.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    folder = export(model, MODEL / "tokenizer.json", tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 4096, (2, 33))
    with torch.inference_mode():
        expected = theirs(ids).logits
        ours = model.hidden(ids, dense_mask(torch.ones_like(ids))) @ model.embed_tokens.weight.T
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_demo_a_document_in_a_row_does_not_see_its_neighbours() -> None:
    torch.manual_seed(0)
    model = Qwen3(SHAPE)
    ids = torch.randint(0, 4096, (1, 12))
    documents = torch.tensor([[1] * 5 + [2] * 7])
    with torch.inference_mode():
        packed = model.hidden(ids, dense_mask(documents))[:, 5:]
        alone = model.hidden(ids[:, 5:], dense_mask(documents[:, 5:]))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_demo_muon_makes_its_updates_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((3, 32, 64), (3, 64, 32)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
        assert values.min() > 0.5
        assert values.max() < 1.5


@pytest.mark.slow
@needs_model
def test_demo_an_interrupted_training_ends_like_one_that_was_not(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flags = [
        "--device", "cpu", "--rows", "1", "--length", "256", "--processes", "0", "--layers", "1",
        "--hidden-size", "128",
    ]  # fmt: skip
    for name in ("whole", "parts"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    train.main([str(tmp_path / "whole"), "--steps", "4", *flags])
    parts = tmp_path / "parts"
    train.main([str(parts), "--steps", "4", "--max-seconds", "0", "--log-every", "2", *flags])
    assert json.loads((parts / "log.jsonl").read_text().splitlines()[-1])["step"] == 2
    train.main([str(parts), "--steps", "4", "--resume", *flags])
    torch.set_num_threads(threads)
    for file in sorted((tmp_path / "whole" / "model").glob("*.safetensors")):
        expected, found = load_file(file), load_file(parts / "model" / file.name)
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), name


@pytest.mark.slow
@needs_model
def test_demo_a_resumed_training_knows_which_weights_it_began_with(tmp_path: Path) -> None:
    shape = Shape(hidden_size=64, num_layers=1, num_heads=1, intermediate_size=192)
    first, other = (
        export(Qwen3(shape), MODEL / "tokenizer.json", tmp_path / name) for name in ("one", "two")
    )

    def training(*flags: str | Path) -> train.Training:
        given = [str(tmp_path), "--device", "cpu", "--layers", "1", "--hidden-size", "64"]
        return train.Training(train._parser().parse_args([*given, *map(str, flags)]))

    training("--start", first).save()
    for flags in ([], ["--start", first]):
        resumed = training("--resume", *flags)
        resumed.load()
        assert resumed.start_digest == weights_digest(first)
    with pytest.raises(ValueError, match=r"--start .*two has .* leave --start out"):
        training("--resume", "--start", other).load()
    training().save()
    with pytest.raises(ValueError, match="began with random weights"):
        training("--resume", "--start", first).load()


def test_demo_rounded_changes_are_whole_numbers_of_a_rows_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = Qwen3(SHAPE)
    start = {name: value.bfloat16() for name, value in model.state_dict().items()}
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in model.named_parameters():
        if value.ndim == 2:
            value.data[1:] += 0.02 * torch.randn_like(value[1:])
            wanted[name] = value.detach().clone()
            wanted[name][0] = value[0]
    round_changes(model, start)
    for name, value in model.state_dict().items():
        if value.ndim < 2:
            assert torch.equal(value, wanted[name])
            continue
        old = start[name].float()
        step = (wanted[name] - old).abs().amax(1, keepdim=True).double() / 127
        codes = (value - old).double() / step.clamp(min=1e-12)
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-2)
        assert codes.abs().amax() < 127.5
        assert (value - wanted[name]).abs().max() <= 0.51 * step.max()
    with pytest.raises(SystemExit):
        train.main(["nowhere", "--round-changes"])
    assert "--round-changes: --start names the model" in capsys.readouterr().err


@needs_model
def test_demo_the_shipped_model_is_small_enough_and_answers() -> None:
    files = list(MODEL.iterdir())
    assert sum(file.stat().st_size for file in files) <= 24_000_000
    assert max(file.stat().st_size for file in files) <= 15_000_000
    model, tokenizer = load(MODEL, "cpu", torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 5_000_000 <= count <= 12_000_000
    ask = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    said = answers(
        model, tokenizer, [ask.format("What is 17 + 25?"), ask.format("Reverse the word stone.")]
    )
    assert [text.rpartition("\n")[2] for text in said] == ["42", "enots"]


def test_demo_the_picture_of_a_loss_curve_is_an_image_with_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"tokens": step * 10**6, "loss": 5 / step} for step in range(1, 50)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot.main([str(log), str(tmp_path / "loss.svg")]) == 0
    picture = (tmp_path / "loss.svg").read_text()
    assert picture.startswith("<svg")
    assert picture.count("<polyline") == 1
    assert plot.main([]) == 2

"""GGUF files, written by the library gguf, with config.json and tokenizer beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.worker.quantized_folders import Twins
from support.worker.tiny_models import SHARED
from support.worker.whole_logits import our_logits
from torch import Tensor

from penstock.kernels.gguf_blocks import weight_of_blocks
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker.gguf_file import BLOCKS, GgufFile, name_of
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.quantization.reading import read_quantization

gguf: Any = pytest.importorskip("gguf")
HEADS, KV_HEADS = 8, 4
BY_LIBRARY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Kinds to which the library rounds; of others it knows the numbers of blocks alone."""
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def blocks_of(weight: Tensor, kind: str) -> np.ndarray[Any, Any]:
    """uint8 [N, bytes]: rounded by the library, or random codes with scales as wide as the
    weight."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in BY_LIBRARY:
        found: np.ndarray[Any, Any] = gguf.quants.quantize(weight.numpy(), number)
        return found
    numbers, size = BLOCKS[kind]
    random = np.random.default_rng(weight.shape[0])
    rows, count = len(weight), weight.shape[1] // numbers
    raw = random.integers(0, 256, (rows, count, size), dtype=np.uint8)
    whole = (random.random((rows, count, 2)) * 2e-4 + 1e-4).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        raw[..., 208:] = whole[..., :2]
    else:
        raw[..., :4] = whole
    return raw.reshape(rows, -1)


def paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys as llama.cpp has them."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def unpaired(weight: Tensor, heads: int) -> Tensor:
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def stored_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        number, part = module.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{PARTS[part]}.{kind}"
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return f"{top[module]}.{kind}"


def write(source: Path, folder: Path, kind: str, family: str = "llama") -> Twins:
    """kind: of all matrices, ``F16`` too."""
    twins = Twins(folder / "quantized", folder / "plain")
    for path in twins:
        shutil.copytree(source, path)
    (twins.quantized / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(twins.quantized / "tiny.gguf", family)
    writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(300)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 300)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    numbers = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        numbers[name] = tensor
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
        heads = heads if family == "llama" else 0
        if tensor.dim() == 1:
            writer.add_tensor(stored_name(name), tensor.numpy())
            continue
        rows = paired(tensor, heads) if heads else tensor
        if kind == "F16":
            data = rows.half().numpy()
            writer.add_tensor(stored_name(name), data)
            kept = torch.from_numpy(data).float()
        else:
            data = blocks_of(rows, kind)
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored_name(name), data, raw_dtype=number)
            kept = torch.from_numpy(gguf.quants.dequantize(data, number).copy())
        numbers[name] = (unpaired(kept, heads) if heads else kept).contiguous()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(numbers, twins.plain / "model.safetensors", {"format": "pt"})
    return twins


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family whose rows are whole blocks of the K kinds."""
    root = tmp_path_factory.mktemp("sources")

    def source(family: str) -> Path:
        path = root / family
        if not path.exists():
            settings = SHARED | {
                "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS, "head_dim": 32, "tie_word_embeddings": False,
            }  # fmt: skip
            config = getattr(transformers, f"{family}Config")(**settings)
            torch.manual_seed(3)
            model = getattr(transformers, f"{family}ForCausalLM")(config).float()
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn_like(parameter)
            model.save_pretrained(path)
        return path

    return source


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_blocks_are_the_numbers_that_the_library_makes_of_them(kind: str) -> None:
    weight = 0.05 * torch.randn(24, 512, generator=torch.Generator().manual_seed(1))
    data = blocks_of(weight, kind)
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    found = weight_of_blocks(kind, torch.from_numpy(data.copy())).dequantized()
    torch.testing.assert_close(found, torch.from_numpy(wanted.copy()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "family"), [("Q4_1", "Llama"), ("Q6_K", "Llama"), ("F16", "Llama"), ("Q4_K", "Qwen3")]
)
def test_logits_are_those_of_the_files_numbers(
    kind: str, family: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    """The embedding and the LM head are in blocks, too."""
    quantized, plain = write(sources(family), tmp_path, kind, family.lower())
    torch.testing.assert_close(our_logits(quantized), our_logits(plain), rtol=2e-4, atol=2e-4)


def test_names_are_those_of_safetensors_files() -> None:
    assert name_of("blk.31.ffn_down.weight") == "model.layers.31.mlp.down_proj.weight"
    assert name_of("token_embd.weight") == "model.embed_tokens.weight"
    assert name_of("blk.x.ffn_down.weight") == "blk.x.ffn_down.weight"


@pytest.fixture(scope="module")
def file(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    twins = write(sources("Llama"), tmp_path_factory.mktemp("gguf"), "Q8_0")
    return twins.quantized / "tiny.gguf"


def cut_at(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


def instead(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old, new, 1)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another format": (instead(b"GGUF", b"GGML"), "no GGUF file"),
    "another version": (lambda data: data[:4] + b"\x09" + data[5:], "version 9; versions 2 and 3"),
    "an end within the header": (cut_at(100), "truncated within its header"),
    "an end within the data": (lambda data: data[:-100], "truncated: tensor .* ends at byte"),
    "a text without an end": (lambda data: data[:24] + b"\xff" * 8 + data[32:], "a text of 18446"),
    "too many tensors": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "tensors and .* cannot"),
    "another architecture": (
        instead(b"llama", b"mamba"), "architecture 'mamba'.*llama, qwen2, qwen3",
    ),
    "a name twice": (
        instead(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "k_proj.weight' is there twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(DAMAGE))
def test_a_file_is_refused_for(case: str, file: Path, tmp_path: Path) -> None:
    change, message = DAMAGE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(change(file.read_bytes()))
    with pytest.raises(BadModelFolder, match=message):
        GgufFile(path)


def test_kinds_that_are_not_read_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("output.weight", np.zeros((4, 18), np.uint8), raw_dtype=kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    message = r"'output\.weight' is of the kind IQ4_NL; read are Q4_0, Q4_1.*Q6_K: make the file"
    with pytest.raises(BadModelFolder, match=message):
        GgufFile(tmp_path / "model.gguf")


def test_a_missing_tensor_is_named_as_in_other_files(
    file: Path, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(file.parent, tmp_path / "model")
    path = tmp_path / "model" / "tiny.gguf"
    path.write_bytes(instead(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight")(path.read_bytes()))
    message = r"missing: 'model\.layers\.1\.self_attn\.q_proj\.weight'.*not of this model: "
    with pytest.raises(BadModelFolder, match=message):
        load_model(read_model_info(path.parent), torch.float32, torch.device("cpu"), print)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("blk.1.ffn_up.weight", r"1\.mlp\.up_proj\.weight'"),
        ("token_embd.weight", r"model\.embed_tokens\.weight'"),
    ],
)
def test_a_scale_among_codes_that_is_nan_is_found(
    stored: str, name: str, file: Path, tmp_path: Path
) -> None:
    shutil.copytree(file.parent, tmp_path / "model")
    path = tmp_path / "model" / "tiny.gguf"
    data = bytearray(path.read_bytes())
    begin = GgufFile(path).entries[name_of(stored)].begin
    data[begin + 34 : begin + 36] = b"\xff\x7f"  # the scale of the second block
    path.write_bytes(data)
    with pytest.raises(BadModelFolder, match=f"that are NaN or infinite: .*{name}"):
        load_model(read_model_info(path.parent), torch.float32, torch.device("cpu"), print)


def test_several_files_are_one_too_many_and_none_is_rounded_again(
    file: Path, tmp_path: Path
) -> None:
    shutil.copytree(file.parent, tmp_path / "model")
    info = read_model_info(tmp_path / "model")
    quantization = read_quantization(info)
    assert quantization is not None and quantization.title == "GGUF Q8_0"
    with pytest.raises(BadModelFolder, match=r"already \(GGUF\), and --quantization int8"):
        read_quantization(info, "int8")
    shutil.copy(file, tmp_path / "model" / "other.gguf")
    with pytest.raises(BadModelFolder, match=r"several GGUF files: 'other\.gguf', 'tiny\.gguf'"):
        read_quantization(info)

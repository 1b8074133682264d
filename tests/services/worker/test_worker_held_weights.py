"""Weights that outlive a worker: described, moved, mapped by another one, and what is refused."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.quantized_folders import WRITERS, write_twins
from support.worker.tiny_models import some_prompts
from torch import Tensor

from penstock.protocol.config import (
    CacheConfig,
    Config,
    ConfigError,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.held_process import prepare_on_device
from penstock.services.worker import prepared_worker
from penstock.services.worker.device_memory import MemoryReading
from penstock.services.worker.gpu.kv_pool import KVPool
from penstock.services.worker.held import digest
from penstock.services.worker.held import holding as holding_module
from penstock.services.worker.held.description import CannotHold, Describer, Restorer
from penstock.services.worker.held.holder import GivenWeights
from penstock.services.worker.held.holding import Holding
from penstock.services.worker.held.loading import (
    MadeModel,
    NotPrepared,
    Preparation,
    account_again,
    account_of,
)
from penstock.services.worker.held.manifest import (
    BadManifest,
    HeldModel,
    HeldPiece,
    HeldTensor,
    Manifest,
    decode_manifest,
)
from penstock.services.worker.held.memory import HostMemory, move, place_tensors, view
from penstock.services.worker.kept_model import check_held
from penstock.services.worker.loaded_model import LoadedModel
from penstock.services.worker.memory import plan_capacity
from penstock.services.worker.memory_account import MemoryAccount, MemoryPart
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import DenseModel, dense_model
from penstock.services.worker.quantization.reading import read_quantization

Folder = Callable[[str], Path]
CPU = torch.device("cpu")
PLAIN = ("qwen3", "llama", "qwen2", "gemma2", "olmo2", "cohere", "starcoder2", "granite", "glm4")


def load(folder: Path, online: str = "none") -> Decoder:
    return load_model(read_model_info(folder), torch.float32, CPU, lambda note: None, online=online)


def handed_over(
    model: Decoder, folder: Path, kernels: DenseModel | None = None, online: str = "none"
) -> tuple[Decoder, DenseModel | None, HeldModel, list[Tensor]]:
    """The model as another worker gets it, through bytes and descriptors."""
    describer, memory = Describer(), HostMemory()
    with torch.inference_mode():
        described = describer.model(model, kernels, "")
        placed, pieces, held = move(memory, describer.tensors)
        manifest = decode_manifest(Manifest(described, placed, held, None).encode())
        opened = [
            memory.open(os.dup(piece.descriptor), one)
            for piece, one in zip(pieces, manifest.pieces, strict=True)
        ]
        tensors = [view(one, opened) for one in manifest.placed]
        quantization = read_quantization(read_model_info(folder), online)
        restored = Restorer(tensors, CPU).model(manifest.model, quantization)
    for piece in (*pieces, *opened):
        os.close(piece.descriptor)
    return restored.model, restored.kernels, manifest.model, describer.tensors


def assert_same(model: Decoder, kernels: DenseModel | None, held: HeldModel, of: Any) -> None:
    """It is described as the one that it was made of, and has its numbers."""
    again = Describer()
    assert again.model(model, kernels, "") == held
    for mine, other in zip(again.tensors, of, strict=True):
        assert mine.dtype == other.dtype and mine.data_ptr() != other.data_ptr()
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def texts(model: Decoder) -> Any:
    info = read_model_info_of(model)
    config = Config(scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32))
    config = msgspec.structs.replace(config, model=ModelConfig(model=".", max_model_len=128))
    subject = LoadedModel(model, "on a CPU")
    config = msgspec.structs.replace(config, cache=CacheConfig(num_kv_blocks=60))
    capacity = plan_capacity(config, info, subject.block_bytes(16), 1 << 30, subject.groups)
    return PlanDriver(subject.executor(capacity), 1).run(some_prompts([3, 9, 5]), 8)


_INFOS: dict[int, Any] = {}


def read_model_info_of(model: Decoder) -> Any:
    return _INFOS[model.vocab_size]


@pytest.mark.parametrize("variant", PLAIN)
def test_a_model_that_is_handed_over_has_the_same_numbers(
    variant: str, tiny_folder: Folder
) -> None:
    folder = tiny_folder(variant)
    first = load(folder)
    second, _, held, tensors = handed_over(first, folder)
    assert_same(second, None, held, tensors)
    tied = first.weights.lm_head.weight is first.weights.embedding
    assert (second.weights.lm_head.weight is second.weights.embedding) == tied


def test_both_compute_the_same_text(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    _INFOS[307] = read_model_info(folder)
    first, plain = load(folder), load(folder)
    second, *_ = handed_over(first, folder)
    expected = texts(plain)
    assert texts(first) == expected, "moving changes nothing"
    assert texts(second) == expected


@pytest.mark.parametrize("online", ["int8", "int4"])
def test_weights_that_were_quantized_are_handed_over_in_codes(
    online: str, tiny_folder: Folder
) -> None:
    folder = tiny_folder("qwen3")
    second, _, held, tensors = handed_over(load(folder, online), folder, online=online)
    assert_same(second, None, held, tensors)
    assert any(tensor.dtype in (torch.int8, torch.uint8) for tensor in tensors)


@pytest.mark.parametrize("writer", ["gptq-4-ordered", "awq", "fp8-block", "modelopt-nvfp4"])
def test_quantized_folders_are_handed_over(
    writer: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = write_twins(tiny_folder("llama3-wide"), tmp_path, WRITERS[writer]).quantized
    second, _, held, tensors = handed_over(load(folder), folder)
    assert_same(second, None, held, tensors)


@pytest.mark.parametrize("variant", ["qwen3", "llama", "qwen2", "gemma2", "granite"])
def test_the_form_of_the_kernels_is_handed_over(variant: str, tiny_folder: Folder) -> None:
    folder = tiny_folder(variant)
    first = load(folder)
    config = dense_config(first.specification)
    assert isinstance(config, DenseConfig)
    kernels = dense_model(config, first.specification, first.weights)
    second, other, held, tensors = handed_over(first, folder, kernels)
    assert other is not None and other.config == config
    assert_same(second, other, held, tensors)
    assert next(second.linears()) is other.weights.layers[0].linears.qkv
    assert second.weights.lm_head is other.weights.lm_head


def test_weights_that_are_packed_cannot_be_described(tiny_folder: Folder) -> None:
    model = load(tiny_folder("qwen3"))
    model.weights.layers[0].linears.qkv.packed = True
    with pytest.raises(CannotHold, match="packed weights"):
        Describer().model(model, None, "")


# --- memory


def test_memory_of_the_host_is_sealed_and_a_writer_changes_its_own_copy_alone() -> None:
    memory, values = HostMemory(), torch.arange(1000, dtype=torch.float32)
    with torch.inference_mode():
        tensor = values.clone()
        placed, (piece,), (held,) = move(memory, [tensor])
    assert torch.equal(tensor, values)
    assert os.fstat(piece.descriptor).st_mode & 0o777 == 0o600
    for change in (
        lambda: os.pwrite(piece.descriptor, b"x", 0),
        lambda: os.ftruncate(piece.descriptor, 10),
    ):
        with pytest.raises(PermissionError):
            change()
    mine, yours = memory.open(piece.descriptor, held), memory.open(piece.descriptor, held)
    view(placed[0], [mine]).zero_()
    assert torch.equal(view(placed[0], [yours]), values) and torch.equal(tensor, values)
    os.close(piece.descriptor)


def test_what_is_no_sealed_memory_of_that_size_is_refused(tmp_path: Path) -> None:
    memory = HostMemory()
    file = memory.make(1024)
    with pytest.raises(BadManifest, match="memory of 1024 bytes with seals 0x0"):
        memory.open(file.descriptor, HeldPiece(1024, 0))
    file.finish()
    with pytest.raises(BadManifest, match="memory of 1024 bytes"):
        memory.open(file.descriptor, HeldPiece(2048, 0))
    assert fcntl.fcntl(file.descriptor, fcntl.F_GET_SEALS)
    with open(os.devnull) as other, pytest.raises(BadManifest, match="something else"):
        memory.open(other.fileno(), HeldPiece(1024, 0))
    os.close(file.descriptor)


def test_tensors_lie_behind_each_other_in_pieces_of_about_one_size() -> None:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (100, 600, 2000, 1, 0)]
    placed, sizes = place_tensors(tensors, 1100)
    assert [(one.piece, one.offset) for one in placed] == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 512)]
    assert sizes == [512, 1024, 2048, 512]


@pytest.mark.parametrize(
    "placed",
    [
        HeldTensor("float32", (300,), 0, 0),
        HeldTensor("float32", (-1, 4), 0, 0),
        HeldTensor("float32", (4,), 1, 0),
        HeldTensor("float32", (4,), 0, -512),
        HeldTensor("float32", (4,), 0, 4),
        HeldTensor("load", (4,), 0, 0),
        HeldTensor("int", (2**62,), 0, 0),
    ],
)
def test_a_manifest_that_does_not_fit_its_memory_is_refused(placed: HeldTensor) -> None:
    piece = HostMemory().make(1024)
    with pytest.raises(BadManifest):
        view(placed, [piece])
    os.close(piece.descriptor)


def test_a_manifest_of_another_model_is_refused(tiny_folder: Folder) -> None:
    describer = Describer()
    held = describer.model(load(tiny_folder("qwen3")), None, "")
    replace = msgspec.structs.replace
    wrong = (
        replace(held, layers=held.layers[:1]),
        replace(held, dtype="nonsense"),
        replace(held, tensors={}),
        replace(held, tensors={**held.tensors, "embedding": 10_000}),
        replace(held, tensors={**held.tensors, "embedding": -1}),
        replace(held, layers=[replace(held.layers[0], linears=[]), held.layers[1]]),
        replace(
            held,
            layers=[held.layers[0], replace(held.layers[1], linears=held.layers[1].linears[::-1])],
        ),
    )
    for each in wrong:
        with pytest.raises(BadManifest):
            Restorer(describer.tensors, CPU).model(each, None)
    for data in (b"", b"\xc1", b"\x94\x90\x90\x90\xc0", b"\x91" * 4000):
        with pytest.raises(BadManifest):
            decode_manifest(data)


# --- what they depend on


def test_the_digest_tells_models_settings_and_code_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("config.json", "{}"), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(content)
    config = Config(model=ModelConfig(model=str(tmp_path)))
    replace = msgspec.structs.replace

    def of(config: Config = config, dtype: torch.dtype = torch.float32) -> str:
        return digest.weights_digest(config, dtype)

    first = of()
    assert of() == first
    required = replace(config, loading=replace(config.loading, lora_required=False))
    placed = replace(config, device=replace(config.device, device_index=3, threads=2))
    assert of(required) == of(placed) == first
    others = [
        of(dtype=torch.bfloat16),
        of(replace(config, model=replace(config.model, quantization="int8"))),
        of(replace(config, loading=replace(config.loading, load_format="dummy"))),
        of(replace(config, cache=replace(config.cache, block_size=32))),
        of(replace(config, scheduler=replace(config.scheduler, max_num_seqs=7))),
    ]
    (tmp_path / "config.json").write_text("{} ")
    others.append(of())
    weights = tmp_path / "model.safetensors"
    weights.write_text("WEIGHTS")
    os.utime(weights, ns=(1, 1))
    others.append(of())
    os.utime(weights, ns=(1, 1))
    monkeypatch.setattr(digest, "_code", lambda: "other code")
    others.append(of())
    assert len({first, *others}) == len(others) + 1


def test_weights_are_not_read_for_the_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/proc/self/mem")  # what is read there fails
    (tmp_path / "config.json").write_text("{}")
    assert digest.weights_digest(Config(model=ModelConfig(model=str(tmp_path))), torch.float32)


class Memory:
    """A device's."""

    def __init__(self, total: int, free: int) -> None:
        self.reading = MemoryReading(total, free, 10, 10)

    def begin(self) -> None: ...

    def read(self) -> MemoryReading:
        return self.reading


def an_account() -> MemoryAccount:
    parts = [MemoryPart("weights", 400), MemoryPart("step", 50), MemoryPart("outside", 100)]
    sizes = EngineSizes(28, 16, 4, 32, 128, 100)
    account = MemoryAccount("a device", 1000, 900, "all", parts, 10, sizes)
    assert account.counted == 850
    return account


def test_the_account_is_taken_over_where_there_is_as_much_memory() -> None:
    account = an_account()
    cuda = torch.device("cuda")
    assert account_again(account, cuda, Memory(1000, 340)) is account
    assert account_again(account, cuda, Memory(1000, 339)) is None
    assert account_again(account, cuda, Memory(2000, 800)) is None
    assert account_again(None, cuda, Memory(1000, 800)) is None
    assert account_again(account, CPU, Memory(1000, 800)) is None


# --- KV memory


class Awaited:
    def __init__(self) -> None:
        self.memory, self.calls = torch.zeros(1, dtype=torch.uint8), list[str]()

    def withdraw(self) -> None:
        self.calls.append("withdrawn")

    def receive(self) -> None:
        self.calls.append("received")


class MemoryWithKV(HostMemory):
    def __init__(self) -> None:
        self.asked = list[tuple[int, int]]()

    def awaited(self, descriptor: int, num_bytes: int) -> Awaited:
        self.asked.append((os.fstat(descriptor).st_size, num_bytes))
        return Awaited()


class OneHolder:
    """A connection to a holder that has what was offered last."""

    offered: tuple[bytes, int, list[int]]

    def __init__(self, path: str) -> None: ...

    def close(self) -> None: ...

    def want(self, *_: Any) -> GivenWeights:
        manifest, _, descriptors = self.offered
        return GivenWeights(manifest, [os.dup(each) for each in descriptors])

    def offer(self, key: Any, manifest: bytes, num_bytes: int, descriptors: list[int]) -> str:
        type(self).offered = manifest, num_bytes, descriptors
        return ""


def test_kv_memory_is_handed_over_to_the_next_worker_of_the_same_engine(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "HolderConnection", OneHolder)
    monkeypatch.setattr(Holding, "_stay", lambda *_: None)
    folder, replace = tiny_folder("qwen3"), msgspec.structs.replace
    config = Config(model=ModelConfig(model=str(folder)))
    info, account, model = read_model_info(folder), an_account(), load(folder)
    first = Holding(config, torch.float32, MemoryWithKV())
    kept = first.keep(model, None, "", account)
    assert kept.kv_memory is not None and len(kept.kv_memory) == account.kv_bytes == 300
    assert OneHolder.offered[1] == kept.num_bytes, "counted are weights"
    memory = MemoryWithKV()
    found = Holding(config, torch.float32, memory).find(info, CPU, lambda note: None)
    assert found is not None and found.kv is not None and found.account == account
    assert memory.asked == [(300, 300)]
    other = replace(config, cluster=replace(config.cluster, engine="7"))
    found = Holding(other, torch.float32, memory).find(info, CPU, lambda note: None)
    assert found is not None and found.kv is None and len(memory.asked) == 1
    monkeypatch.setattr(OneHolder, "offered", (*OneHolder.offered[:2], OneHolder.offered[2][:-1]))
    assert Holding(config, torch.float32, memory).find(info, CPU, lambda note: None) is None


def test_a_worker_is_prepared_where_the_rest_of_it_fits_beside_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    account, kv, model = an_account(), Awaited(), SimpleNamespace()
    made = MadeModel(cast(Any, model), "none", account=account, restored=True, kv=kv)
    preparation = Preparation()
    with pytest.raises(NotPrepared, match=r"takes 50 bytes, and 49 bytes are free; lower --gpu"):
        preparation.begin(None, made, Memory(1000, 39))
    assert kv.calls.pop() == "withdrawn", "what stood in for it is given back"
    with pytest.raises(NotPrepared, match="is not held"):
        preparation.begin(None, made._replace(kv=None), Memory(1000, 400))
    closed = list[bool]()
    holding = cast(Any, SimpleNamespace(close=lambda: closed.append(True)))
    with pytest.raises(NotPrepared, match="is not held"):
        preparation.begin(holding, None, Memory(1000, 400))
    assert closed == [True], "nobody waits for what it does not load"
    preparation.begin(holding, made, Memory(1000, 40))
    preparation.end()
    preparation.take_over()
    assert kv.calls == ["withdrawn", "received"]
    assert account_of(made, torch.device("cuda")) is account, "KV memory is as it was planned"


def test_only_a_worker_of_held_weights_is_prepared_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [None, SimpleNamespace(load="prepared")]
    monkeypatch.setattr(prepared_worker, "prepare_worker", lambda config: answers.pop(0))
    replace, config = msgspec.structs.replace, Config()
    holds = replace(config, loading=replace(config.loading, hold_weights=True))
    on_gpu = replace(holds, device=replace(config.device, device="cuda"))
    assert prepare_on_device("scheduler", on_gpu) == {}
    assert prepare_on_device("worker", replace(on_gpu, loading=config.loading)) == {}
    assert prepare_on_device("worker", replace(on_gpu, device=DeviceConfig(device="cpu"))) == {}
    assert prepare_on_device("worker", on_gpu) == {}, "there is nothing to prepare it with"
    assert prepare_on_device("worker", on_gpu) == {"load": "prepared"}


def test_kv_memory_lies_where_it_is_told() -> None:
    memory = torch.zeros(5000, dtype=torch.uint8)
    pool = KVPool(3, 2, 1, 16, 8, torch.float16, CPU, memory)
    assert pool.blocks.data_ptr() == memory.data_ptr() and pool.blocks.nbytes == 3072
    with pytest.raises(ValueError, match="KV memory of 6144 bytes in 5000"):
        KVPool(6, 2, 1, 16, 8, torch.float16, CPU, memory)


def test_models_that_are_not_held_are_refused_by_name(tiny_folder: Folder) -> None:
    replace = msgspec.structs.replace
    config = replace(Config(), loading=replace(Config().loading, hold_weights=True))
    info = read_model_info(tiny_folder("gpt2"))
    for given in (config, replace(config, model=ModelConfig(task="embed"))):
        with pytest.raises(ConfigError, match="--hold-weights keeps those of models that generate"):
            check_held(given, info)
    check_held(Config(), info)
    check_held(config, read_model_info(tiny_folder("qwen3")))

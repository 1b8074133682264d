"""Which starts of a worker have their kernels compiled ahead, and what the cache says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.kernels.gpu.device_facts import facts_of
from penstock.protocol.config import Config, ConfigError, DeviceConfig, ModelConfig
from penstock.protocol.config.machine import Machine, triton_cache_folder
from penstock.protocol.model_info import read_model_info
from penstock.services.worker import ahead_compilation
from penstock.services.worker.ahead_compilation import AheadCompilation
from penstock.services.worker.cuda_driver import CudaDevice
from penstock.services.worker.gpus import gpu_named
from penstock.services.worker.kernel_cache import kernel_cache
from penstock.services.worker.kernel_needs import (
    COMPRESSED,
    PLAIN,
    KernelNeeds,
    kernel_needs,
    table_widths,
)
from penstock.services.worker.kernel_report import CompilationReport
from penstock.services.worker.plan import device_of

H100 = CudaDevice("NVIDIA H100", (9, 0), 232_448, 80 << 30, 132)
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "model", QWEN)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(folder: Path, model: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def config_for(folder: Path) -> Config:
    return Config(
        model=ModelConfig(model=str(folder), dtype="bfloat16"), device=DeviceConfig(device="cuda")
    )


def needs_of(folder: Path, gpu: str = "h100", **more: Any) -> KernelNeeds:
    card = gpu_named(gpu)
    found = kernel_needs(
        config_for(folder), read_model_info(folder), device_of(card), facts_of(card.capability),
        **more,
    )  # fmt: skip
    assert isinstance(found, KernelNeeds)
    return found


def test_of_many_layers_one_of_each_kind_is_enough_and_two_at_least(tmp_path: Path) -> None:
    alike = needs_of(made(tmp_path / "alike", QWEN)).model
    assert alike is not None and len(alike.layers) == 2
    gemma = QWEN | {
        "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "query_pre_attn_scalar": 256,
        "layer_types": 14 * ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 1e4, "rope_theta": 1e6,
    }  # fmt: skip
    model = needs_of(made(tmp_path / "mixed", gemma)).model
    assert model is not None
    kinds = model.layers
    assert sorted(layer.attention.window for layer in kinds) == [0, 512]


def test_weights_are_compiled_for_in_the_form_that_they_will_have(tmp_path: Path) -> None:
    large = QWEN | {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12_288}
    small, wide = made(tmp_path / "small", QWEN), made(tmp_path / "wide", large)
    assert needs_of(small).forms == (PLAIN,)
    assert needs_of(small, everything=True).forms == (PLAIN,)  # too narrow on any GPU
    assert needs_of(wide, "b200").forms == (PLAIN,)  # no kernel reads them there
    assert needs_of(wide).forms == (COMPRESSED,)
    deep = made(tmp_path / "deep", large | {"num_hidden_layers": 60})
    assert needs_of(deep).forms == (PLAIN,)  # their copy has no room
    assert needs_of(deep, everything=True).forms == (COMPRESSED, PLAIN)


def test_of_quantized_weights_their_forms_decide(tmp_path: Path) -> None:
    """As data that another process reads; layers that are stored alike are one kind."""
    folder = made(tmp_path / "model", QWEN)
    card, info = gpu_named("h100"), read_model_info(folder)
    found = []
    for online in ("none", "int4", "fp8"):
        config = config_for(folder)
        config = replace(config, model=replace(config.model, quantization=online))
        one = kernel_needs(config, info, device_of(card), facts_of(card.capability))
        assert isinstance(one, KernelNeeds)
        assert msgspec.json.decode(msgspec.json.encode(one), type=KernelNeeds) == one
        found.append(one)
    plain, int4, fp8 = found
    assert plain.coded is None and int4.coded is not None and fp8.coded is not None
    assert int4.model is not None and len(int4.model.layers) == len(int4.coded.layers) == 2
    up = int4.coded.layers[0][2]
    assert up is not None and [part.outputs for part in up.parts] == [2 * 3072]
    assert not up.quantizes and fp8.coded.layers[0] == fp8.coded.layers[1]
    assert all(linear is not None and linear.quantizes for linear in fp8.coded.layers[0])
    assert int4.coded.head is not None and int4.coded.head.parts[0].outputs == 151_936
    assert len({kernel_cache(each).marker for each in found}) == 3


def test_choices_that_were_measured_are_compiled_for_and_a_line_that_is_none_is_refused(
    tmp_path: Path,
) -> None:
    folder = made(tmp_path / "model", QWEN)
    card, info = gpu_named("h100"), read_model_info(folder)

    def needs(*lines: str) -> KernelNeeds:
        config = config_for(folder)
        device = replace(config.device, kernel_table=list(lines), kernel_table_device="a card")
        config = replace(config, device=device)
        found = kernel_needs(config, info, device_of(card), facts_of(card.capability))
        assert isinstance(found, KernelNeeds)
        return found

    line = "few_rows 4096x1024x8 = 1 4 8 4"
    chosen = msgspec.json.decode(msgspec.json.encode(needs(line)), type=KernelNeeds)
    assert chosen.kernel_table == (line,)
    assert kernel_cache(chosen).marker != kernel_cache(needs()).marker
    with pytest.raises(ConfigError, match="no such table"):
        needs("most_rows 1 = 2")


def test_layers_that_stay_plain_among_quantized_ones_are_a_kind(tmp_path: Path) -> None:
    quantization = {
        "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0.mlp"],
    }  # fmt: skip
    coded = needs_of(made(tmp_path / "m", QWEN | {"quantization_config": quantization})).coded
    assert coded is not None and coded.head is None
    kinds = [[linear is not None for linear in layer] for layer in coded.layers]
    assert kinds == [[True, True, False, False], [True, True, True, True]]


OLMO3 = QWEN | {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 512}


def test_of_layers_that_others_compute_attention_and_sampler_are_ours(tmp_path: Path) -> None:
    needs = needs_of(made(tmp_path / "olmo", OLMO3))
    assert needs.model is None and needs.forms == (PLAIN,)
    assert needs.attention is not None and not needs.attention.modelling_code
    assert sorted(cache.window for cache in needs.attention.caches) == [0, 512]
    alike = needs_of(made(tmp_path / "cohere", QWEN | {"architectures": ["CohereForCausalLM"]}))
    assert alike.attention is not None and len(alike.attention.caches) == 2


def test_a_model_of_which_our_kernels_compute_nothing_needs_none(tmp_path: Path) -> None:
    wide = OLMO3 | {"head_dim": 320}
    folder = made(tmp_path / "wide", wide)
    found = kernel_needs(
        config_for(folder), read_model_info(folder), device_of(gpu_named("h100")), facts_of((9, 0))
    )
    assert isinstance(found, str) and "attention: the kernels lack heads of 320" in found


def test_block_tables_are_told_apart_by_widths_that_programs_read_at_once(folder: Path) -> None:
    needs = needs_of(folder)
    assert table_widths(needs) == [40_960]
    assert table_widths(replace(needs, max_model_len=40_000)) == [40_000, 2048]
    assert not needs.may_be_cut
    cut = needs_of(folder, "t4", everything=True)
    assert cut.may_be_cut
    assert table_widths(cut) == [40_960, 64]


def test_a_marker_stands_for_all_that_decides_what_is_compiled(
    folder: Path, cache_folder: Path
) -> None:
    needs = needs_of(folder)
    cache, model = kernel_cache(needs), needs.model
    assert model is not None
    assert not cache.holds(needs)
    cache.complete(needs)
    assert cache.holds(needs)
    assert cache.folder == cache_folder == cache.marker.parent
    for other in (
        replace(needs, max_num_seqs=33),
        replace(needs, dtype="float16"),
        replace(needs, device=facts_of((10, 0))),
        replace(needs, model=replace(model, hidden_size=2048)),
    ):
        assert not kernel_cache(other).holds(other)
    both = replace(needs, forms=(COMPRESSED, PLAIN))
    assert not kernel_cache(both).holds(both)
    kernel_cache(both).complete(both)
    assert kernel_cache(needs).holds(needs)
    cut = replace(needs, may_be_cut=True)
    assert not kernel_cache(cut).holds(cut)


def test_a_cache_that_was_copied_elsewhere_names_its_files_there(
    folder: Path, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton writes them: each kernel's group names its files by their whole paths."""
    needs = needs_of(folder)
    kernel_cache(needs).complete(needs)
    entry = cache_folder / "ABC"
    entry.mkdir()
    (entry / "k.cubin").write_bytes(b"code")
    group = {"child_paths": {"k.cubin": str(entry / "k.cubin")}}
    (entry / "__grp__k.json").write_text(json.dumps(group))
    moved = cache_folder.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    assert kernel_cache(needs).holds(needs)
    named = json.loads((moved / "ABC" / "__grp__k.json").read_text())["child_paths"]
    assert Path(named["k.cubin"]).read_bytes() == b"code"
    assert named["k.cubin"] == str(moved / "ABC" / "k.cubin")


def test_the_cache_lies_where_triton_looks_for_it(tmp_path: Path) -> None:
    assert triton_cache_folder({"TRITON_CACHE_DIR": "/var/cache"}) == Path("/var/cache")
    assert triton_cache_folder({"TRITON_HOME": str(tmp_path)}) == tmp_path / ".triton" / "cache"
    assert triton_cache_folder({}) == Path.home() / ".triton" / "cache"


class Begun:
    """Stands for processes that compile."""

    def __init__(self, log: list[str], processes: int) -> None:
        self.processes, self._log = processes, log

    def wait(self) -> CompilationReport:
        self._log.append("waited for")
        return CompilationReport(compiled=5, processes=self.processes, failures=["k: no"])

    def stop(self) -> None:
        self._log.append("stopped")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A worker's start on a machine with so many cores and this device: what is begun."""

    def start(folder: Path, cores: int = 16, device: CudaDevice | None = H100) -> list[str]:
        log: list[str] = []

        def begin(needs: KernelNeeds, processes: int) -> Begun:
            log.append(f"begun with {processes}")
            return Begun(log, processes)

        monkeypatch.setattr(ahead_compilation, "read_device", lambda: device)
        monkeypatch.setattr(ahead_compilation, "read_machine", lambda: Machine(cores, cores, 1))
        monkeypatch.setattr(ahead_compilation, "Compilation", begin)
        ahead = AheadCompilation(config_for(folder))
        ahead.wait()
        ahead.complete()
        ahead.stop()
        return log

    return start


def test_the_first_start_compiles_ahead_and_the_next_begins_no_process(
    folder: Path, cache_folder: Path, starts: Callable[..., list[str]]
) -> None:
    assert starts(folder) == ["begun with 14", "waited for"]
    assert starts(folder) == []


@pytest.mark.parametrize("cores", [1, 3])
def test_a_worker_with_few_cores_compiles_alone(
    folder: Path, cache_folder: Path, starts: Callable[..., list[str]], cores: int
) -> None:
    assert starts(folder, cores) == []
    assert starts(folder, 8) == []  # it has compiled all by then


def test_without_a_gpu_or_a_sound_model_nothing_is_begun(
    folder: Path, tmp_path: Path, cache_folder: Path, starts: Callable[..., list[str]]
) -> None:
    assert starts(folder, device=None) == []
    assert starts(tmp_path / "nothing here") == []
    assert not cache_folder.exists()


def test_what_is_begun_ends_with_a_start_that_fails(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(ahead_compilation, "read_device", lambda: H100)
    monkeypatch.setattr(ahead_compilation, "read_machine", lambda: Machine(8, 8, 1))
    monkeypatch.setattr(
        ahead_compilation, "Compilation", lambda needs, processes: Begun(log, processes)
    )
    ahead = AheadCompilation(config_for(folder))
    assert ahead.processes == 6
    ahead.stop()
    ahead.wait()
    assert log == ["stopped"]

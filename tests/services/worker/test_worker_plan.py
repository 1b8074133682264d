"""``penstock plan``: what it says is what a worker then has."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.protocol.config import (
    CacheConfig,
    Config,
    ConfigError,
    DeviceConfig,
    LoadingConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services import cli
from penstock.services.worker import model_memory, plan
from penstock.services.worker.gpus import GPUS, gpu_named
from penstock.services.worker.loading import load_executor
from penstock.services.worker.memory_account import GIB, TOLERANCE
from penstock.services.worker.role_plan import engines_with_roles

Folder = Callable[[str], Path]
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


GEMMA3_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "dtype": "bfloat16",
}


def config_for(folder: Path, **groups: dict[str, Any]) -> Config:
    return Config(
        model=ModelConfig(model=str(folder), **groups.get("model", {})),
        cache=CacheConfig(**groups.get("cache", {})),
        scheduler=SchedulerConfig(**groups.get("scheduler", {})),
        device=DeviceConfig(device="cpu", threads=1),
    )


FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "bytes": {"cache": {"kv_cache_memory_bytes": 1 << 20}},
    "blocks": {"cache": {"num_kv_blocks": 77, "block_size": 32}},
    "lengths": {
        "model": {"max_model_len": 200, "dtype": "bfloat16"},
        "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 64},
    },
    "memory": {"scheduler": {"max_num_seqs": 8192}, "cache": {"memory_share": [0.5]}},
}


@pytest.mark.parametrize(
    ("variant", "flags"),
    [*(("qwen3", name) for name in FLAGS), ("mistral", "bytes"), ("ministral", "memory"),
     ("arcee", "bytes"), ("mixtral", "bytes"), ("cwm", "bytes"), ("jetmoe", "bytes")],
)  # fmt: skip
def test_a_start_has_the_kv_memory_that_was_planned(
    variant: str, flags: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(variant)
    config = config_for(folder, **FLAGS[flags])
    free = 3 * GIB
    planned = plan.Planner(read_model_info(folder), plan.PlannedDevice("cpu", free))
    account = planned.account(config)
    weights = account.parts[0].num_bytes
    # As the machine has it once a worker is there.
    there = free - plan.PROCESS_BYTES - weights
    monkeypatch.setattr(model_memory, "free_host_bytes", lambda: there)
    executor = load_executor(config, lambda note: None)
    assert executor.account is not None
    assert executor.account.block_bytes == account.block_bytes
    sizes, wanted = executor.capacity, account.sizes
    assert abs(sizes.num_blocks - wanted.num_blocks) <= TOLERANCE * wanted.num_blocks
    assert replace(sizes, num_blocks=0) == replace(wanted, num_blocks=0)
    if flags != "memory":
        assert sizes == wanted
    else:
        assert sizes.num_blocks < 8192 * 1024 // 16  # the memory has decided


def test_layers_with_a_window_keep_their_window_on_a_gpu_and_on_a_cpu(tiny_folder: Folder) -> None:
    """Four layers, two of them with windows, of two KV heads of 16: a block holds two layers."""
    folder = tiny_folder("ministral")
    for device, implementation in (
        (plan.PlannedDevice("a GPU", 8 * GIB), "native"),
        (plan.PlannedDevice("a GPU", 8 * GIB), "transformers"),
        (plan.PlannedDevice("cpu", 8 * GIB), "native"),
    ):
        planner = plan.Planner(read_model_info(folder), device)
        account = planner.account(config_for(folder, model={"model_impl": implementation}))
        assert account.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
        assert [group.window for group in account.sizes.groups] == [0, 40]


def test_windows_make_room_for_several_times_the_tokens(tmp_path: Path) -> None:
    """Five of six layers have a window of 1,024; without, each would keep 131,072 positions."""
    tokens = []
    for window in (1024, 131_072):
        (tmp_path / "config.json").write_text(json.dumps(GEMMA3_12B | {"sliding_window": window}))
        planner = plan.Planner(read_model_info(tmp_path), plan.device_of(GPUS["h100"]))
        config = replace(config_for(tmp_path), loading=LoadingConfig(load_format="dummy"))
        tokens.append(planner.account(config).kv_tokens)
    assert tokens[0] > 4 * tokens[1] > 400_000


def planned(
    tmp_path: Path, model: dict[str, Any], *flags: str, lean: bool = True
) -> tuple[str, int]:
    """What is printed, and the exit code. lean: it imports no torch."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = "import sys; from penstock.services.cli import main; code = main(sys.argv[1:]); "
    command += f"bad = {lean} and {{'torch', 'transformers', 'triton'}} & sys.modules.keys(); "
    command += "sys.exit(f'imported {bad}' if bad else code)"
    arguments = ["plan", str(tmp_path), "--load-format", "dummy", *flags]
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr, done.returncode


def test_a_plan_shows_what_a_gpu_holds_and_imports_no_torch(tmp_path: Path) -> None:
    flags = ("--gpu", "h100", "--max-num-seqs", "8")
    text, code = planned(tmp_path, LLAMA_8B, *flags)
    assert code == 0, text
    # Three quarters of the 14.96 GiB below but for the embedding are compressed beside them.
    assert "25.58 GiB  8.03 B parameters in bfloat16, compressed ones for few rows" in text
    text, code = planned(tmp_path, LLAMA_8B, *flags, "--compress-weights", "never")
    assert code == 0, text
    # 2 bytes of (32 layers of 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336, two tables, 65 norms)
    assert "14.96 GiB  8.03 B parameters in bfloat16" in text
    # 2 * 32 layers * 8 heads * 128 * 2 bytes
    assert "128.0 KiB a token" in text
    assert "longest context 131,072 tokens; 3." in text
    assert "8 sequences at once: each may have 5" in text


def test_a_plan_of_a_divided_model_is_that_of_one_of_its_devices(tmp_path: Path) -> None:
    text, code = planned(tmp_path, LLAMA_70B, "--gpu", "h100", "--tensor-parallel-size", "4")
    assert code == 0, text
    # Norms are on every device; 80 layers of 8192 * (8192 + 2048) / 4 ..., and tables, are divided.
    assert "32.86 GiB  17.64 B parameters in bfloat16" in text
    # 2 * 80 layers * 2 heads * 128 * 2 bytes
    assert "80.0 KiB a token" in text
    assert "NCCL's buffers" in text
    text, code = planned(tmp_path, LLAMA_70B, "--gpu", "h100", "--tensor-parallel-size", "12")
    assert code and "sizes that work: 1, 2, 4, 8, 16, 32, 64" in text


def test_a_model_that_cannot_fit_ends_with_the_numbers_and_what_would(tmp_path: Path) -> None:
    text, code = planned(tmp_path, LLAMA_70B, "--gpu", "h200")
    assert code == plan.CANNOT_FIT == 1
    assert "takes 13" in text and "124.2 GiB of 138.9 GiB may be used by it" in text
    assert "--gpu b200: " in text and "--quantization int4: " in text
    text, code = planned(tmp_path, LLAMA_70B, "--gpu", "h200", "--quantization", "int8")
    assert code == 0 and "bfloat16, quantized (int8, quantized while it is read)" in text
    text, code = planned(
        tmp_path, LLAMA_8B | {"dtype": "float32"}, "--gpu", "4090", "--max-model-len", "8192"
    )
    assert code == 1
    assert "--dtype bfloat16: " in text


def test_a_length_that_does_not_fit_names_the_one_that_does(tmp_path: Path) -> None:
    flags = ["--gpu", "4090", "--max-num-batched-tokens", "2048", "--max-num-seqs", "16"]
    text, code = planned(tmp_path, LLAMA_8B, *flags, "--max-model-len", "100000")
    assert code == 1
    (line,) = (line for line in text.splitlines() if line.startswith("  --max-model-len "))
    fits = line.split()[1]
    text, code = planned(tmp_path, LLAMA_8B, *flags, "--max-model-len", fits)
    assert code == 0
    assert f"longest context {int(fits):,} tokens; 1.0" in text


def test_without_weights_a_plan_says_how_config_json_alone_suffices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    command = ["plan", str(tmp_path), "--gpu", "h100"]
    assert cli.main(command) != 0
    said = capsys.readouterr().err
    assert "neither model.safetensors nor" in said
    assert "(--load-format dummy plans by its config.json alone)" in said
    assert cli.main([*command, "--load-format", "dummy"]) == 0


def changed(folder: Path, target: Path, **settings: Any) -> Path:
    """A copy of a folder whose ``config.json`` says something else."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(config))
    return target


WRONG_FOLDERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a shape of a family of ours": ("qwen3", {"intermediate_size": 120}, "of a wrong shape: "),
    "layers that are missing": ("llama", {"num_hidden_layers": 3}, "tensors missing: "),
    "a shape by transformers": ("gpt2", {"n_inner": 120}, "of a wrong shape: "),
    "an unknown architecture": (
        "gpt2",
        {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"},
        "transformers",
    ),
    "code in the folder": (
        "gpt2",
        {
            "architectures": ["OwnForCausalLM"],
            "model_type": "own",
            "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        },
        "trust_remote_code",
    ),
    "a quantization": ("qwen3", {"quantization_config": {"quant_method": "no_such"}}, "no_such"),
    "quantized weights by transformers": (
        "gpt2",
        {"quantization_config": {"quant_method": "fp8"}},
        "weights must be plain",
    ),
    "layers with another state": ("jamba", {}, "another state than keys and values"),
    "keys and values of two sizes": ("deepseek-v3", {}, "keys of 192 and values of 128"),
    "attention of another form": ("falcon", {}, "0 of 2 layers attend"),
    "a mask": ("doge", {}, "attention has .*attention_mask"),
    "positions": ("bart", {}, "does not use the positions"),
}


@pytest.mark.parametrize("case", list(WRONG_FOLDERS))
def test_a_plan_refuses_a_folder_that_a_start_refuses_with_the_same_words(
    case: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    variant, settings, words = WRONG_FOLDERS[case]
    config = config_for(changed(tiny_folder(variant), tmp_path / "model", **settings))
    with pytest.raises(BadModelFolder, match=words) as started:
        load_executor(config, lambda note: None)
    with pytest.raises(BadModelFolder) as planned:
        plan.report(config, None)
    assert str(planned.value) == str(started.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"model": {"quantization": "fp8"}}, "CPUs do not multiply FP8"),
        ({"model": {"dtype": "float16"}}, "the CPU computes in bfloat16 or float32"),
        ({"model": {"dtype": "bfloat16"}, "device": {"deterministic": True}}, "in float32 alone"),
        ({"loading": {"lora": ["x=/no/such"], "lora_required": True}}, "/no/such"),
        ({"cluster": {"tensor_parallel_size": 3}}, "sizes that work: 1, 2"),
    ],
)
def test_a_plan_refuses_settings_that_a_start_refuses_with_the_same_words(
    groups: dict[str, dict[str, Any]], words: str, tiny_folder: Folder
) -> None:
    whole = config_for(tiny_folder("qwen3"))
    of_config = {name: replace(getattr(whole, name), **fields) for name, fields in groups.items()}
    config = replace(whole, **of_config)
    with pytest.raises((BadModelFolder, ConfigError), match=words) as started:
        load_executor(config, lambda note: None)
    with pytest.raises((BadModelFolder, ConfigError)) as planned:
        plan.report(config, None)
    assert str(planned.value) == str(started.value)


def test_gpus_are_found_however_they_are_spelled() -> None:
    assert gpu_named("NVIDIA H100") == gpu_named("h100") == GPUS["h100"]
    assert gpu_named("RTX 4090") == gpu_named("GeForce RTX 4090") == GPUS["4090"]
    assert gpu_named("rtx-6000-ada") == GPUS["rtx-6000-ada"]
    with pytest.raises(ConfigError, match=r"--gpu h1000: did you mean h100\? known are t4"):
        gpu_named("h1000")


def test_a_gpu_beside_another_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpu", "h100", "--device", "cpu"]) == cli.BAD_SETTINGS
    assert "--gpu h100 and --device cpu name two devices" in capsys.readouterr().err


def test_the_null_device_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--device", "null"]) == cli.BAD_SETTINGS
    assert "--device null loads no model" in capsys.readouterr().err


def test_places_of_adapters_are_counted_on_a_gpu(tmp_path: Path) -> None:
    flags = ["--gpu", "h100", "--max-loras", "4", "--max-lora-rank", "10"]
    text, code = planned(tmp_path, LLAMA_8B, *flags, "--lora-dirs", str(tmp_path), lean=False)
    assert code == 0, text
    # Of rank 16: q, k, v and o, gate and up, down.
    ranks_in, ranks_out = 3 * 4096 + 4096 + 2 * 4096 + 14_336, 6144 + 4096 + 2 * 14_336 + 4096
    num_bytes = 4 * 16 * 32 * (ranks_in + ranks_out) * 2
    (line,) = [line for line in text.splitlines() if line.strip().startswith("adapters")]
    assert f"{num_bytes / GIB:.2f} GiB" in line and "4 places of rank 16" in line


@pytest.mark.parametrize("beside", [[], ["--kv-tier-memory-bytes", str(1 << 30)]])
def test_for_a_gpu_kv_memory_of_a_byte_is_suggested_where_it_is_not_refused(
    tmp_path: Path, beside: list[str]
) -> None:
    text, code = planned(tmp_path, LLAMA_8B, "--gpu", "h100", *beside)
    assert code == 0
    assert ("--kv-cache-dtype int8:" in text) == (not beside)


def test_a_plan_refuses_kv_memory_of_a_byte_where_a_worker_does(tmp_path: Path) -> None:
    text, code = planned(tmp_path, LLAMA_8B, "--gpu", "a100", "--kv-cache-dtype", "fp8")
    assert code == 2
    assert (
        "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9, and this one has 8.0" in text
    )


def test_a_plan_refuses_kv_memory_of_a_byte_where_torch_would_attend(tmp_path: Path) -> None:
    """Heads of 80, of which kernels of ours read a byte a number, and of 320, which they do not."""
    flags = ["--gpu", "h100", "--kv-cache-dtype", "int8"]
    text, code = planned(tmp_path, LLAMA_8B | {"head_dim": 80}, *flags, lean=False)
    assert code == 0, text
    text, code = planned(tmp_path, LLAMA_8B | {"head_dim": 320}, *flags, lean=False)
    assert code and "--kv-cache-dtype int8 works on a GPU where Penstock's kernels attend" in text
    assert "heads of 320" in text


def test_a_plan_names_the_engines_of_each_role_and_what_the_keeper_takes() -> None:
    config = Config()
    assert engines_with_roles(config) == []
    apart = replace(
        config,
        launch=replace(config.launch, prefill_engines=1, decode_engines=2),
        cache=replace(config.cache, kv_tier_memory_bytes=2 << 30),
    )
    (_, line) = engines_with_roles(apart)
    assert "Each of 3 engines" in line
    assert "prompts: engine 0; to go on with them: engines 1 to 2" in line
    assert "2.0 GiB" in line

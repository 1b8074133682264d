"""Settings that contradict each other give one message that names both; derived ones say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.config import Config, ConfigError, resolve
from penstock.protocol.config.checks import contradictions
from penstock.protocol.config.derive import derive
from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.config.machine import Machine, read_machine
from penstock.protocol.config.resolve import fields
from penstock.protocol.config.sources import Source
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.codec import MAX_PROMPT_BYTES

LAPTOP = Machine(cores=8, physical_cores=4, gpus=0)
SERVER = Machine(cores=64, physical_cores=32, gpus=1)
GROUPS = list(Config.__struct_fields__)

EAGLE3 = {"speculative": "eagle3", "speculative_model": "/h"}

CONTRADICTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"max_num_seqs": 100, "max_num_batched_tokens": 64},
     ("--max-num-seqs 100", "--max-num-batched-tokens 64")),
    ({"model_dirs": ["/no/such"]}, ("--model-dirs /no/such",)),
    ({"max_model_len": 1000, "num_kv_blocks": 10}, ("--max-model-len 1000", "--num-kv-blocks 10")),
    ({"num_kv_blocks": 10, "kv_cache_memory_bytes": 10**9},
     ("--num-kv-blocks 10", "--kv-cache-memory-bytes")),
    ({"gpu_memory_utilization": 0.5, "num_kv_blocks": 10, "device": "cuda"},
     ("--gpu-memory-utilization 0.5", "--num-kv-blocks 10")),
    ({"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 10**9, "device": "cuda"},
     ("--gpu-memory-utilization 0.5", "--kv-cache-memory-bytes")),
    ({"device": "cpu", "dtype": "float16"}, ("--device cpu", "--dtype float16")),
    ({"device": "cpu", "gpu_memory_utilization": 0.8},
     ("--gpu-memory-utilization 0.8", "--device cpu")),
    ({"device": "null", "gpu_memory_utilization": 0.8},
     ("--gpu-memory-utilization 0.8", "--device null")),
    ({"device": "cpu", "null_step_ms": 5}, ("--null-step-ms 5", "--device null")),
    ({"device": "null", "threads": 2}, ("--threads 2", "--device null")),
    ({"device": "null", "load_format": "dummy"}, ("--load-format dummy", "--device null")),
    ({"device": "null", "quantization": "int8"}, ("--quantization int8", "--device null")),
    ({"device": "cpu", "quantization": "fp8"}, ("--quantization fp8", "--device cpu", "int8")),
    ({"device": "null", "compress_weights": "never"}, ("--compress-weights", "--device null")),
    ({"device": "null", "kv_cache_dtype": "fp8"}, ("--kv-cache-dtype fp8", "--device null")),
    ({"device": "cpu", "compress_weights": "never"}, ("--compress-weights never", "--device cpu")),
    ({"device": "null", "kv_cache_memory_bytes": 10**9},
     ("--kv-cache-memory-bytes", "--device null")),
    ({"device": "cuda"}, ("--device cuda", "no CUDA device")),
    ({"lora": ["one"]}, ("--lora 'one'", "not NAME=FOLDER")),
    ({"lora": ["a=/a", "a=/b"]}, ("--lora 'a=/b'", "'a' is taken")),
    ({"lora": ["a=/a"], "served_model_name": ["a"]}, ("--lora 'a=/a'", "'a' is taken")),
    ({"lora": ["a=/a"], "served_model_name": ["org/a"]}, ("--lora 'a=/a'", "'a' is taken")),
    ({"lora": ["a=/a", "b=/b"], "max_loras": 1}, ("--lora is given 2 times", "--max-loras 1")),
    ({"lora": ["a=/a"], "max_cpu_loras": 7}, ("--max-cpu-loras 7 is less than --max-loras 8",)),
    ({"lora": ["a=/a"], "max_registered_loras": 7},
     ("--max-registered-loras 7 is less than --max-cpu-loras 8",)),
    ({"lora": ["a=/a"], "device": "cuda", "tensor_parallel_size": 2},
     ("--lora with --device cuda and 2 devices", "--data-parallel-size")),
    ({"lora": ["a=/a"], "device": "cuda", "speculative": "suffix"},
     ("--lora with --device cuda and --speculative suffix",)),
    ({"lora": ["a=/a"], "device": "null"}, ("--lora with --device null",)),
    ({"lora": ["a=/a"], "model_impl": "transformers"}, ("--lora with --model-impl",)),
    ({"lora": ["a=/a"], "task": "embed"}, ("--lora with --task",)),
    ({"threads": 99}, ("--threads 99", "8 cores")),
    ({"device": "cpu", "device_index": 1}, ("--device-index 1", "--device cpu")),
    ({"device": "null", "device_index": 1}, ("--device-index 1", "--device null")),
    ({"router": "ipc:///r.sock", "bind": "tcp://127.0.0.1"}, ("--bind", "--router ipc:///r.sock")),
    ({"router": "ipc:///r.sock", "advertise": "host"}, ("--advertise host", "--router ipc://")),
    ({"router": "ipc:///r.sock", "port_range": "20000-20099"},
     ("--port-range 20000-20099", "--router ipc://")),
    ({"grpc_host": "127.0.0.1"}, ("--grpc-host 127.0.0.1", "without --grpc-port")),
    ({"grpc_port": 8000}, ("--grpc-port 8000", "--port")),
    ({"grpc_port": 9000, "grpc_host": "0.0.0.0"}, ("--grpc-host 0.0.0.0", "--api-key")),
    ({"router": "http://x"}, ("--router http://x", "tcp://HOST:PORT")),
    ({"router": "tcp://r:1", "bind": "tcp://0.0.0.0"}, ("--bind tcp://0.0.0.0", "--secret")),
    ({"router": "tcp://r:1", "port_range": "9-5"}, ("--port-range 9-5", "FIRST-LAST")),
    ({"router": "tcp://r:1", "port_range": "20000-20001", "tokenizers": 3},
     ("--port-range 20000-20001", "--tokenizers 3")),
    ({"served_model_name": [" "]}, ("--served-model-name ' '", "printable")),
    ({"served_model_name": ["a\nb"]}, ("--served-model-name 'a\\nb'", "printable")),
    ({"host": "localhost:9000"}, ("--host localhost:9000", "--port 9000")),
    ({"served_model_name": ["a", "a"]}, ("--served-model-name a a", "twice")),
    ({"host": "0.0.0.0"}, ("--host 0.0.0.0", "--api-key", "--insecure")),
    ({"uds": "/run/s", "port": 9000}, ("--uds /run/s", "--port 9000")),
    ({"uds": "/run/s", "host": "127.0.0.2"}, ("--uds /run/s", "--host 127.0.0.2")),
    ({"uds": "/" + 107 * "s"}, ("--uds /s", "107 bytes")),
    ({"grpc_uds": "/run/g", "grpc_port": 9000}, ("--grpc-uds /run/g", "--grpc-port 9000")),
    ({"grpc_uds": "/run/g", "frontends": 2}, ("--grpc-uds /run/g", "--frontends is 2")),
    ({"uds_mode": "660"}, ("--uds-mode 660", "without --uds")),
    ({"trusted_proxies": ["unix"]}, ("--trusted-proxies unix", "without --uds")),
    ({"limits_url": "valkey://127.0.0.1"}, ("--limits-url", "--keys-file")),
    ({"host": "gpu.example.org"}, ("--host gpu.example.org", "--insecure")),
    ({"published_host": "0.0.0.0"}, ("--published-host 0.0.0.0", "--api-key", "--insecure")),
    ({"max_body_bytes": 2**26}, ("--max-body-bytes 67108864", str(MAX_PROMPT_BYTES))),
    ({"max_body_bytes": MAX_PROMPT_BYTES + 1}, ("--max-body-bytes", str(MAX_PROMPT_BYTES))),
    ({"allowed_origins": ["*"]}, ("--allowed-origins *", "http(s)://HOST[:PORT]")),
    ({"allowed_origins": ["https://a.b/c"]}, ("--allowed-origins https://a.b/c", "HOST")),
    ({"keep_alive_comment_s": 60, "request_timeout_s": 30},
     ("--keep-alive-comment-s 60", "--request-timeout-s 30")),
    ({"drain_timeout_s": 600, "request_timeout_s": 60},
     ("--drain-timeout-s 600", "--request-timeout-s 60")),
    ({"speculative": "suffix", "device": "null"},
     ("--speculative suffix", "--device null")),
    ({"speculative": "ngram", "device": "cpu", "speculative_history": 9},
     ("--speculative-history 9", "--speculative ngram")),
    ({"speculative": "off", "speculative_tokens": 3},
     ("--speculative-tokens 3", "--speculative off", "auto, suffix, ngram, eagle3 or draft-model")),
    ({"speculative": "eagle3", "device": "cpu"}, ("--speculative eagle3", "--speculative-model")),
    ({"speculative": "suffix", "speculative_model": "/h"},
     ("--speculative-model /h", "--speculative suffix", "--speculative eagle3")),
    ({**EAGLE3, "device": "cuda"}, ("--speculative eagle3", "--device cuda")),
    ({**EAGLE3, "device": "null"}, ("--speculative eagle3", "--device null")),
    ({**EAGLE3, "kv_tier_memory_bytes": 2**30}, ("--speculative eagle3", "--kv-tier-memory-bytes")),
    ({**EAGLE3, "speculative_history": 9}, ("--speculative-history 9", "--speculative eagle3")),
    ({"speculative_history": 9}, ("--speculative-history 9", "--speculative off")),
    ({"min_awake_s": 3}, ("--min-awake-s 3", "--resident")),
    ({"sleep_level": 1, "keep_alive": ["5m"], "device": "cpu"},
     ("--sleep-level 1", "--device cpu")),
    ({"sleep_level": 1, "keep_alive": ["5m"], "device": "cuda"},
     ("--sleep-level 1", "--hold-weights")),
    ({"hold_weights": True, "lora": ["a=/a"]}, ("--hold-weights and --lora", "adapters")),
    ({"hold_weights": True, "lora_dirs": ["/"]}, ("--hold-weights and --lora-dirs", "adapters")),
    ({"hold_weights": True, "device": "null"}, ("--hold-weights and --device null",)),
    ({"hold_weights": True, "device": "cpu", "tensor_parallel_size": 2},
     ("--hold-weights and --tensor-parallel-size 2", "on one device")),
    ({"hold_weights": True, "executor": "ray"}, ("--hold-weights and --executor ray",)),
    ({"hold_weights": True, "model_impl": "transformers"}, ("--hold-weights", "--model-impl")),
    ({"hold_weights": True, "router": "tcp://127.0.0.1:1"}, ("--hold-weights", "--router tcp:")),
    ({**EAGLE3, "hold_weights": True}, ("--hold-weights and --speculative eagle3",)),
    ({"keep_alive": ["10x"]}, ("--keep-alive 10x", "90s, 10m or 2h")),
    ({"keep_alive": ["10m"], "model_dirs": ["/"]}, ("--keep-alive 10m", "--model-dirs")),
    ({"keep_alive": ["10m"], "lora_dirs": ["/"]}, ("--keep-alive 10m", "--lora-dirs")),
    ({"keep_alive": ["1s"], "executor": "ray"}, ("--keep-alive 1s", "--executor ray")),
    ({"resident": 1, "lora": ["a=/a"]}, ("--resident 1", "--lora")),
    ({"data_parallel_size": 2, "engine": "b"}, ("--engine b", "--data-parallel-size 2")),
]  # fmt: skip


def faults_of(settings: dict[str, Any], machine: Machine = LAPTOP) -> list[str]:
    try:
        config, sources = resolve(GROUPS, settings, {})
    except ConfigError as error:
        return str(error).splitlines()
    config, sources = derive(config, sources, machine, None)
    return contradictions(config, sources, machine)


@pytest.mark.parametrize(
    ("settings", "names"), CONTRADICTIONS, ids=lambda v: "+".join(v) if isinstance(v, dict) else ""
)
def test_a_contradiction_is_one_line_that_names_both_sides(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    faults = faults_of(settings)
    assert len(faults) == 1, faults
    for name in names:
        assert name in faults[0]


@pytest.mark.parametrize("source", ["suffix", "ngram"])
def test_drafts_go_with_gpus_and_are_refused_by_name_for_divided_models(source: str) -> None:
    assert not faults_of({"speculative": source}, SERVER)
    divided = {"speculative": source, "device": "cpu", "tensor_parallel_size": 2}
    assert any("divided among 2 devices" in fault for fault in faults_of(divided))


def test_a_contradiction_says_which_side_no_flag_has_given(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("num_kv_blocks = 10\n")
    with pytest.raises(ConfigError) as error:
        resolve(
            GROUPS,
            {"config": str(file), "kv_cache_memory_bytes": "1g", "device": "null"},
            {"PENSTOCK_THREADS": "2"},
        )
    lines = str(error.value).splitlines()
    assert any(line.endswith("(--threads: environment PENSTOCK_THREADS)") for line in lines), lines
    assert any(line.endswith(f"(--num-kv-blocks: file {file})") for line in lines), lines


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(
            GROUPS,
            {"max_num_seqs": 100, "max_num_batched_tokens": 64, "device": "cpu",
             "dtype": "float16", "served_model_name": ["a", "a"]},
            {},
        )  # fmt: skip
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0", "api_key": ["k"]},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "0.0.0.0", "published_host": "127.0.0.1"},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "127.8.9.1"},
        {"allowed_origins": ["https://chat.example.org", "http://[::1]:3000"]},
    ],
)
def test_an_open_address_needs_a_key_or_the_word_for_none(settings: dict[str, Any]) -> None:
    assert faults_of(settings) == []


@pytest.mark.parametrize(
    ("devices", "engines", "first", "names"),
    [
        (1, 2, 0, ("--data-parallel-size 2", "1 CUDA device;", "use --data-parallel-size 1")),
        (4, 5, 0, ("--data-parallel-size 5", "4 CUDA devices;", "use --data-parallel-size 4")),
        (4, 3, 2, ("--data-parallel-size 3", "--device-index 2", "use --data-parallel-size 2")),
        (2, 1, 2, ("--device-index 2", "2 CUDA devices", "counted from 0")),
    ],
)
def test_more_engines_than_cuda_devices_are_refused_with_both_numbers(
    devices: int, engines: int, first: int, names: tuple[str, ...]
) -> None:
    settings = {"device": "cuda", "data_parallel_size": engines, "device_index": first}
    (fault,) = faults_of(settings, msgspec.structs.replace(SERVER, gpus=devices))
    assert [name for name in names if name not in fault] == [], fault


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tensor_parallel_size": 8}, ("--tensor-parallel-size 8", "4 CUDA devices")),
        ({"pipeline_parallel_size": 3, "device_index": 2}, ("need 3", "--device-index 2 on")),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 3},
            ("3 engines, each on 2 CUDA devices", "use --data-parallel-size 2"),
        ),
    ],
)
def test_engines_of_more_devices_than_there_are_are_refused_with_both_numbers(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    four = msgspec.structs.replace(SERVER, gpus=4)
    (fault,) = faults_of({"device": "cuda", **settings}, four)
    assert [name for name in names if name not in fault] == [], fault


def test_each_rank_of_a_divided_engine_may_have_any_device_that_there_is() -> None:
    two = msgspec.structs.replace(SERVER, gpus=2)
    divided = {"device": "cuda", "tensor_parallel_size": 2}
    for rank in range(2):
        assert faults_of({**divided, "rank": rank, "device_index": rank}, two) == []
    (fault,) = faults_of({**divided, "rank": 1, "device_index": 2}, two)
    assert "--device-index 2" in fault and "2 CUDA devices" in fault


def test_a_model_is_divided_only_by_sizes_that_work(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "little", num_heads=8, num_kv_heads=2, hidden_size=64)
    info = read_model_info(folder)

    def faults(**sizes: int) -> list[str]:
        config, sources = resolve(GROUPS, {"model": str(folder), "device": "cpu", **sizes}, {})
        return contradictions(config, sources, LAPTOP, info)

    assert faults(tensor_parallel_size=8, pipeline_parallel_size=2) == []
    (fault,) = faults(tensor_parallel_size=3)
    assert "8 attention heads, 2 KV heads" in fault and "sizes that work: 1, 2, 4, 8" in fault
    (fault,) = faults(pipeline_parallel_size=3)
    assert "the model has 2 layers" in fault


def test_as_many_engines_as_devices_and_any_number_on_the_cpu_are_fine() -> None:
    eight = msgspec.structs.replace(SERVER, gpus=8)
    assert faults_of({"device": "cuda", "data_parallel_size": 8}, eight) == []
    assert faults_of({"device": "cuda", "data_parallel_size": 6, "device_index": 2}, eight) == []
    assert faults_of({"device": "cpu", "data_parallel_size": 16}, LAPTOP) == []


@pytest.mark.parametrize("machine", [LAPTOP, SERVER])
def test_the_defaults_contradict_nothing(machine: Machine) -> None:
    assert faults_of({}, machine) == []


def test_what_is_left_out_is_derived_with_a_reason(tmp_path: Path) -> None:
    info = read_model_info(make_model(tmp_path / "little", dtype="bfloat16"))
    config, sources = resolve(GROUPS, {}, {})
    config, sources = derive(config, sources, SERVER, info)
    assert config.device.device == "cuda"
    assert config.model.dtype == "bfloat16"
    assert config.model.served_model_name == ["little"]
    assert config.scheduler.max_num_seqs == 256
    assert config.launch.frontends == 4
    for name in ("device", "dtype", "served_model_name", "max_num_seqs", "frontends"):
        assert sources[name].origin == "derived"
        assert sources[name].detail


def test_what_was_said_is_never_replaced(tmp_path: Path) -> None:
    info = read_model_info(make_model(tmp_path / "little", dtype="bfloat16"))
    said = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "frontends": 2, "threads": 1}
    config, sources = resolve(GROUPS, said, {})
    config, sources = derive(config, sources, SERVER, info)
    for name, value in said.items():
        group = fields()[name].group
        assert getattr(getattr(config, group), name) == value
        assert sources[name] == Source("flag", fields()[name].flag)


def test_a_length_past_the_models_own_names_the_model(tmp_path: Path) -> None:
    info = read_model_info(make_model(tmp_path / "little", max_position_embeddings=256))
    config, sources = resolve(GROUPS, {"max_model_len": 300}, {})
    (fault,) = contradictions(config, sources, LAPTOP, info)
    assert "--max-model-len 300" in fault
    assert "256" in fault
    assert str(info.folder) in fault


def test_the_machine_is_read_from_its_files(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(siblings + "\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    machine = read_machine(tmp_path)
    assert machine.gpus == 2
    for shown, count in (
        ("0,1", 2), ("1", 1), ("1, 0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,7", 1),
        ("GPU-8932f937-d72c", 1), ("MIG-1a,MIG-1b,MIG-1c", 3),
    ):  # fmt: skip
        found = read_machine(tmp_path, {"CUDA_VISIBLE_DEVICES": shown})
        assert (shown, found.gpus) == (shown, count)
    assert machine.physical_cores == min(2, machine.cores)


def test_a_cpu_that_is_slow_in_bfloat16_computes_in_float32_where_that_fits(tmp_path: Path) -> None:
    info = read_model_info(make_model(tmp_path / "little", dtype="bfloat16"))
    slow = msgspec.structs.replace(LAPTOP, multiplies_bf16=False, free_bytes=2**30)
    for machine, given, expected in (
        (slow, {}, "float32"),
        (slow, {"dtype": "bfloat16"}, "bfloat16"),
        (slow, {"device": "cuda"}, "bfloat16"),
        (msgspec.structs.replace(slow, free_bytes=1000), {}, "bfloat16"),
    ):
        config, sources = resolve(GROUPS, given, {})
        config, sources = derive(config, sources, machine, info)
        assert config.model.dtype == expected
        if expected == "float32":
            assert "config.json says bfloat16" in sources["dtype"].detail


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx avx2 fma\n", False),
        ("flags\t\t: fpu avx avx2 avx512f avx512bw avx512dq avx512vl\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("processor\t: 0\n", True),
        (None, True),
    ],
)
def test_the_processor_tells_whether_it_multiplies_bfloat16(
    text: str | None, expected: bool, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\n" + text)
    assert read_machine(tmp_path).multiplies_bf16 is expected


def test_a_model_group_alone_resolves_to_its_defaults() -> None:
    config, _ = resolve(["model"], {}, {})
    assert config.model == ModelConfig()

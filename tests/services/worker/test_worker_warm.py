"""``penstock warm``: what it leaves in Triton's cache is what a launch finds there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from penstock.kernels.gpu.device_facts import facts_of
from penstock.services import cli
from penstock.services.worker.ahead_compilation import Compilation
from penstock.services.worker.gpus import gpu_named
from penstock.services.worker.kernel_needs import KernelNeeds, kernel_needs
from penstock.services.worker.plan import device_of

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
FLAGS = "--load-format", "dummy", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"
LAUNCH = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from penstock.kernels.gpu.device_facts import facts_of, pretend
pretend(facts_of((8, 9)))
from penstock.kernels.gpu.cache_keys import make_keys_stable
from penstock.kernels.gpu.draw import draw
from penstock.kernels.gpu.norm import rms_norm
make_keys_stable()
class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 89, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
triton.runtime.driver.set_active(Driver)
run = JITFunction.run
JITFunction.run = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)
hits = []
triton.knobs.compilation.listener = lambda cache_hit, **rest: hits.append(cache_hit)
x = torch.zeros(4, 64, dtype=torch.bfloat16)
rms_norm(x, x[0], 1e-6, torch.empty_like(x))
assert hits == [True], hits
"""
"""A launch as in a worker, up to the compiled kernel: real tensors, nothing recorded."""


def environment(cache: Path) -> dict[str, str]:
    rest = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return rest | {"TRITON_CACHE_DIR": str(cache)}


def warm(folder: Path, cache: Path) -> subprocess.Popen[str]:
    flags = [*FLAGS, "--gpu", "4090"]
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.services", "warm", str(folder), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(cache),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    return tmp_path / "tiny"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_launches_find_what_was_compiled_once_for_a_gpu_that_is_not_there(
    folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    cache = tmp_path / "cache"
    both = [warm(folder, cache), warm(folder, cache)]  # as two engines of a server
    said = [process.communicate(timeout=500)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    first, second = sorted(said, key=lambda text: "  0 kernels compiled" in text)
    assert " 0 found" in first
    assert "  0 kernels compiled" in second
    assert "RTX 4090 (compute capability 8.9)" in first
    assert "decode attention by the Triton kernel" in first
    subprocess.run([sys.executable, "-c", LAUNCH], env=environment(cache), check=True, timeout=100)
    moved = cache.rename(tmp_path / "copy")
    again = warm(folder, moved)
    text, _ = again.communicate(timeout=500)
    assert again.returncode == 0, text
    assert "  0 kernels compiled" in text
    subprocess.run([sys.executable, "-c", LAUNCH], env=environment(moved), check=True, timeout=100)


LIST = """
import sys
import msgspec
from penstock.kernels.gpu.device_facts import pretend
from penstock.services.worker.kernel_needs import KernelNeeds
needs = msgspec.json.decode(sys.stdin.read(), type=KernelNeeds)
pretend(needs.device)
from penstock.services.worker.gpu.needed_kernels import recorder_for
recorder, summary = recorder_for(needs)
print(summary)
print(*{one.name for one in recorder.recorded})
"""


@pytest.mark.slow
@pytest.mark.parametrize("modelling_code", [False, True])
def test_attention_and_sampler_are_compiled_for_a_model_whose_layers_others_compute(
    modelling_code: bool, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    olmo = TINY | {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(olmo))
    wanted = needs(folder, "4090")
    assert wanted.attention is not None
    wanted = replace(wanted, attention=replace(wanted.attention, modelling_code=modelling_code))
    done = subprocess.run(
        [sys.executable, "-c", LIST], input=msgspec.json.encode(wanted).decode(),
        capture_output=True, text=True, timeout=100, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary, names = done.stdout.splitlines()
    assert "decode attention by the Triton kernel" in summary
    ours = {"_decode_kernel", "_prefill_kernel", "_best_kernel", "_pack_heads_kernel"}
    others = {"_rms_norm_kernel", "_rotate_heads_kernel"}
    assert ours <= set(names.split())
    assert (others <= set(names.split())) == modelling_code


def needs(folder: Path, gpu: str) -> KernelNeeds:
    from penstock.protocol.config import Config, ModelConfig
    from penstock.protocol.model_info import read_model_info

    config = Config(model=ModelConfig(model=str(folder), dtype="bfloat16"))
    card = gpu_named(gpu)
    found = kernel_needs(
        config, read_model_info(folder), device_of(card), facts_of(card.capability)
    )
    assert isinstance(found, KernelNeeds)
    return found


@pytest.mark.slow
def test_processes_that_compile_end_with_whoever_began_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compilation = Compilation(needs(folder, "h100"), 2)
    lead = next(one for one in psutil.Process().children() if "kernel_comp" in str(one.cmdline()))
    deadline = time.monotonic() + 60
    while len(children := lead.children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    compilation.stop()
    gone, alive = psutil.wait_procs([lead, *children], timeout=10)
    assert not alive and len(gone) == 3


def test_warm_refuses_what_it_cannot_compile_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, words in (
        (["--device", "cpu"], "has no kernels that are compiled ahead"),
        (["--device", "null"], "nothing to compile"),
        (["--gpu", "h1000"], "known are"),
        *[([], "name one, as in --gpu h100")] * (not torch.cuda.is_available()),
    ):
        assert cli.main(["warm", str(folder), *flags]) == cli.BAD_SETTINGS
        assert words in capsys.readouterr().err
    assert cli.main(["warm", str(folder / "nothing"), "--gpu", "h100"]) == cli.BAD_MODEL

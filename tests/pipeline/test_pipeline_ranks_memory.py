"""An engine of two ranks of which one is lost: their memory is free before others take its place.

On a GPU both ranks share one device, of which each fills more than a third: three of them would not
fit. NCCL connects no two ranks on one device, unless it takes them for those of two hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, find, whole_again
from support.pipeline.served import Served, served

from penstock.loadtest.models.make_model import make_model

pytestmark = pytest.mark.timeout(600)

STREAMS = requests(8, seed=17, prompt_tokens=20, max_tokens=120, vocabulary=256, streamed=True)
SHARE = 0.36
"""Of a GPU's memory, for the KV memory of a rank."""
FLAGS = ("--dtype", "float32", "--max-num-seqs", "16")
ON_CPU = ("--device", "cpu", "--num-kv-blocks", "200", "--max-model-len", "512")
ON_GPU = ("--device", "cuda", "--max-model-len", "131072")
"""As many sequences of that length have a use for so much KV memory."""
HOST_OF_ITS_OWN = 'import os\n\nos.environ["NCCL_HOSTID"] = f"process {os.getpid()}"\n'
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
LOOK_SECONDS = 0.05


class Shared(NamedTuple):
    """A server whose two ranks share a device."""

    server: Served
    used: Callable[[], int]
    """Bytes of the device's memory that are in use; on a CPU, what the ranks hold."""
    texts: list[Followed]
    """What its clients see where nothing happens."""


class Watch:
    """The least and the most memory in use while it looks."""

    def __init__(self, used: Callable[[], int]) -> None:
        self.before = self.lowest = self.highest = used()
        self._used = used
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            used = self._used()
            self.lowest, self.highest = min(self.lowest, used), max(self.highest, used)

    def __str__(self) -> str:
        names = ("before", "lowest", "highest")
        return ", ".join(f"{name} {getattr(self, name) / 2**20:,.0f} MiB" for name in names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(
        tmp_path_factory.mktemp("models") / "divided", hidden_size=64, num_layers=4, num_heads=8,
        num_kv_heads=8, head_dim=128, max_position_embeddings=131072,
    )  # fmt: skip
    return made


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], name="device"
)
def _device(request: pytest.FixtureRequest) -> str:
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def shared(
    request: pytest.FixtureRequest,
    device: str,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shared]:
    flags = [*FLAGS, f"--{request.param}-parallel-size=2", str(folder)]
    environment: dict[str, str] = {}
    if device == "cpu":
        flags += ON_CPU
    else:
        import torch

        total = torch.cuda.mem_get_info()[1]
        flags += [*ON_GPU, f"--kv-cache-memory-bytes={int(SHARE * total)}"]
        environment = on_one_gpu(tmp_path_factory.mktemp("site"))
    with served(*flags, environment=environment) as server:
        texts = asyncio.run(undisturbed(server.url, STREAMS))
        assert all(one.done and one.completion_tokens == 120 for one in texts)
        yield Shared(server, of_gpu if device == "cuda" else lambda: of_ranks(server), texts)


def on_one_gpu(site: Path) -> dict[str, str]:
    """The environment of a server whose ranks all see the same device. site: an empty folder."""
    (site / "sitecustomize.py").write_text(HOST_OF_ITS_OWN)
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"CUDA_VISIBLE_DEVICES": f"{device},{device}", "PYTHONPATH": ":".join(path), **NCCL}


def of_gpu() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def of_ranks(server: Served) -> int:
    found = 0
    for process in server.processes().values():
        with contextlib.suppress(psutil.Error):
            if server.role_of(process) == "worker":
                found += process.memory_info().rss
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_memory_of_both_ranks_is_free_before_others_load(
    shared: Shared, fault: signal.Signals
) -> None:
    server = shared.server
    engine = [find(server, "worker", rank) for rank in range(2)]
    count, restarts, struck = len(children(server)), server.output.count("starting it again"), 0.0

    async def with_a_fault() -> list[Followed]:
        nonlocal struck
        async with Crowd(server.url, STREAMS) as crowd:
            await crowd.until(5)
            assert not any(one.done for one in crowd.followed), "too late"
            struck = time.monotonic()
            os.kill(engine[1].pid, fault)
            return await crowd.ends()

    with Watch(shared.used) as watch:
        followed = asyncio.run(with_a_fault())
        recovery = whole_again(server, engine, count, struck, within=180)
    pause = max(one.longest_pause(struck) for one in followed)
    print(f"{watch}; longest pause {pause:.1f} s, both back after {recovery:.1f} s")
    assert [one.verdict() for one in followed] == [one.verdict() for one in shared.texts]
    assert watch.lowest < watch.before / 2, "all of it was free"
    assert watch.highest < 1.1 * watch.before, "no third one was there meanwhile"
    assert server.output.count("starting it again") == restarts + 2, "the others loaded at once"

"""Ranks on GPUs. Here their kernels run in Triton's interpreter, one rank at a time, and what they
exchange goes by gloo: the same code but for graphs, streams and NCCL."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.quantized_folders import WRITERS, write_twins
from support.worker.ranks_in_threads import CPU, Ranks, ThreadsMeeting
from support.worker.shared_draws import LIMITED, WRITTEN
from support.worker.tiny_models import generated, some_prompts
from torch import Tensor

from penstock.kernels import all_reduce as reference
from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.compiler import make_tokenizer as make_vocabulary
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    SlotSampling,
    StepPlan,
    StepResult,
)
from penstock.services.worker.gpu import device_ranks, layer_products
from penstock.services.worker.gpu.device_ranks import DeviceRanks, RankLost
from penstock.services.worker.gpu.nccl import MULTICAST, UNIQUE_ID_BYTES, Communicator, NcclError
from penstock.services.worker.gpu.rank_decoder import RankGpuExecutor
from penstock.services.worker.gpu.rank_executor import rank_executor
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.models.rank_shares import RankPlace, place_of
from penstock.services.worker.rank_group import HostRanks, connected

Folder = Callable[[str], Path]
Logprobs = dict[Any, PackedLogprobs]
VOCABULARY = make_vocabulary(make_tokenizer(307).to_str(), 307, [2])
TOKENS = 1
"""Tag of what the last stage tells the first."""
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where no GPU is"
)


class TurnRanks(HostRanks):
    """Lets the other ranks compute while this one waits for them: the interpreter knows one thread
    at a time."""

    def __init__(self, place: RankPlace, vocab_size: int, turn: threading.Lock) -> None:
        super().__init__(place, vocab_size)
        self._turn = turn
        self._sent: list[tuple[Any, Tensor]] = []

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def sum(self, x: Tensor) -> Tensor:
        with self._waiting():
            return super().sum(x)

    def gather(self, x: Tensor) -> Tensor:
        with self._waiting():
            return super().gather(x)

    def from_first(self, x: Tensor) -> Tensor:
        with self._waiting():
            return super().from_first(x)

    def columns(self, x: Tensor) -> Tensor:
        with self._waiting():
            return super().columns(x)

    def send_tokens(self, tokens: Tensor) -> None:
        sent = tokens.clone()
        first = self.place.rank_at(0, self.place.share)
        self._sent.append((self._all.send([sent], first, TOKENS), sent))

    def receive_tokens(self, tokens: Tensor, free: Any) -> Callable[[], None]:
        last = self.place.rank_at(self.place.stages - 1, self.place.share)
        coming = self._all.recv([tokens], last, TOKENS)

        def wait() -> None:
            with self._waiting():
                coming.wait()

        return wait

    def hand_on(self, x: Tensor) -> None:
        super().hand_on(x.clone())  # memory of the step, which on a GPU the stream would guard

    def take(self, x: Tensor) -> Tensor:
        with self._waiting():
            return super().take(x)

    def check(self) -> None:
        pass


class SharingRanks(TurnRanks):
    """Sum with what is behind in one call, as ranks with peer memory do."""

    def shared_rows(self, x: Tensor) -> Any:
        return self


def sum_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    ranks: SharingRanks,
    x_weight: Tensor | None,
) -> None:
    """In the place of the kernel, which waits for other ranks."""
    parts = [ranks.sum(x)]
    reference.all_reduce_add_norm(parts, residual, weight, eps, out, x_weight)


class InTurn:
    """An executor whose steps run while no other one's does."""

    def __init__(self, executor: RankGpuExecutor, turn: threading.Lock) -> None:
        self._executor, self._turn = executor, turn
        self.capacity = executor.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        with self._turn:
            return self._executor.execute(plan)


def made(
    folder: Path,
    rank: int,
    tensor: int,
    pipeline: int,
    turn: threading.Lock,
    kind: type[TurnRanks] = TurnRanks,
) -> Any:
    """A rank's executor, and its ranks."""
    info = read_model_info(folder)
    ranks = kind(place_of(rank, tensor, pipeline), info.vocab_size, turn)
    model = load_model(info, torch.float32, CPU, lambda note: None, longest=256, ranks=ranks)
    assert isinstance(model, RankDecoder)
    form = dense_config(model.specification)
    assert isinstance(form, DenseConfig), form
    sizes = EngineSizes(
        80, 16, 8, 48, 256, info.vocab_size, groups=model.grouped.groups, micro_batches=pipeline
    )
    config, weights = dense_model(model.own_vocabulary(form), model.specification, model.weights)
    with turn:
        return rank_executor(config, weights, sizes, ranks, model.grouped), ranks


def drawn_by_ranks(
    folder: Path,
    tensor: int,
    pipeline: int,
    prompts: list[list[int]],
    kind: type[TurnRanks] = TurnRanks,
    samplings: Sequence[SlotSampling] = (),
    logprobs: Logprobs | None = None,
) -> list[list[int]]:
    """Two tokens of each prompt, three of what is sampled. logprobs: is filled."""
    turn = threading.Lock()
    with ExitStack() as stack:
        count = tensor * pipeline
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(count)]
        pairs = [made(folder, rank, tensor, pipeline, turn, kind) for rank in range(count)]
        meeting = ThreadsMeeting()
        met = [
            thread.submit(ranks.meet, meeting)
            for thread, (_, ranks) in zip(threads, pairs, strict=True)
        ]
        for one in met:
            one.result()
        for executor, _ in pairs:
            executor.grammars.serve(lambda: VOCABULARY, patience=30.0)
        executors: Any = [InTurn(executor, turn) for executor, _ in pairs]
        return asked_of(PlanDriver(Ranks(executors, threads), 1), prompts, samplings, logprobs)


def asked_of(
    driver: PlanDriver,
    prompts: list[list[int]],
    samplings: Sequence[SlotSampling],
    logprobs: Logprobs | None,
) -> list[list[int]]:
    if not samplings:
        return driver.run(prompts, 2)
    found = driver.run(prompts, 3, samplings=list(samplings), preemptions=1, prompt_logprobs=1)
    if logprobs is not None:
        logprobs |= driver.logprobs
        logprobs |= {("prompt", key): one for key, one in driver.prompt_logprobs.items()}
    return found


@interpreted
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("variant", "tensor", "pipeline"),
    [
        ("qwen3", 2, 1),
        pytest.param("qwen3", 2, 2, marks=pytest.mark.slow),
        pytest.param("llama3", 4, 1, marks=pytest.mark.slow),
        pytest.param("gemma2", 2, 1, marks=pytest.mark.slow),
        ("gemma2", 1, 2),
    ],
)
def test_ranks_on_gpus_give_the_tokens_of_one_worker(
    variant: str, tensor: int, pipeline: int, tiny_folder: Folder
) -> None:
    prompts = some_prompts([1, 20])
    got = drawn_by_ranks(tiny_folder(variant), tensor, pipeline, prompts)
    assert got == generated(variant, prompts, 2)


@interpreted
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("tensor", "pipeline", "samplings"),
    [
        pytest.param(2, 1, LIMITED, id="limits"),
        pytest.param(2, 1, WRITTEN, id="written"),
        pytest.param(4, 1, LIMITED, id="limits-of-four", marks=pytest.mark.slow),
        pytest.param(2, 2, WRITTEN, id="written-in-stages", marks=pytest.mark.slow),
    ],
)
def test_ranks_on_gpus_draw_what_rows_ask_for(
    tensor: int, pipeline: int, samplings: list[SlotSampling], tiny_folder: Folder
) -> None:
    folder, prompts = tiny_folder("qwen3"), some_prompts([5, 9, 2, 7, 3, 6, 4, 8])
    info = read_model_info(folder)
    model = load_model(info, torch.float32, CPU, lambda note: None)
    alone = ModelExecutor(model, EngineSizes(80, 16, 8, 48, 256, info.vocab_size))
    alone.grammars.serve(lambda: VOCABULARY, patience=30.0)
    theirs: Logprobs = {}
    ours: Logprobs = {}
    wanted = asked_of(PlanDriver(alone, 1), prompts, samplings, theirs)
    got = drawn_by_ranks(folder, tensor, pipeline, prompts, TurnRanks, samplings, ours)
    assert got == wanted
    assert ours.keys() == theirs.keys()
    for key, one in ours.items():
        first, second = (np.frombuffer(each.entries, "<f4") for each in (one, theirs[key]))
        np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-4)


@interpreted
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("variant", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_sum_over_peer_memory_has_the_residual_stream_and_the_norm_behind_it(
    variant: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_products, "all_reduce_add_norm", sum_add_norm)
    prompts = some_prompts([1, 20])
    got = drawn_by_ranks(tiny_folder(variant), 2, 1, prompts, SharingRanks)
    assert got == generated(variant, prompts, 2)


@interpreted
@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_ranks_on_gpus_multiply_their_parts_of_quantized_weights(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    twins = write_twins(tiny_folder("llama3-wide"), tmp_path, WRITERS["gptq-4"])
    prompts, info = some_prompts([1, 20]), read_model_info(twins.plain)
    plain = load_model(info, torch.float32, CPU, lambda note: None)
    sizes = EngineSizes(80, 16, 8, 48, 256, info.vocab_size)
    wanted = PlanDriver(ModelExecutor(plain, sizes), 1).run(prompts, 2)
    assert drawn_by_ranks(twins.quantized, 2, 1, prompts) == wanted


class FakeNccl:
    """Notes what it is called with."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._code = code

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == "ncclGetErrorString":
                return b"remote process exited"
            self.calls.append((name, arguments))
            if name == "ncclCommInitRank":
                arguments[0]._obj.value = 77
            return self._code

        return call


def test_collectives_are_given_pointers_counts_types_and_the_communicator() -> None:
    library, told = FakeNccl(), bytes(range(UNIQUE_ID_BYTES))
    group = Communicator(1, 4, lambda unique: told, library)
    (name, (_, size, unique, rank)) = library.calls.pop()
    assert (name, size, bytes(unique), rank) == ("ncclCommInitRank", 4, told, 1)
    x, out = torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(4, 3, 5, dtype=torch.bfloat16)
    group.sum(x)
    group.gather(x, out)
    group.broadcast(torch.zeros(2, dtype=torch.int32))
    group.send(x, 2)
    group.receive(x, 3)
    plain = [
        (name, [getattr(argument, "value", argument) for argument in arguments])
        for name, arguments in library.calls
    ]
    at, to = x.data_ptr(), out.data_ptr()
    assert plain[0] == ("ncclAllReduce", [at, at, 15, 9, 0, 77, None])
    assert plain[1] == ("ncclAllGather", [at, to, 15, 9, 77, None])
    assert (plain[2][0], plain[2][1][2:]) == ("ncclBroadcast", [2, 2, 0, 77, None])
    assert plain[3] == ("ncclSend", [at, 15, 9, 2, 77, None])
    assert plain[4] == ("ncclRecv", [at, 15, 9, 3, 77, None])
    group.abort()
    group.abort()
    assert [name for name, _ in library.calls].count("ncclCommAbort") == 1


def test_an_error_of_nccl_says_what_was_called_and_by_whom() -> None:
    with pytest.raises(NcclError, match=r"ncclCommInitRank: remote process exited \(rank 1 of 2"):
        Communicator(1, 2, lambda unique: bytes(UNIQUE_ID_BYTES), FakeNccl(6))


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("1", "1")])
def test_nccl_uses_nvlink_multicast_only_where_the_user_says_so(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MULTICAST, given or "")
    if given is None:
        monkeypatch.delenv(MULTICAST)
    seen = list[str]()

    class WatchedNccl(FakeNccl):
        def __getattr__(self, name: str) -> Any:
            seen.append(os.environ[MULTICAST])
            return super().__getattr__(name)

    Communicator(0, 2, lambda unique: bytes(UNIQUE_ID_BYTES), WatchedNccl())
    assert set(seen) == {found}


def test_a_collective_takes_no_tensor_with_gaps() -> None:
    group = Communicator(1, 2, lambda unique: bytes(UNIQUE_ID_BYTES), FakeNccl())
    with pytest.raises(ValueError, match="contiguous"):
        group.sum(torch.zeros(4, 4)[:, :2])


def test_ranks_that_nccl_does_not_connect_are_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(device_ranks, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(device_ranks, "communicator", lambda *given: may_end.wait(60))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    try:
        with pytest.raises(RuntimeError, match="NCCL has not connected the ranks within 0 s"):
            DeviceRanks(place_of(0, 1, 1), 100).meet(ThreadsMeeting())
    finally:
        may_end.set()


def test_a_rank_learns_that_its_neighbour_is_gone_and_ends_what_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[str] = []
    is_connected = threading.Event()

    def connected_and_told(*given: Any) -> Any:
        group = connected(*given)
        is_connected.set()
        return group

    monkeypatch.setattr(device_ranks, "connected", connected_and_told)
    ranks, meeting = DeviceRanks(place_of(0, 2, 1), 100), ThreadsMeeting()
    ranks._all = cast(Communicator, SimpleNamespace(abort=lambda: aborted.append("all")))
    ranks._stage = cast(Communicator, SimpleNamespace(abort=lambda: aborted.append("stage")))
    with ThreadPoolExecutor(2) as threads:
        watching = threads.submit(ranks._watch, meeting)
        neighbour = [connected("watch", meeting, 1, range(2), timedelta(seconds=60))]
        ranks.check()
        assert is_connected.wait(60)  # who goes while others still connect is missed much later
        assert not watching.done()
        neighbour.clear()  # as the end of its process does, this closes its connections
        gc.collect()
        watching.result(60)
    assert sorted(aborted) == ["all", "stage"]
    with pytest.raises(RankLost, match="rank 1 is gone"):
        ranks.check()

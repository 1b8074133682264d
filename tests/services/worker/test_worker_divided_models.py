"""A model that is divided among ranks gives the tokens that it gives on one worker."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.pooled_prompts import pooled
from support.worker.quantized_folders import WRITERS, Writer, write_twins
from support.worker.ranks_in_threads import ThreadsMeeting, ranks_of
from support.worker.sampler_slots import EVERY_SAMPLER
from support.worker.tiny_models import some_prompts

from penstock.protocol.config import ClusterConfig, Config, ConfigError, ModelConfig
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    SlotAdjustments,
    SlotSampling,
    StepPlan,
)
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import Hidden, ModelExecutor
from penstock.services.worker.model_weights import load_model, random_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.rank_shares import place_of, why_not
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.models.weights import named_tensors
from penstock.services.worker.pooling import floats
from penstock.services.worker.prompt_sums import PromptSums
from penstock.services.worker.rank_choice import check_division
from penstock.services.worker.rank_group import HostRanks
from penstock.services.worker.slots import PlannedStep

Folder = Callable[[str], Path]
LAYOUTS = [
    # Variant of tiny_models, tensor, pipeline
    ("llama-tied-biases", 2, 1),
]
OTHERS = [
    ("llama3", 4, 1),  # two KV heads, each on two ranks
    ("qwen3", 2, 2),
    ("gemma2", 1, 2),
    ("llama3", 2, 1),
    ("qwen2-tied", 4, 1),  # one KV head
    ("qwen3-biased", 1, 2),
    ("gemma2", 2, 1),
    ("gemma2", 2, 2),
    ("gemma3", 2, 3),  # seven layers: 3, 2, 2
    ("phi3", 2, 1),  # stored in one piece: queries, keys, values; gate, up
    ("mistral", 2, 1),
    ("granite", 2, 1),
    ("smollm3", 1, 4),
    ("glm", 2, 1),  # neighbouring pairs are rotated
    ("glm4", 2, 2),
    ("starcoder2", 2, 1),  # biases behind the sums
    ("exaone4", 2, 2),
    ("cohere", 2, 1),  # norms with a weight for each head
    ("cohere2", 1, 3),
    ("olmo2", 1, 2),
    ("granite-swa", 1, 3),
]
SEEDED = SlotSampling(0.8, 40, 0.95, 11, 0.02)
PENALISED = SlotSampling(
    0.7, 0, 1.0, 5, adjustments=SlotAdjustments(repetition=1.2, frequency=0.3, presence=0.1),
    logprobs=3,
)  # fmt: skip
SAMPLINGS = [GREEDY, SEEDED, PENALISED, SlotSampling(0.0, 0, 1.0, 0, logprobs=2)]


def alone(folder: Path, sizes: EngineSizes) -> ModelExecutor:
    model = load_model(
        read_model_info(folder), torch.float32, torch.device("cpu"), lambda note: None
    )
    return ModelExecutor(model, sizes)


def sizes_for(folder: Path) -> EngineSizes:
    info = read_model_info(folder)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    groups = group_layers(model.caches).groups
    return EngineSizes(400, 8, 4, 96, 256, info.vocab_size, groups=groups)


def outputs(executor: Any) -> tuple[list[list[int]], PlanDriver]:
    """Greedy, seeded, penalised, with logprobs of prompts and outputs, in chunks, preempted."""
    driver = PlanDriver(executor, 3)
    got = driver.run(
        some_prompts([1, 40, 17, 70]), 12, samplings=SAMPLINGS, chunk=24, preemptions=3,
        prompt_logprobs=2,
    )  # fmt: skip
    return got, driver


def check_alike(ours: dict[Any, PackedLogprobs], theirs: dict[Any, PackedLogprobs]) -> None:
    assert ours.keys() == theirs.keys()
    for key, one in ours.items():
        first, second = (np.frombuffer(each.entries, "<f4") for each in (one, theirs[key]))
        np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "tensor", "pipeline"),
    [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)],
)
def test_ranks_give_the_tokens_and_logprobs_of_one_worker(
    variant: str, tensor: int, pipeline: int, tiny_folder: Folder
) -> None:
    folder = tiny_folder(variant)
    sizes = sizes_for(folder)
    expected, of_one = outputs(alone(folder, sizes))
    sizes = replace(sizes, micro_batches=pipeline)
    with ranks_of(folder, tensor, pipeline, sizes) as ranks:
        got, of_all = outputs(ranks)
    assert got == expected
    check_alike(of_all.logprobs, of_one.logprobs)
    check_alike(of_all.prompt_logprobs, of_one.prompt_logprobs)


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)]
)
def test_ranks_draw_by_every_sampler_as_one_worker_does(
    tensor: int, pipeline: int, tiny_folder: Folder
) -> None:
    folder = tiny_folder("qwen3")
    sizes = replace(sizes_for(folder), micro_batches=pipeline)
    prompts = some_prompts([9, 4, 12, 7, 5, 6, 8, 3, 10])

    def drawn(executor: Any) -> list[list[int]]:
        return PlanDriver(executor, 4).run(prompts, 12, samplings=EVERY_SAMPLER, preemptions=5)

    expected = drawn(alone(folder, replace(sizes, micro_batches=1)))
    with ranks_of(folder, tensor, pipeline, sizes) as ranks:
        assert drawn(ranks) == expected


def test_random_weights_are_those_of_one_worker(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    info, cpu = read_model_info(folder), torch.device("cpu")
    whole = named_tensors(random_model(info, torch.float32, cpu, 7).weights)
    ranks = HostRanks(place_of(1, 2, 1), info.vocab_size)
    part = named_tensors(random_model(info, torch.float32, cpu, 7, ranks=ranks).weights)
    for name, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        stored = whole[f"model.layers.1.{name}.weight"]
        assert torch.equal(part[f"model.layers.1.{name}.weight"], stored.chunk(2, dim)[1])


@contextmanager
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the system is asked for, however it is counted elsewhere."""
    found, preadv = list[int](), os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        found.append(preadv(descriptor, buffers, offset))
        return found[-1]

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", counted)
        yield found


def bytes_of_ranks(
    folder: Path,
    tensor: int,
    pipeline: int,
    monkeypatch: pytest.MonkeyPatch,
    online: str = "none",
) -> tuple[int, list[int]]:
    """What one worker reads of all files, and what each rank does."""
    info, cpu = read_model_info(folder), torch.device("cpu")
    found = list[int]()
    for rank in [None, *range(tensor * pipeline)]:
        place = None if rank is None else place_of(rank, tensor, pipeline)
        ranks = place and HostRanks(place, info.vocab_size)
        with bytes_read(monkeypatch) as read:
            load_model(info, torch.float32, cpu, lambda note: None, online=online, ranks=ranks)
        found.append(sum(read))
    return found[0], found[1:]


@pytest.mark.parametrize(("tensor", "pipeline", "share"), [(2, 1, 0.6), (4, 1, 0.4), (2, 2, 0.4)])
def test_a_rank_reads_its_part_of_the_files_alone(
    tensor: int,
    pipeline: int,
    share: float,
    tiny_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, parts = bytes_of_ranks(tiny_folder("llama3"), tensor, pipeline, monkeypatch)
    assert max(parts) < share * whole
    assert sum(parts) >= whole


def two_ranks() -> list[HostRanks]:
    ranks, meeting = [HostRanks(place_of(rank, 2, 1), 100) for rank in range(2)], ThreadsMeeting()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda each: each.meet(meeting), ranks))
    return ranks


def test_who_waits_for_a_rank_that_is_gone_is_told_at_once() -> None:
    one, other = two_ranks()
    del other
    gc.collect()
    with pytest.raises(RuntimeError):
        one.sum(torch.ones(3))


def test_who_waits_for_a_rank_that_does_nothing_is_told_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.services.worker.rank_group.LIMIT_SECONDS", 0.5)
    one, other = two_ranks()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        one.sum(torch.ones(3))
    assert other.place.share == 1


def test_who_comes_to_a_meeting_alone_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.worker.rank_group.MEET_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imeout|[Tt]imed out"):
        HostRanks(place_of(0, 2, 1), 100).meet(ThreadsMeeting())
    assert time.monotonic() - began < 30


def test_sums_have_the_bits_of_their_rows_alone() -> None:
    x = [torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    ranks, meeting = [HostRanks(place_of(rank, 3, 1), 100) for rank in range(3)], ThreadsMeeting()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda each: each.meet(meeting), ranks))

        def summed(rows: slice) -> torch.Tensor:
            pairs = zip(ranks, x, strict=True)
            first, *others = threads.map(lambda pair: pair[0].sum(pair[1][rows].clone()), pairs)
            assert all(torch.equal(first, other) for other in others)
            return first

        assert torch.equal(summed(slice(0, 7))[4], summed(slice(4, 5))[0])


@pytest.mark.parametrize(
    ("tensor", "pipeline", "words"),
    [
        (
            3,
            1,
            "--tensor-parallel-size 3: 4 attention heads are no multiple of it; sizes that work: "
            "1, 2, 4",
        ),
        (1, 3, "--pipeline-parallel-size 3: the model has 2 layers; at most 2 stages work"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_sizes_that_work(
    tensor: int, pipeline: int, words: str, tiny_folder: Folder
) -> None:
    info = read_model_info(tiny_folder("llama3"))
    assert why_not(adapter_for(info).specification(info), tensor, pipeline) == words


@pytest.mark.parametrize(
    ("variant", "words"),
    [("olmo2", "norms of queries and keys go over all heads"), ("gpt-neox", "families of our own")],
)
def test_a_model_that_no_rank_can_share_is_refused_by_name(
    variant: str, words: str, tiny_folder: Folder
) -> None:
    folder = tiny_folder(variant)
    cluster = ClusterConfig(tensor_parallel_size=2)
    config = Config(model=ModelConfig(model=str(folder)), cluster=cluster)
    with pytest.raises(ConfigError, match=words):
        check_division(config, read_model_info(folder))


def test_quantized_weights_of_which_ranks_have_no_whole_groups_are_refused_with_what_works(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    for form, words in (
        ("packed-4-ordered", "in any order"),
        ("fp8-block", "no whole groups of 12"),
    ):
        folder = write_twins(tiny_folder("llama3-wide"), tmp_path / form, WRITERS[form]).quantized
        cluster = ClusterConfig(tensor_parallel_size=4)
        config = Config(model=ModelConfig(model=str(folder)), cluster=cluster)
        with pytest.raises(ConfigError, match=f"-parallel-size 4 .*{words}.*--pipeline-parallel"):
            check_division(config, read_model_info(folder))


@pytest.mark.parametrize("form", [form for form in WRITERS if not form.endswith("-ordered")])
def test_a_rank_of_a_quantized_checkpoint_reads_its_part_of_the_files_alone(
    form: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = write_twins(tiny_folder("llama3-wide"), tmp_path, WRITERS[form])
    whole, parts = bytes_of_ranks(twins.quantized, 2, 1, monkeypatch)
    assert max(parts) < 0.52 * whole
    assert sum(parts) >= whole


@pytest.mark.parametrize(("online", "share"), [("int4", 0.56), ("int8", 0.7), ("fp8", 0.7)])
def test_ranks_that_round_weights_read_whole_rows_where_these_share_a_scale(
    online: str, share: float, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("llama3-wide")
    whole, parts = bytes_of_ranks(folder, 2, 1, monkeypatch, online)
    assert max(parts) < share * whole


def check_divided(
    folder: Path, tensor: int, pipeline: int, online: str = "none", *, plain: bool = False
) -> None:
    """Quantized weights give the tokens that they give on one worker. plain: computed as what the
    codes stand for, where a CPU's own kernels for codes compute in bfloat16."""
    info, sizes = read_model_info(folder), sizes_for(folder)
    model = ModelConfig(model=str(folder), quantization=online)  # type: ignore[arg-type]
    cluster = ClusterConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    check_division(Config(model=model, cluster=cluster), info)
    cpu, prompts = torch.device("cpu"), some_prompts([1, 40, 17, 70])

    def drawn(executor: Any) -> list[list[int]]:
        return PlanDriver(executor, 3).run(prompts, 12, samplings=SAMPLINGS, preemptions=2)

    whole = load_model(info, torch.float32, cpu, lambda note: None, online=online)
    assert whole.quantized
    prepare = Decoder.make_plain if plain else lambda model: None
    prepare(whole)
    expected = drawn(ModelExecutor(whole, sizes))
    sizes = replace(sizes, micro_batches=pipeline)
    with ranks_of(folder, tensor, pipeline, sizes, online=online, prepare=prepare) as ranks:
        assert drawn(ranks) == expected


@pytest.mark.parametrize(
    ("variant", "tensor", "pipeline"),
    [
        pytest.param("llama3-wide", 1, 2, marks=pytest.mark.slow),
        pytest.param("llama-tied-biases", 1, 2, marks=pytest.mark.slow),
        ("llama3-wide", 2, 1),
        ("qwen2-tied", 2, 2),
    ],
)
def test_weights_that_ranks_round_while_they_read_give_the_tokens_of_one_worker(
    variant: str, tensor: int, pipeline: int, tiny_folder: Folder
) -> None:
    check_divided(tiny_folder(variant), tensor, pipeline, "int8")


@pytest.mark.parametrize(
    ("form", "tensor", "pipeline"),
    [
        ("packed-4-asymmetric", 1, 2),
        pytest.param("fp8-rows", 1, 2, marks=pytest.mark.slow),
        ("fp8-tensor", 2, 1),
        pytest.param("gptq-4", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_quantized_checkpoint_give_the_tokens_of_one_worker(
    form: str, tensor: int, pipeline: int, tiny_folder: Folder, tmp_path: Path
) -> None:
    twins = write_twins(tiny_folder("llama3-wide"), tmp_path, WRITERS[form])
    check_divided(twins.quantized, tensor, pipeline)


@pytest.mark.parametrize("form", [form for form in WRITERS if not form.endswith("-ordered")])
def test_ranks_read_the_numbers_of_one_worker_whatever_the_format(
    form: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    twins = write_twins(tiny_folder("llama3-wide"), tmp_path, WRITERS[form])
    check_divided(twins.quantized, 2, 1, plain=True)


def test_inputs_of_a_rank_in_groups_with_others_are_refused_by_name(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    writer = WRITERS["gptq-4-ordered"]
    silent = Writer(writer.config | {"desc_act": False}, writer.store)
    folder = write_twins(tiny_folder("llama3-wide"), tmp_path, silent).quantized
    info = read_model_info(folder)
    ranks = HostRanks(place_of(1, 2, 1), info.vocab_size)
    words = "o_proj.g_idx.*inputs 64 to 128 of a rank are in groups with others; --pipeline-para"
    with pytest.raises(BadModelFolder, match=words):
        load_model(info, torch.float32, torch.device("cpu"), lambda note: None, ranks=ranks)


def prefill(step: int, slot: int) -> StepPlan:
    ids, sampling = np.arange(5, dtype="<i4").tobytes(), SEEDED.packed()
    new = NewSlot(slot, ids, 5, 0, [], sampling, choice=slot)
    return StepPlan(1, step, step == 1, [], [new], [], [Chunk(slot, 0, 5, True, [slot])])


def decode(step: int, micro_batch: int) -> StepPlan:
    return StepPlan(1, step, False, [], [], [], [], micro_batch=micro_batch)


def test_a_stage_goes_on_with_the_next_micro_batch_while_the_last_one_is_not_drawn(
    tiny_folder: Folder,
) -> None:
    folder = tiny_folder("qwen3")
    sizes = replace(sizes_for(folder), micro_batches=2)
    with ranks_of(folder, 1, 2, sizes) as ranks:
        last, first = ranks.executors
        for plan in (prefill(1, 0), prefill(2, 1)):
            ranks.execute(plan)
        may_go_on = threading.Event()
        compute = last.hidden

        def held(step: PlannedStep) -> Hidden:
            assert may_go_on.wait(60)
            return compute(step)

        last.hidden = held  # type: ignore[method-assign]
        plans = [decode(3, 0), decode(4, 1), decode(5, 0)]
        ahead = [ranks.threads[1].submit(first.execute, plan) for plan in plans]
        behind = [ranks.threads[0].submit(last.execute, plan) for plan in plans]
        ahead[1].result(60)
        assert not ahead[2].done(), "it decodes what the first of them draws"
        assert not behind[0].done()
        may_go_on.set()
        assert [len(one.result(60).tokens) for one in behind] == [4, 4, 4]
        ahead[2].result(60)


@pytest.mark.parametrize(("over", "tensor", "pipeline"), [("mean", 2, 2), (None, 2, 1)])
def test_ranks_give_the_vectors_of_one_worker(
    over: Any, tensor: int, pipeline: int, tiny_folder: Folder
) -> None:
    folder = tiny_folder("qwen3")
    sizes, prompts = replace(sizes_for(folder), max_num_seqs=3), some_prompts([1, 40, 17])

    def asked(executor: ModelExecutor) -> None:
        executor.tasks, executor.generates = {"embed": Embed()}, False
        executor.sums = PromptSums(over) if over else None

    one = alone(folder, sizes)
    asked(one)
    expected = pooled(one, prompts, chunk=16)
    with ranks_of(folder, tensor, pipeline, sizes) as ranks:
        for each in ranks.executors:
            asked(each)
        got = pooled(ranks, prompts, chunk=16)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


class Embed:
    name = "embed"

    def pool(self, hidden: Any) -> bytes:
        return floats(hidden)

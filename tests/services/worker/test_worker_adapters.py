"""LoRA adapters on the CPU: what they add to the logits, and that no row sees another's."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.pipeline.adapter_folders import write_adapter
from support.worker.plan_driver import PlanDriver
from support.worker.ranks_in_threads import ranks_of
from support.worker.tiny_adapters import CPU, adapted, bring, come, merge, modules_of, settings_for
from support.worker.tiny_models import make_model, some_prompts
from torch import Tensor

from penstock.kernels.low_rank import AdapterRows
from penstock.protocol.config.adapters import AdapterLimits
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    AdapterBrought,
    AdapterLoaded,
    BringAdapter,
    Chunk,
    NewSlot,
    SlotSampling,
    StepPlan,
)
from penstock.services.worker.adapters.adapter_loader import AdapterLoader
from penstock.services.worker.adapters.loading import load_adapters
from penstock.services.worker.adapters.model_adapters import ModelAdapters, Updates
from penstock.services.worker.adapters.peft_folder import (
    AdapterFolder,
    LowRankPair,
    ReadAdapter,
)
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder

Folder = Callable[[str], Path]
FAMILIES = ["llama", "qwen3-biased", "phi3", "glm", "cohere", "gemma2", "granite", "starcoder2"]
"""Plain, with biases, fused, fused and rotated in pairs, in parallel, with norms behind, with
multipliers, without a gate."""


def executor_of(model: Decoder, slots: int = 8) -> ModelExecutor:
    groups = group_layers(model.caches).groups
    vocab = model.vocab_size
    return ModelExecutor(model, EngineSizes(200, 8, slots, 256, 256, vocab, groups=groups))


def digests_of(model: Decoder) -> list[str]:
    assert model.adapters is not None
    return list(model.adapters.numbers)


def logits(executor: ModelExecutor, prompts: list[list[int]], adapters: list[str]) -> Tensor:
    """Behind the last token of each prompt, all in one step."""
    added, chunks, block = [], [], 0
    for slot, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        groups = max(1, len(executor.capacity.groups))
        count = groups * -(-len(prompt) // 8)
        blocks = list(range(block, block + count))
        block += count
        ids = np.array(prompt, "<i4").tobytes()
        sampling = SlotSampling(0.0, 0, 1.0, 0).packed()
        added.append(NewSlot(slot, ids, len(prompt), 0, [], sampling, adapter=adapter))
        chunks.append(Chunk(slot, 0, len(prompt), True, blocks))
    executor.reset()
    return executor.logits(StepPlan(1, 1, True, [], added, [], chunks))


def expected(model: Any, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([prompt])).logits[0, -1]
    return found


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_equal_those_of_merged_weights(
    variant: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    base = make_model(variant)
    modules = modules_of(base)
    every = write_adapter(tmp_path / "every", modules, seed=1)
    some = {name: size for name, size in modules.items() if ".0." in name}
    part = write_adapter(tmp_path / "part", dict(list(some.items())[::2]), seed=2)
    decoder = adapted(tiny_folder(variant), every=every, part=part)
    digests = digests_of(decoder)
    executor, prompts = executor_of(decoder), some_prompts([9, 5, 12])
    got = logits(executor, prompts, [digests[0], "", digests[1]])
    plain = executor_of(
        load_model(read_model_info(tiny_folder(variant)), torch.float32, CPU, print)
    )
    assert torch.equal(got[1], logits(plain, prompts, ["", "", ""])[1])
    torch.testing.assert_close(got[1], expected(base, prompts[1]), atol=1e-4, rtol=1e-4)
    merged = merge(make_model(variant), every)
    torch.testing.assert_close(got[0], expected(merged, prompts[0]), atol=1e-4, rtol=1e-4)
    merged = merge(make_model(variant), part)
    torch.testing.assert_close(got[2], expected(merged, prompts[2]), atol=1e-4, rtol=1e-4)
    assert (got[0] - expected(base, prompts[0])).abs().max() > 0.01


def test_ranks_and_scales_follow_the_patterns(tiny_folder: Folder, tmp_path: Path) -> None:
    config = {
        "use_rslora": True,
        "lora_alpha": 6,
        "rank_pattern": {"q_proj": 7, "model.layers.1.mlp.up_proj": 16, r"^.*nothing$": 3},
        "alpha_pattern": {"o_proj": 3.0},
    }
    del config["rank_pattern"][r"^.*nothing$"]  # type: ignore[attr-defined]

    def rank(name: str) -> int:
        return 7 if "q_proj" in name else 16 if name == "model.layers.1.mlp.up_proj" else 4

    def scale(name: str) -> float:
        return (3.0 if "o_proj" in name else 6.0) / math.sqrt(rank(name))

    modules = modules_of(make_model("llama"))
    folder = write_adapter(tmp_path / "one", modules, ranks=rank, config=config)
    decoder = adapted(tiny_folder("llama"), one=folder)
    (prompt,) = some_prompts([11])
    got = logits(executor_of(decoder), [prompt], digests_of(decoder))[0]
    merged = merge(make_model("llama"), folder, scale)
    torch.testing.assert_close(got, expected(merged, prompt), atol=1e-4, rtol=1e-4)


def test_logits_equal_those_of_peft_merged_or_not(tiny_folder: Folder, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=6,
        lora_alpha=12,
        use_rslora=True,
        target_modules="all-linear",
        rank_pattern={"q_proj": 3, "model.layers.0.mlp.up_proj": 8},
        alpha_pattern={"o_proj": 2},
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    model = peft.get_peft_model(make_model("llama"), settings).eval()
    model.save_pretrained(tmp_path)
    decoder = adapted(tiny_folder("llama"), one=tmp_path)
    (prompt,) = some_prompts([11])
    got = logits(executor_of(decoder), [prompt], digests_of(decoder))[0]
    torch.testing.assert_close(got, expected(model, prompt), atol=1e-4, rtol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(got, expected(merged, prompt), atol=1e-4, rtol=1e-4)
    assert (got - expected(make_model("llama"), prompt)).abs().max() > 0.01


def run(executor: Any, prompts: list[list[int]], adapters: list[str], seed: int) -> list[list[int]]:
    driver = PlanDriver(executor, seed)
    return driver.run(prompts, 6, adapters=adapters, preemptions=4)


def test_tokens_do_not_depend_on_the_neighbours(tiny_folder: Folder, tmp_path: Path) -> None:
    modules = modules_of(make_model("llama3-wide"))
    folders = {
        name: write_adapter(tmp_path / name, modules, seed=seed)
        for seed, name in enumerate(("one", "two", "three"))
    }
    decoder = adapted(tiny_folder("llama3-wide"), **folders)
    digests = ["", *digests_of(decoder)]
    prompts = some_prompts([3, 30, 17, 1, 9, 40, 5, 2, 66])
    chosen = [digests[place % 4] for place in range(len(prompts))]
    executor = executor_of(decoder)
    together = run(executor, prompts, chosen, 0)
    executor.reset()
    alone = []
    for place, (prompt, adapter) in enumerate(zip(prompts, chosen, strict=True)):
        executor.reset()
        alone += run(executor, [prompt], [adapter], place)
    assert together == alone
    assert len({tuple(each) for each in together}) > 4


def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    modules = modules_of(make_model("llama3-wide"))
    folder = write_adapter(tmp_path / "one", modules, ranks=lambda name: 5, config={"r": 5})
    decoder = adapted(tiny_folder("llama3-wide"), one=folder)
    (digest,) = digests_of(decoder)
    executor, prompts = executor_of(decoder), some_prompts([9, 30, 64, 3, 1])
    first = logits(executor, prompts[:1], [digest])[0]
    for others in (2, 3, 5):
        for neighbour in ("", digest):
            adapters = [digest, *[neighbour] * (others - 1)]
            assert torch.equal(logits(executor, prompts[:others], adapters)[0], first)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("variant", ["llama", "glm"])
def test_ranks_choose_the_tokens_of_one_device(
    variant: str, tensor: int, pipeline: int, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", modules_of(make_model(variant)))
    model, prompts = tiny_folder(variant), some_prompts([9, 20, 3])
    alone = adapted(model, one=folder)
    (digest,) = digests_of(alone)
    executor = executor_of(alone)
    adapters, config = [digest, "", digest], settings_for(model, one=folder)
    sizes = EngineSizes(200, 8, 8, 256, 256, alone.vocab_size, micro_batches=pipeline)
    with ranks_of(
        model, tensor, pipeline, sizes, prepare=lambda one: load_adapters(config, one)
    ) as all:
        got = run(all, prompts, adapters, 1)
    assert got == run(executor, prompts, adapters, 1)


def test_quantized_weights_get_what_plain_ones_do(tiny_folder: Folder, tmp_path: Path) -> None:
    info = read_model_info(tiny_folder("llama"))
    decoder = load_model(info, torch.float32, CPU, print, online="int8")
    adapters = ModelAdapters(decoder, AdapterLimits(2, 2, 2))
    generator = torch.Generator().manual_seed(0)
    size = adapters.model.layers["model.layers.0.self_attn.k_proj"]
    pair = LowRankPair(
        torch.randn(3, size.inputs, generator=generator),
        torch.randn(size.outputs, 3, generator=generator),
        0.5,
    )
    read = ReadAdapter("d", {"model.layers.0.self_attn.k_proj": pair})
    adapters.add(read.digest, adapters.prepared(read), Path("/nowhere"))
    number = adapters.numbers["d"]
    decoder.adapters = adapters
    decoder.prepare(64)
    product = adapters.layers[0].qkv
    assert product.updates[number] is not None
    x, rows = torch.randn(6, size.inputs, generator=generator), torch.tensor([1, 4])
    before = product(x)
    adapters.step.groups = [AdapterRows(number, rows, torch.tensor([1, 4, 4, 4]))]
    after = product(x)
    queries = decoder.specification.layers[0].attention
    first = queries.num_heads * queries.head_dim
    added = 0.5 * (x[rows] @ pair.down.t()) @ pair.up.t()
    torch.testing.assert_close(
        after[rows, first : first + size.outputs] - before[rows, first : first + size.outputs],
        added,
        atol=1e-4,
        rtol=1e-4,
    )
    untouched = torch.tensor([0, 2, 3, 5])
    assert torch.equal(after[untouched], before[untouched])


def test_an_adapter_that_is_gone_leaves_room_for_another(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    decoder = load_model(read_model_info(tiny_folder("llama")), torch.float32, CPU, print)
    adapters, nowhere = ModelAdapters(decoder, AdapterLimits(1, 2, 2)), Path("/nowhere")
    for digest in ("a", "b", "a"):
        adapters.add(digest, Updates({}), nowhere)
    assert list(adapters.held) == ["b", "a"] and adapters.numbers == {"a": 1}
    with pytest.raises(RuntimeError, match=r"2 adapters are loaded, .* allows 2"):
        adapters.add("c", Updates({}), nowhere)
    # One that takes the place of another comes before that has left.
    adapters.load("d", nowhere, replaces=True)
    adapters.hold("d", Updates({}))
    assert list(adapters.held) == ["b", "a", "d"]
    with pytest.raises(RuntimeError, match="3 adapters are loaded"):
        adapters.load("e", nowhere, replaces=True)
    adapters.remove("a")
    adapters.remove("b")
    adapters.add("c", Updates({}), nowhere)
    assert list(adapters.held) == ["d", "c"] and adapters.numbers == {"c": 1}


def test_what_memory_has_no_room_for_is_read_again_when_it_is_wanted(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    modules = modules_of(make_model("llama"))
    folders = {
        f"a{seed}": write_adapter(tmp_path / f"a{seed}", modules, seed=seed) for seed in range(4)
    }
    many = settings_for(tiny_folder("llama"), **folders)
    loading = replace(many.loading, max_loras=1, max_cpu_loras=2, max_registered_loras=4)
    decoder = load_model(read_model_info(tiny_folder("llama")), torch.float32, CPU, print)
    named, adapters = load_adapters(replace(many, loading=loading), decoder)
    assert adapters is not None
    digests, (prompt,) = [one.digest for one in named], some_prompts([9])
    assert list(adapters.numbers) == digests[:1] and set(adapters.held) == {digests[0], digests[3]}
    executor, loader = executor_of(decoder), AdapterLoader(adapters, 8)
    for digest, folder in zip(digests * 2, list(folders.values()) * 2, strict=True):
        assert not bring(loader, digest, []).reason
        assert len(adapters.held) == 2 and list(adapters.numbers) == [digest]
        merged = merge(make_model("llama"), folder)
        got = logits(executor, [prompt], [digest])[0]
        torch.testing.assert_close(got, expected(merged, prompt), atol=1e-4, rtol=1e-4)
    write_adapter(folders["a0"], modules, seed=9)
    reason = bring(loader, digests[0], []).reason
    assert "a0 has changed since it was loaded" in reason
    assert not bring(loader, digests[1], []).reason, "the others are what they were"
    # Asked for twice it is read once, and unloaded meanwhile it is nowhere.
    loader.bring(BringAdapter(1, digests[2], []))
    loader.bring(BringAdapter(1, digests[2], []))
    loader.drop(digests[2])
    while loader.busy:
        assert not loader.finished() and not loader.brought()
    assert digests[2] not in adapters.held and not adapters.numbers


def test_a_device_without_our_kernels_has_those_in_places_and_the_host_holds_all(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    decoder = load_model(read_model_info(tiny_folder("llama")), torch.float32, CPU, print)
    adapters = ModelAdapters(decoder, AdapterLimits(1, 2, 2), 4)
    adapters._on = torch.device("meta")
    for seed in range(2):
        folder = write_adapter(tmp_path / f"a{seed}", modules_of(make_model("llama")), seed=seed)
        read = AdapterFolder(folder, adapters.model.layers, 4).read()
        adapters.add(read.digest, adapters.prepared(read), folder)
    assert len(adapters.held) == 2 and len(adapters.numbers) == 1
    held = [one for updates in adapters.held.values() for one in updates.linears.values()]
    there = [product.updates[1] for layer in adapters.layers for product in layer]
    assert {one.down.device.type for one in held} == {"cpu"}
    assert {one.down.device.type for one in there if one is not None} == {"meta"}
    assert adapters.num_taken == adapters.num_bytes == sum(one.num_bytes for one in held) // 2
    adapters.remove(next(iter(adapters.numbers)))
    assert adapters.num_taken == 0 < adapters.num_bytes, "which is planned for all places"


def test_what_leaves_on_its_way_to_a_place_does_not_arrive(tiny_folder: Folder) -> None:
    """Nor does another one in the same place, whose filling began before."""
    decoder = load_model(read_model_info(tiny_folder("llama")), torch.float32, CPU, print)
    adapters = ModelAdapters(decoder, AdapterLimits(1, 3, 3))
    loader = AdapterLoader(adapters, 8)
    for digest in "abc":
        adapters.load(digest, Path("/nowhere"))
        adapters.hold(digest, Updates({}))

    def brought(*asked: str) -> list[AdapterBrought]:
        for number, digest in enumerate(asked, 1):
            loader.bring(BringAdapter(number, digest, []))
        found: list[AdapterBrought] = []
        while loader.busy or not found:
            found += loader.brought()
        return found

    assert brought("a", "b", "a") == [AdapterBrought(3, "a")]
    assert adapters.numbers == {"a": 1}
    assert brought("a") == [AdapterBrought(1, "a")], "it is there already"
    assert brought("c") == [AdapterBrought(1, "c")] and adapters.numbers == {"c": 1}
    (refused,) = brought("d")
    assert "not loaded" in refused.reason and not adapters.numbers
    loader.bring(BringAdapter(1, "a", ["a"]))
    loader.bring(BringAdapter(2, "b", ["a", "b"]))
    (refused,) = (one for one in (*loader.brought(), *loader.brought()) if one.reason)
    assert "all 1 places (--max-loras) are taken" in refused.reason


def test_a_slot_without_its_adapter_fails_and_its_neighbours_do_not(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", modules_of(make_model("llama")))
    executor = executor_of(adapted(tiny_folder("llama"), one=folder))
    added, chunks = [], []
    for slot, adapter in enumerate(("", "another")):
        ids = np.array([1, 2, 3], "<i4").tobytes()
        sampling = SlotSampling(0.0, 0, 1.0, 0).packed()
        added.append(NewSlot(slot, ids, 3, 0, [], sampling, adapter=adapter))
        chunks.append(Chunk(slot, 0, 3, True, [slot]))
    result = executor.execute(StepPlan(1, 1, True, [], added, [], chunks))
    (failure,) = result.failures
    assert failure.row == 1 and "adapter is not loaded" in failure.reason


def test_adapters_come_and_go_between_steps_and_leave_nothing(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    """A hundred times, beside rows with others; `make test-slow` does so a thousand times."""
    come_and_go(100, tiny_folder, tmp_path)


@pytest.mark.slow
def test_a_thousand_adapters_come_and_go(tiny_folder: Folder, tmp_path: Path) -> None:
    come_and_go(1000, tiny_folder, tmp_path)


def come_and_go(turns: int, tiny_folder: Folder, tmp_path: Path) -> None:
    modules = modules_of(make_model("llama"))
    folders = [write_adapter(tmp_path / f"{seed}", modules, seed=seed) for seed in range(3)]
    bad = write_adapter(tmp_path / "bad", modules, config={"r": 3})
    decoder = adapted(tiny_folder("llama"), kept=folders[0])
    assert decoder.adapters is not None
    (kept,), (prompt, *_) = digests_of(decoder), some_prompts([9, 5])
    executor, loader = executor_of(decoder), AdapterLoader(decoder.adapters, 64)
    first = logits(executor, [prompt], [kept])[0]

    def load(folder: Path) -> AdapterLoaded:
        return come(loader, folder, undisturbed)

    def undisturbed() -> None:
        assert torch.equal(logits(executor, [prompt], [kept])[0], first)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    before = 0
    for turn in range(turns):
        if turn == 10:
            before = tensors()
        loaded = load(folders[1 + turn % 2])
        assert loaded.digest and not torch.equal(
            logits(executor, [prompt], [loaded.digest])[0], first
        )
        loader.drop(loaded.digest)
        if not turn % 10:
            assert "instead of" in load(bad).reason
    assert tensors() <= before and digests_of(decoder) == [kept] and not loader.busy


@pytest.mark.parametrize("online", ["none", "int8"])
def test_ranks_that_number_adapters_differently_do_not_mix_them(
    online: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    """Each rank numbers what it has as it came; the sums of their steps go by the digests."""
    modules = modules_of(make_model("llama"))
    one, two = (write_adapter(tmp_path / name, modules, seed=int(name)) for name in "12")
    model, prompts = tiny_folder("llama"), some_prompts([9, 20, 3])
    orders = iter([{"one": one, "two": two}, {"two": two, "one": one}])
    alone = load_model(read_model_info(model), torch.float32, CPU, print, online=online)
    load_adapters(settings_for(model, one=one, two=two), alone)
    executor, digests = executor_of(alone), digests_of(alone)
    adapters = [digests[0], digests[1], ""]
    sizes = EngineSizes(200, 8, 8, 256, 256, alone.vocab_size)

    def prepare(rank: Decoder) -> None:
        load_adapters(settings_for(model, **next(orders)), rank)

    with ranks_of(model, 2, 1, sizes, online=online, prepare=prepare) as all:
        got = run(all, prompts, adapters, 1)
    assert got == run(executor, prompts, adapters, 1)

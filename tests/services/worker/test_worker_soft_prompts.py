"""Soft prompts on the CPU: what they change, and that no other row notices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.pipeline.adapter_folders import ROWS, write_adapter, write_soft_prompt
from support.worker.oracle_drafts import speculating
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.quantized_folders import WRITERS, write_twins
from support.worker.ranks_in_threads import ranks_of
from support.worker.tiny_adapters import CPU, adapted, bring, come, modules_of, settings_for
from support.worker.tiny_heads import tensors_of, write_head
from support.worker.tiny_models import make_model, some_prompts
from test_worker_adapters import digests_of, executor_of
from test_worker_eagle3 import drafter_of, drafting_by
from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.sampling.logprobs import logprobs
from penstock.protocol.config.adapters import AdapterLimits
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.wire.messages.engine import Adapter, EngineSizes
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    SlotAdjustments,
    SlotSampling,
    StepPlan,
)
from penstock.services.worker.adapters.adapter_loader import AdapterLoader
from penstock.services.worker.adapters.checked_folder import (
    NOT_ON_GPUS,
    AdaptableModel,
    checked_folder,
)
from penstock.services.worker.adapters.device_adapters import DeviceAdapters
from penstock.services.worker.adapters.loading import load_adapters
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.plain_attention import REFERENCE
from penstock.services.worker.slot_history import history

Folder = Callable[[str], Path]
HIDDEN, COUNT = 64, 11
FAMILIES = ["llama", "qwen3-biased", "gemma", "gemma3", "granite", "olmo2", "starcoder2", "cohere2"]
"""Plain, with biases, with multipliers inside of the embedding (and windows) and behind it, with
norms behind, with LayerNorms, in parallel."""


def virtual_ids(model: Decoder, prompt: list[int], count: int = COUNT) -> list[int]:
    return [*range(model.vocab_size, model.vocab_size + count), *prompt]


def logits_of(model: Any, rows: Tensor, tokens: list[int]) -> Tensor:
    """Of each of ``tokens``, behind a soft prompt, as peft computes them: [len(tokens), V]."""
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(torch.tensor(tokens))
        inputs = torch.cat((rows.to(embeddings.dtype), embeddings)).unsqueeze(0)
        found: Tensor = model(inputs_embeds=inputs).logits[0, len(rows) :]
    return found


def rows_of(folder: Path) -> Tensor:
    return load_file(folder / "adapter_model.safetensors")[ROWS]


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_and_tokens_equal_those_of_peft(
    variant: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    base = make_model(variant)
    soft = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN, seed=1)
    low = write_adapter(tmp_path / "low", modules_of(base), seed=2)
    decoder = adapted(tiny_folder(variant), soft=soft, low=low)
    executor, digests = executor_of(decoder), digests_of(decoder)
    prompts = some_prompts([9, 33, 9, 14])
    given = [virtual_ids(decoder, one) for one in prompts[:2]] + prompts[2:]
    sampling = SlotSampling(0.0, 0, 1.0, 0, logprobs=0)
    driver = PlanDriver(executor, 1)
    outputs = driver.run(
        given,
        8,
        samplings=[sampling] * 4,
        adapters=[digests[0], digests[0], "", digests[1]],
        virtual=[COUNT, COUNT, 0, 0],
        preemptions=3,
        prompt_logprobs=0,
    )
    rows = rows_of(soft)
    for number, (prompt, output) in enumerate(zip(prompts[:2], outputs, strict=False)):
        logits = logits_of(base, rows, [*prompt, *output[:-1]])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output
        targets = torch.tensor([*prompt[1:], *output])
        expected = logprobs(logits, targets, 0)[0].numpy()
        got = [driver.logprobs[number, place].entries for place in range(len(output))]
        found = np.frombuffer(b"".join(got), "<f4")[2::3]
        np.testing.assert_allclose(found, expected[len(prompt) - 1 :], atol=1e-4)
        chunks = sorted(one for one in driver.prompt_logprobs if one[0] == number)
        entries = {place: driver.prompt_logprobs[place].entries for place in chunks}
        shown = {
            start + 1 + i: word
            for (_, start), data in entries.items()
            for i, word in enumerate(np.frombuffer(data, "<f4")[2::3])
        }
        assert sorted(shown) == list(range(1, len(prompt)))
        in_order = [shown[place] for place in sorted(shown)]
        np.testing.assert_allclose(in_order, expected[: len(prompt) - 1], atol=1e-4)
    lone = executor_of(load_model(read_model_info(tiny_folder(variant)), torch.float32, CPU, print))
    alone = PlanDriver(lone, 2)
    assert alone.run([prompts[2]], 8, samplings=[sampling]) == [outputs[2]]
    ours = [driver.logprobs[2, place] for place in range(8)]
    assert ours == [alone.logprobs[0, place] for place in range(8)]


def greedy(
    executor: Any, given: list[list[int]], adapters: list[str], virtual: list[int], seed: int
) -> list[list[int]]:
    driver = PlanDriver(executor, seed)
    return driver.run(given, 8, adapters=adapters, virtual=virtual, chunk=4, preemptions=3)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("variant", ["llama", "granite"])
def test_ranks_choose_the_tokens_of_one_device(
    variant: str, tensor: int, pipeline: int, tiny_folder: Folder, tmp_path: Path
) -> None:
    soft = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN)
    model = tiny_folder(variant)
    alone = adapted(model, soft=soft)
    (digest,), prompts = digests_of(alone), some_prompts([9, 20, 3])
    given = [virtual_ids(alone, prompts[0]), prompts[1], virtual_ids(alone, prompts[2])]
    asked = given, [digest, "", digest], [COUNT, 0, COUNT]
    expected = greedy(executor_of(alone), *asked, 1)
    config = settings_for(model, soft=soft)
    sizes = EngineSizes(200, 8, 8, 256, 256, alone.vocab_size, micro_batches=pipeline)
    with ranks_of(
        model, tensor, pipeline, sizes, prepare=lambda one: load_adapters(config, one)
    ) as all:
        assert greedy(all, *asked, 2) == expected


KINDS: list[KVCacheKind] = ["auto", "int8", "fp8"]


@pytest.mark.parametrize("weights", ["none", "int8", "int4", "fp8", "gptq-4", "fp8-block"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_embeddings_of_tokens_stand_for_those_tokens(
    weights: str, kind: KVCacheKind, tiny_folder: Folder, tmp_path: Path
) -> None:
    """Whatever the types of weights, rounded while they are read or stored so, and of KV memory
    are."""
    model, online = tiny_folder("llama3-wide"), weights
    if weights in WRITERS:
        model, online = write_twins(model, tmp_path, WRITERS[weights]).quantized, "none"
    info = read_model_info(model)
    ahead, *prompts = some_prompts([COUNT, 9, 20])
    decoder = load_model(info, torch.float32, CPU, print, online=online)
    rows = decoder.weights.embedding[torch.tensor(ahead)]
    soft = write_soft_prompt(tmp_path / "soft", COUNT, rows.shape[1], tensors={ROWS: rows})
    load_adapters(settings_for(model, soft=soft), decoder)
    (digest,) = digests_of(decoder)
    executor = ModelExecutor(
        decoder, EngineSizes(200, 8, 8, 256, 256, decoder.vocab_size), REFERENCE, kind
    )
    expected = greedy(executor, [[*ahead, *one] for one in prompts], ["", ""], [0, 0], 1)
    executor.reset()
    given = [virtual_ids(decoder, one) for one in prompts]
    assert greedy(executor, given, [digest, digest], [COUNT, COUNT], 2) == expected


def test_drafts_change_no_token(tiny_folder: Folder, tmp_path: Path) -> None:
    soft = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN)
    decoder = adapted(tiny_folder("llama"), soft=soft)
    (digest,), prompts = digests_of(decoder), some_prompts([9, 20])
    given = [virtual_ids(decoder, prompts[0]), prompts[1]]
    asked = given, [digest, ""], [COUNT, 0]
    expected = greedy(executor_of(decoder), *asked, 1)
    sizes = EngineSizes(200, 8, 8, 256, 256, decoder.vocab_size)
    executor = DraftingExecutor(decoder, sizes)
    speculating(executor, list(zip(prompts, expected, strict=True)))
    driver = PlanDriver(executor, 2)
    assert driver.run(given, 8, adapters=asked[1], virtual=asked[2]) == expected
    assert max(driver.row_counts) > 1


def test_a_head_makes_drafts_for_the_other_rows_alone(tiny_folder: Folder, tmp_path: Path) -> None:
    """It would read virtual tokens as such of the vocabulary."""
    decoder = adapted(
        tiny_folder("llama"), soft=write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN)
    )
    (digest,), prompts = digests_of(decoder), some_prompts([9, 20])
    given, virtual = [virtual_ids(decoder, prompts[0]), prompts[1]], [COUNT, 0]
    expected = greedy(executor_of(decoder), given, [digest, ""], virtual, 1)
    executor = DraftingExecutor(decoder, EngineSizes(200, 8, 8, 256, 256, decoder.vocab_size))
    head = write_head(tmp_path / "head", tensors_of())
    drafter = drafter_of(executor, tiny_folder("llama"), head)
    drafting_by(executor, drafter)
    driver = PlanDriver(executor, 2)
    lone = driver.run(given[:1], 8, adapters=[digest], virtual=[COUNT])
    assert lone == expected[:1] and executor.drafting is not None
    assert not executor.drafting.counts.drafted.get("eagle3")
    driver = PlanDriver(executor, 3)
    executor.reset()
    assert driver.run(given, 8, adapters=[digest, ""], virtual=virtual) == expected
    assert sum(executor.drafting.counts.drafted["eagle3"])


def test_adjustments_and_drafts_read_no_virtual_tokens() -> None:
    prompt = np.array([300, 301, 7, 8], "<i4")
    output = np.array([9], "<i4")
    sampling = SlotSampling(0.0, 0, 1.0, 0).packed()
    whole = NewSlot(
        0, np.concatenate((prompt, output)).tobytes(), 4, 0, [], sampling, virtual_tokens=2
    )
    later = NewSlot(0, output.tobytes(), 4, 4, [], sampling, start=4, prompt=0, virtual_tokens=2)
    for new in (whole, later):
        known = history(new, [prompt.tobytes()])
        assert known.prompt.tolist() == [7, 8] and known.output.tolist() == [9]


def test_penalties_are_of_what_the_client_sees(tiny_folder: Folder, tmp_path: Path) -> None:
    """They would also fail on ids beyond the vocabulary."""
    soft = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN)
    decoder = adapted(tiny_folder("llama"), soft=soft)
    (digest,), (prompt,) = digests_of(decoder), some_prompts([6])
    penalised = SlotSampling(0.0, 0, 1.0, 0, adjustments=SlotAdjustments(repetition=50.0))
    driver = PlanDriver(executor_of(decoder), 1)
    (output,) = driver.run(
        [virtual_ids(decoder, prompt)],
        6,
        samplings=[penalised],
        adapters=[digest],
        virtual=[COUNT],
        chunk=5,
    )
    assert len(set(output)) == 6 and not set(output) & set(prompt)


def test_a_row_whose_soft_prompt_is_gone_fails_alone(tiny_folder: Folder, tmp_path: Path) -> None:
    decoder = adapted(tiny_folder("llama"), soft=write_soft_prompt(tmp_path / "s", COUNT, HIDDEN))
    executor, (prompt,) = executor_of(decoder), some_prompts([6])
    sampling, tokens = GREEDY.packed(), virtual_ids(decoder, prompt)
    added = [
        NewSlot(
            0, np.array(tokens, "<i4").tobytes(), len(tokens), 0, [], sampling,
            adapter="gone", virtual_tokens=COUNT,
        ),
        NewSlot(1, np.array(prompt, "<i4").tobytes(), len(prompt), 0, [], sampling),
    ]  # fmt: skip
    chunks = [Chunk(0, 0, len(tokens), True, [0, 1, 2]), Chunk(1, 0, len(prompt), True, [3])]
    result = executor.execute(StepPlan(1, 1, True, [], added, [], chunks))
    assert [one.row for one in result.failures] == [0]
    alone = executor_of(adapted(tiny_folder("llama")))
    (expected,) = PlanDriver(alone).run([prompt], 1)
    assert np.frombuffer(result.tokens, "<i4")[1] == expected[0]


def test_one_that_is_loaded_while_steps_go_on_is_told_with_its_rows(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    model = tiny_folder("llama")
    first = write_soft_prompt(tmp_path / "first", 3, HIDDEN, seed=1)
    decoder = load_model(read_model_info(model), torch.float32, CPU, print)
    named, adapters = load_adapters(settings_for(model, first=first), decoder)
    assert adapters is not None
    (digest,) = digests_of(decoder)
    assert named == [Adapter("first", digest, 3)]
    executor, loader = executor_of(decoder), AdapterLoader(adapters, 8)
    told = come(loader, write_soft_prompt(tmp_path / "second", 5, HIDDEN, seed=2))
    assert told.virtual_tokens == 5 and adapters.num_bytes == 4 * HIDDEN * (3 + 5)
    (prompt,) = some_prompts([4])
    given = virtual_ids(decoder, prompt, 5)
    (got,) = greedy(executor, [given], [told.digest], [5], 1)
    base, rows = make_model("llama"), rows_of(tmp_path / "second")
    logits = logits_of(base, rows, [*prompt, *got[:-1]])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == got
    loader.drop(told.digest)
    assert adapters.num_bytes == 4 * HIDDEN * 3 and adapters.virtual.count(None) == adapters.places
    assert not bring(loader, digest).reason


MODEL = AdaptableModel({}, HIDDEN)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "another size": ({"token_dim": 32}, "token_dim is 32; the model's hidden size is 64"),
    "no count": ({"num_virtual_tokens": None}, "num_virtual_tokens is null; 1 to 4096"),
    "a count of true": ({"num_virtual_tokens": True}, "num_virtual_tokens is true"),
    "too many": ({"num_virtual_tokens": 5000}, "is 5000; 4096 are allowed at most"),
    "a wrong count": (
        {"num_virtual_tokens": 12},
        r"prompt_embeddings: \[11, 64\] instead of \[12, 64\]",
    ),
    "two decoders": ({"num_transformer_submodules": 2}, "num_transformer_submodules is 2"),
    "another task": ({"task_type": "SEQ_2_SEQ_LM"}, "task_type is 'SEQ_2_SEQ_LM'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "P-tuning": ({"peft_type": "P_TUNING"}, "'P_TUNING', a soft prompt: .* LORA and PROMPT_TUNING"),
    "prefix tuning": ({"peft_type": "PREFIX_TUNING"}, "'PREFIX_TUNING', which puts keys"),
    "tasks": ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "differs from task to task"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_that_is_not_followed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, message = CASES[case]
    folder = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN, config=changes)
    with pytest.raises(BadModelFolder, match=message):
        checked_folder(folder, MODEL, 8)


TENSORS: dict[str, tuple[dict[str, Tensor], str]] = {
    "not finite": ({ROWS: torch.full((COUNT, HIDDEN), torch.inf)}, "numbers that are not finite"),
    "another shape": ({ROWS: torch.zeros(HIDDEN, COUNT)}, r"\[64, 11\] instead of \[11, 64\]"),
    "another type": ({ROWS: torch.zeros(COUNT, HIDDEN).long()}, "type 'I64' instead of"),
    "one more": ({"other": torch.zeros(2)}, "'other': a soft prompt has prompt_embeddings alone"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, message = TENSORS[case]
    folder = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN, tensors=tensors)
    with pytest.raises(BadModelFolder, match=message):
        checked_folder(folder, MODEL, 8).read()


def test_a_pickle_and_a_soft_prompt_without_room_are_refused(tmp_path: Path) -> None:
    folder = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN)
    short = MODEL._replace(most_virtual_tokens=10)
    with pytest.raises(BadModelFolder, match=r"model's 12 positions \(--max-model-len\) allow 10"):
        checked_folder(folder, short, 8)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(BadModelFolder, match="is a pickle, which can run code"):
        checked_folder(folder, MODEL, 8)


def test_gpus_refuse_them_by_name(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = write_soft_prompt(tmp_path / "soft", COUNT, HIDDEN)
    decoder = load_model(read_model_info(tiny_folder("llama")), torch.float32, CPU, print)
    places = DeviceAdapters(decoder, AdapterLimits(1, 1, 1), 8)
    assert places.model.no_soft_prompts == NOT_ON_GPUS
    with pytest.raises(BadModelFolder, match="'PROMPT_TUNING': on GPUs there are no soft prompts"):
        checked_folder(folder, places.model, 8)


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    folders = [
        write_soft_prompt(tmp_path / str(at), COUNT, HIDDEN, seed=seed)
        for at, seed in enumerate((1, 1, 2))
    ]
    config = json.loads((folders[1] / "adapter_config.json").read_text())
    text = json.dumps(config | {"base_model_name_or_path": "elsewhere"})
    (folders[1] / "adapter_config.json").write_text(text)
    one, same, other = (checked_folder(folder, MODEL, 8).read().digest for folder in folders)
    assert one == same != other

"""What a request asks of samplers, as a worker's slot is told it: stages in order, and breakers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from penstock.kernels.sampling.samplers import SAMPLERS
from penstock.loadtest.models.make_model import make_model
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.protocol.sampler_parameters import DEFAULT_ORDER, SamplerName, sampler_conflict
from penstock.protocol.sampling import SamplingParams, resolve
from penstock.protocol.wire.messages.requests import ChoiceState, PromptText, RequestHead, Work
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.services.tokenizer.dry_breakers import breaker_tokens
from penstock.services.tokenizer.preparation import prepare
from penstock.services.tokenizer.sampler_stages import sampler_stages
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.token_table import piece_bytes

EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "nsigma": 1, "top_a": 0.1, "min_p": 0.1, "tfs": 0.9, "eta_cutoff": 0.01,
    "epsilon_cutoff": 0.01, "typical_p": 0.9, "smoothing_factor": 0.2, "xtc_probability": 0.5,
    "skew": 0.1, "top_k": 9, "top_p": 0.9, "mirostat_mode": 2,
}  # fmt: skip
PLAIN = {name: EVERYTHING[name] for name in ("temperature", "min_p", "top_k", "top_p")}


def names(**given: Any) -> list[str]:
    return [stage.sampler for stage in sampler_stages(resolve(SamplingParams(**given), {}, 1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("samplers") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return TextModel.load(folder)


@pytest.fixture(scope="module")
def info(folder: Path) -> ModelInfo:
    return read_model_info(folder)


def slot(model: TextModel, info: ModelInfo, **params: Any) -> SlotSampling:
    work = Work(RequestHead(), PromptText("a b"), SamplingParams(**params), [ChoiceState(0)])
    packed = prepare(work, model, info, 100, 1).work.sampling
    return msgspec.msgpack.decode(packed, type=SlotSampling)


def test_all_samplers_act_in_the_usual_order() -> None:
    assert names(**EVERYTHING) == list(DEFAULT_ORDER)
    assert set(DEFAULT_ORDER) == set(get_args(SamplerName))
    assert {*DEFAULT_ORDER, "dynamic_temperature"} == set(SAMPLERS)


def test_what_every_slot_has_makes_no_stages_unless_in_another_order() -> None:
    assert names() == names(**PLAIN) == names(top_p=0.5) == []
    assert names(**PLAIN, sampler_order=["temperature", "min_p", "top_k", "top_p"]) == []
    assert names(top_p=0.5, sampler_order=["top_p", "temperature"]) == []
    assert names(**PLAIN, temperature_last=True) == ["min_p", "temperature", "top_k", "top_p"]
    wanted = ["top_k", "top_p", "min_p", "temperature"]
    assert names(**PLAIN, sampler_order=[6, 0, 1, 3, 4, 2, 5]) == wanted


def test_an_order_goes_first_and_what_it_does_not_name_follows() -> None:
    found = names(**EVERYTHING, sampler_order=["xtc", "top_p", 5])
    rest = [name for name in DEFAULT_ORDER if name not in found[:4]]
    assert found == ["xtc", "top_p", "temperature", "smoothing", *rest]
    last = names(**EVERYTHING, temperature_last=True)
    assert last[last.index("xtc") + 1] == "temperature"


def test_the_likeliest_token_needs_no_sampler() -> None:
    assert names(**EVERYTHING | {"temperature": 0}) == []
    assert names(**EVERYTHING | {"temperature": 0}, dynatemp_max=2.0) == []


def test_a_dynamic_temperature_takes_the_place_of_the_other() -> None:
    params = resolve(SamplingParams(dynatemp_min=0.5, dynatemp_max=2, temperature=0.7), {}, 1)
    (stage,) = sampler_stages(params)
    assert (stage.sampler, stage.values) == ("dynamic_temperature", [0.5, 2.0, 1.0])


def test_a_slot_with_stages_has_no_temperature_and_limits_beside_them(
    model: TextModel, info: ModelInfo
) -> None:
    found = slot(model, info, temperature=0.5, top_k=7, top_p=0.5, min_p=0.1, typical_p=0.5, seed=3)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (1.0, 0, 1.0, 0.0)
    assert found.adjustments is not None
    stages = {stage.sampler: stage.values for stage in found.adjustments.stages}
    assert stages == {
        "temperature": [0.5], "min_p": [0.1], "typical_p": [0.5], "top_k": [7.0], "top_p": [0.5],
    }  # fmt: skip


def test_what_a_scheduler_must_send_is_said_beside_the_bytes(
    model: TextModel, info: ModelInfo
) -> None:
    def asked(**params: Any) -> tuple[bool, bool, bool]:
        work = Work(RequestHead(), PromptText("a b"), SamplingParams(**params), [ChoiceState(0)])
        made = prepare(work, model, info, 100, 1).work
        return made.reads_output, made.reads_prompt, made.reads_logits

    assert asked() == (False, False, False)
    assert asked(typical_p=0.5) == (True, False, False)
    assert asked(mirostat_mode=2) == (True, False, True)
    assert asked(dry_multiplier=0.8) == asked(no_repeat_ngram_size=3) == (True, True, False)


def test_a_breaker_stands_for_every_token_that_holds_it(model: TextModel) -> None:
    def pieces(*breakers: str) -> set[int]:
        return set(np.frombuffer(breaker_tokens(model, breakers), "<i4").tolist())

    for breaker in ("e", "\n", "th", '"'):
        holding = {
            token
            for token in range(model.vocab_size)
            if breaker.encode() in piece_bytes(model.token_table, token)
        }
        assert pieces(breaker) == holding != set()
    assert pieces("e", "e", "th") == pieces("e") | pieces("th")
    nowhere = "zq e zq"
    last = np.frombuffer(model.encode(nowhere, add_special_tokens=False), "<i4")[-1]
    assert pieces(nowhere) == {int(last)}
    assert pieces() == set()


def test_dry_travels_with_the_tokens_of_its_breakers(model: TextModel, info: ModelInfo) -> None:
    found = slot(model, info, dry_multiplier=0.8, dry_range=-1, dry_sequence_breakers=["e"])
    assert found.adjustments is not None and found.adjustments.dry is not None
    assert found.adjustments.dry.range == 0
    assert found.adjustments.dry.breakers == breaker_tokens(model, ["e"])
    plain = slot(model, info, dry_sequence_breakers=["e"])
    assert plain.adjustments is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"mirostat_mode": 1}, "mirostat_mode"),
        ({"dynatemp_min": 1.0}, "dynatemp_min"),
        ({"sampler_order": [0, "top_k"]}, "sampler_order"),
        ({"sampler_order": [0, 6], "repetition_penalty": 1.2}, "sampler_order"),
        ({"sampler_order": [0], "temperature_last": True}, "temperature_last"),
    ],
)
def test_what_contradicts_is_told_with_its_parameter(given: dict[str, Any], param: str) -> None:
    found = sampler_conflict(SamplingParams(**given))
    assert found is not None and found[0] == param
    assert sampler_conflict(SamplingParams(sampler_order=[0, 6])) is None

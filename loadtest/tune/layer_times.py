"""Times a layer of each kind, the embedding, and the LM head with the draw, on the device at hand.

A layer takes what a model of more copies of it takes longer. Weights are random, for times do not
depend on them; so what only several devices hold is measured on one.
"""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from statistics import median, quantiles

import torch
from msgspec.structs import replace
from torch.nn.functional import embedding

from penstock.loadtest.offline.step_timer import StepTimer, prompts_of
from penstock.loadtest.tune.stage_choice import LayerTimes, Step
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import read_machine
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.executor import Executor
from penstock.services.worker.first_steps import executor_of, run_first
from penstock.services.worker.loaded_model import kernels_for
from penstock.services.worker.memory import blocks_for
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.model_loading import choose_device, choose_dtype, subject_of
from penstock.services.worker.model_weights import random_decoder
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.rank_shares import RankPlace, own_model
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.models.specification import Layer, for_length
from penstock.services.worker.models.weights import allocate_weights
from penstock.services.worker.quantization.reading import read_quantization
from penstock.services.worker.rank_choice import costs_of

FEW, MANY = 1, 5
"""Copies of a layer in the models that are compared."""
WARM_UP, LEAST_STEPS, MOST_STEPS = 3, 5, 100
POINT_SECONDS, ROUNDS = 0.25, 3
"""For the steps of one size, unless ``LEAST_STEPS`` take longer; and how often."""
LOOK_UPS = 20
TEMPERATURE = 0.6


class LayerMeter:
    """Of one model, as one of the ranks of a stage computes it; sums among these are left out."""

    def __init__(self, config: Config, info: ModelInfo) -> None:
        """Raises ``BadModelFolder``, and ``ConfigError`` for a model that cannot be divided."""
        model = choose_model(info, config).specification
        if model is None:
            raise ConfigError(f"{info.architecture} is computed by transformers' code, as a whole")
        self._device = choose_device(config.device.device, config.device.device_index)
        self._on_gpu = self._device.type == "cuda"
        self._dtype = choose_dtype(config.model.dtype, info, self._device)
        self._longest = config.model.max_model_len or info.max_model_len
        self._costs = costs_of(config, info, model).layers
        place = RankPlace(0, config.cluster.tensor_parallel_size)
        self._model = own_model(for_length(model, self._longest), place)
        self._names = adapter_for(info).names
        self._quantization = read_quantization(info, config.model.quantization)
        ranks = config.cluster.world_size
        self._threads = config.device.threads or max(1, read_machine().physical_cores // ranks)
        self._config = replace(config, cluster=type(config.cluster)())

    def measure(self, steps: list[Step], context: int) -> list[LayerTimes]:
        """context: positions before the token of each row."""
        context = max(1, min(context, self._longest - WARM_UP - MOST_STEPS - 1))
        kinds = dict[tuple[Layer, int], int]()
        keys = list(zip(self._model.layers, self._costs, strict=True))
        for number, key in enumerate(keys):
            kinds.setdefault(key, number)
        first = kinds[keys[0]]
        executors = [self._executor(first, copies, steps, context) for copies in (FEW, MANY)]
        few, many = self._quickest(executors, steps, context)
        executors.clear()
        pairs = list(zip(few, many, strict=True))
        each = [max(0.0, long - short) / (MANY - FEW) for short, long in pairs]
        rest = [short - FEW * one for short, one in zip(few, each, strict=True)]
        layers = {keys[0]: each}
        for key, number in kinds.items():
            if key not in layers:
                executor = self._executor(number, MANY, steps, context)
                (many,) = self._quickest([executor], steps, context)
                del executor
                pairs = list(zip(rest, many, strict=True))
                layers[key] = [max(0.0, whole - beside) / MANY for beside, whole in pairs]
        look_ups = [self._look_up(step.rows + step.prefill) for step in steps]
        return [
            LayerTimes([layers[key][at] for key in keys], found, rest[at] - found)
            for at, found in enumerate(look_ups)
        ]

    def _quickest(
        self, executors: list[Executor], steps: list[Step], context: int
    ) -> list[list[float]]:
        """Seconds of each step of each of them. They take turns, so that what else goes on in a
        machine is not taken for what one of them computes."""
        found = [[float("inf")] * len(steps) for _ in executors]
        for times, executor in [*zip(found, executors, strict=True)] * ROUNDS:
            for at, step in enumerate(steps):
                times[at] = min(times[at], self._step(executor, step, context))
        return found

    def _decoder(self, number: int, copies: int) -> Decoder:
        """Every copy is stored as the layer is, quantized or plain."""
        model = replace(self._model, layers=(self._model.layers[number],) * copies)
        stored = replace(self._names, layer=self._names.layer.format(number))
        weights = allocate_weights(model, self._dtype, self._device, stored, self._quantization)
        weights.names = self._names
        return random_decoder(model, weights, self._config.model.seed)

    def _executor(self, number: int, copies: int, steps: list[Step], context: int) -> Executor:
        """Of a model of copies of this layer, with room for these steps alone."""
        gc.collect()  # of the one before
        if self._on_gpu:
            torch.cuda.empty_cache()
        config, size = self._config, self._config.cache.block_size
        decoder = self._decoder(number, copies)
        kernels = kernels_for(decoder, size)
        subject = subject_of(decoder, kernels, config, _nobody, None, compresses=False)
        positions = context + WARM_UP + MOST_STEPS + 1
        groups = max(1, len(subject.groups))

        def blocks(step: Step) -> int:
            each = step.rows * blocks_for(positions, size)
            return groups * (each + sum(blocks_for(n, size) for n in prompts_of(step.prefill)))

        sizes = EngineSizes(
            num_blocks=max(map(blocks, steps)),
            block_size=size,
            max_num_seqs=max(map(_slots, steps)),
            max_num_batched_tokens=max(_slots(step) + step.prefill for step in steps),
            max_model_len=max(positions, *(n for step in steps for n in prompts_of(step.prefill))),
            vocab_size=decoder.vocab_size,
            groups=subject.groups,
        )
        executor = executor_of(subject, sizes, _nobody)
        run_first(executor, subject, self._threads, self._threads, _nobody, None)
        return executor

    def _step(self, executor: Executor, step: Step, context: int) -> float:
        """On a GPU without the host's share, which is as long for a model of one layer as for a
        whole one; on a CPU of steps that follow each other a quick one, beside which nothing else
        was computed."""
        timer = StepTimer(
            executor, step.rows, context, MOST_STEPS, TEMPERATURE, 0, step.prefill, warm_up=WARM_UP
        )
        found = _durations(timer, LEAST_STEPS)
        most = min(MOST_STEPS - LEAST_STEPS, int(POINT_SECONDS / max(min(found), 1e-6)))
        device = timer.measure(most // 2).device_us if self._on_gpu and most > 1 else None
        if device is None and most > LEAST_STEPS:
            found += _durations(timer, most)
        timer.close()
        return quantiles(found)[0] if device is None else device / 1e6

    def _look_up(self, tokens: int) -> float:
        """Seconds in which the embedding of so many tokens is read."""
        shape = (self._model.vocab_size, self._model.hidden_size)
        table = torch.zeros(shape, dtype=self._dtype, device=self._device)
        rows = torch.arange(tokens, device=self._device) % len(table)

        def seconds() -> float:
            began = time.perf_counter()
            embedding(rows, table)
            if self._on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        return median(seconds() for _ in range(LOOK_UPS))


def _durations(timer: StepTimer, steps: int) -> list[float]:
    _, ends = timer.run(steps)
    return [later - earlier for earlier, later in pairwise(ends)]


def _slots(step: Step) -> int:
    return step.rows + len(prompts_of(step.prefill))


def _nobody(text: str) -> None:
    """Is told of no progress."""

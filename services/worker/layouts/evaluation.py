"""Which layouts of a model fit on given GPUs, and what each would do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.determinism import contradictions_of_determinism
from penstock.protocol.config.model_dtype import ITEM_BYTES
from penstock.protocol.config.speculation_checks import contradictions_of_drafts
from penstock.protocol.config.tier_checks import contradictions_of_tiers
from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.ahead_checks import type_name
from penstock.services.worker.kv_cache_checks import check_for_gpu
from penstock.services.worker.layouts.division import HOST_GPUS, Layout, layouts
from penstock.services.worker.layouts.given_gpus import GivenGpus
from penstock.services.worker.layouts.roofline import EngineCost, StageCost, rates_of
from penstock.services.worker.layouts.stage_room import limited_layers
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.memory_account import MemoryAccount, shown_bytes
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.model_shape import ModelShape, read_shape
from penstock.services.worker.models.rank_shares import RankPlace
from penstock.services.worker.plan import Planner, has_compressed
from penstock.services.worker.rank_choice import StageLayers, check_division, stage_layers

Objective = Literal["throughput", "latency"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency")
BATCHES = (1, 8, 64)
"""Sequences of an engine for which the time of a token is told."""
_ACROSS_HOSTS = (
    f"a layer is divided within a host, which has {HOST_GPUS} GPUs at most: tensor parallel sizes "
    f"up to {HOST_GPUS} work"
)


class Workload(msgspec.Struct, frozen=True):
    """What a sequence has on average: tokens."""

    prompt: int
    answer: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer

    @property
    def held(self) -> int:
        """Positions of one that runs."""
        return self.prompt + self.answer // 2


class Outcome(msgspec.Struct, frozen=True):
    """A layout that fits. Times are estimates, in seconds."""

    layout: Layout
    stages: StageLayers
    weight_bytes: int
    """Of the GPU that has the most."""
    kv_tokens: int
    """Of one engine: see ``EngineSizes.all_kv_tokens``."""
    max_model_len: int
    sequences: int
    """Of the workload that an engine runs at once."""
    tokens_per_second: float
    """Of answers, by all engines, while each runs as many sequences as it holds."""
    ttft: float
    """Of a prompt that waits for nobody."""
    tpot: dict[int, float]
    """Between two tokens, by the number of sequences of an engine, while no prompt is computed."""
    full_tpot: float
    """The same, on average, while an engine runs as many sequences as it holds, and computes the
    prompts of those that follow."""

    def answer_seconds(self, workload: Workload) -> float:
        """Of a request that is alone."""
        return self.ttft + (workload.answer - 1) * self.tpot[1]


class Refused(msgspec.Struct, frozen=True):
    """A layout that does not fit."""

    layout: Layout
    reason: str


class Engine(NamedTuple):
    accounts: list[MemoryAccount]
    """Of a GPU of each stage."""
    cost: EngineCost
    stages: StageLayers

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return min(account.sizes.max_model_len for account in self.accounts)


class Evaluator:
    """Layouts of one model on one kind of GPUs."""

    def __init__(
        self, info: ModelInfo, config: Config, gpus: GivenGpus, workload: Workload
    ) -> None:
        """Raises ``BadModelFolder`` and ``ConfigError``."""
        self._info, self._config, self._gpus, self._workload = info, config, gpus, workload
        whole = Layout(1, 1, 1)
        self.shape = read_shape(info, whole.config(config, whole.places()[0]))
        self.own_code = choose_model(info, config).specification is not None
        self.dtype = type_name(config.model.dtype, info, on_cpu=False)
        self._rates = rates_of(gpus.gpu, peer=not config.cluster.disable_custom_all_reduce)

    def evaluate(
        self, gpus: int, objective: Objective, given: Mapping[str, int] = MappingProxyType({})
    ) -> tuple[list[Outcome], list[Refused]]:
        """All layouts of so many GPUs: those that fit, the best first, and the others. given: sizes
        that they must have, by their settings. Raises ``ConfigError`` where none has them."""
        wanted = [each for each in layouts(gpus) if given.items() <= each.sizes.items()]
        if not wanted:
            flags = " ".join(f"--{name.replace('_', '-')} {n}" for name, n in given.items())
            raise ConfigError(
                f"{flags}: {gpus} GPUs cannot be laid out so; the sizes multiplied are the number "
                "of GPUs: change one, or leave it out"
            )
        found = [self.outcome(each) for each in wanted]
        fitting = [each for each in found if isinstance(each, Outcome)]
        keys = {
            "throughput": lambda one: -one.tokens_per_second,
            "latency": lambda one: one.answer_seconds(self._workload),
        }
        fitting.sort(key=keys[objective])
        return fitting, [each for each in found if isinstance(each, Refused)]

    def outcome(self, layout: Layout) -> Outcome | Refused:
        engine = self.engine(layout)
        if isinstance(engine, Refused):
            return engine
        if short := self._too_short(engine):
            return Refused(layout, short)
        return self._outcome(layout, engine)

    def engine(self, layout: Layout) -> Engine | Refused:
        """One engine of this layout."""
        if layout.tensor > HOST_GPUS:
            return Refused(layout, _ACROSS_HOSTS)
        accounts: list[MemoryAccount] = []
        stages: list[StageCost] = []
        given, layers = self._divided(layout)
        for place in layout.places():
            config = layout.config(given, place)
            try:
                check_for_gpu(config, self._gpus.device.capability)
                shape = read_shape(self._info, config)
            except ConfigError as failure:
                return Refused(layout, str(failure))
            if wrong := _contradictions(config):
                return Refused(layout, wrong[0])
            account = self._account(config)
            if isinstance(account, str):
                return Refused(layout, account)
            accounts.append(account)
            stages.append(self._stage(place, shape, account))
        batches = min(account.sizes.micro_batches for account in accounts)
        hosts = layout.engine_gpus > HOST_GPUS
        return Engine(accounts, EngineCost(stages, self._rates, batches, hosts=hosts), layers)

    def _divided(self, layout: Layout) -> tuple[Config, StageLayers]:
        """The settings with the layers of each stage in them, and why they are those."""
        config = layout.config(self._config, layout.places()[0])
        try:
            check_division(config, self._info)
            found = stage_layers(config, self._info)
            if found.counts and config.cluster.pipeline_layers == "balanced":
                planner = Planner(self._info, self._gpus.device)
                tokens = self._workload.tokens
                limited = limited_layers(planner, self._info, config, layout, tokens)
                found = limited or found
        except ConfigError:
            return self._config, StageLayers(())  # which is told by who accounts for the stages
        if not found.counts:
            return self._config, found
        layers = ",".join(map(str, found.counts))
        cluster = replace(self._config.cluster, pipeline_layers=layers)
        return replace(self._config, cluster=cluster), found

    def _account(self, config: Config) -> MemoryAccount | str:
        """With KV memory, or why there is none."""
        planner = Planner(self._info, self._gpus.device)
        try:
            return planner.account(config)
        except ConfigError as failure:
            reason = str(failure)
        beside = planner.beside_kv(config)
        if beside.left > (EXTRA_BLOCKS + 1) * beside.block_bytes:
            return reason  # what was asked for is too much
        weights = beside.bytes_of("weights")
        return (
            f"a GPU has {shown_bytes(weights)} of weights and needs "
            f"{shown_bytes(beside.beside - weights)} beside them, of {shown_bytes(beside.usable)} "
            f"that may be used ({beside.limit})"
        )

    def _stage(self, place: RankPlace, shape: ModelShape, account: MemoryAccount) -> StageCost:
        return StageCost(
            shape,
            self._rates,
            ITEM_BYTES[self.dtype],
            ranks=place.shares,
            begins=place.is_first,
            ends=place.is_last,
            compressed=has_compressed(account),
            own_code=self.own_code,
            kind=self._config.cache.kv_kind,
        )

    def _too_short(self, engine: Engine) -> str:
        """Why the workload does not run; empty if it does."""
        longest = engine.max_model_len
        if longest >= self._workload.tokens:
            return ""
        return (
            f"KV memory holds {longest:,} tokens, and a sequence has {self._workload.tokens:,}: "
            "give a shorter --context, or more GPUs to an engine"
        )

    def _outcome(self, layout: Layout, engine: Engine) -> Outcome:
        work, limits, accounts = self._workload, self._config.scheduler, engine.accounts
        held = (one.sizes.num_blocks // one.sizes.sequence_blocks(work.held) for one in accounts)
        sequences, cost = min(limits.max_num_seqs, *held), engine.cost
        step = limits.max_num_batched_tokens
        rate = cost.rate(sequences, work.prompt, work.answer, step)
        batches = [size for size in BATCHES if size <= sequences]
        return Outcome(
            layout=layout,
            stages=engine.stages,
            weight_bytes=max(account.bytes_of("weights") for account in accounts),
            kv_tokens=min(account.kv_tokens for account in accounts),
            max_model_len=engine.max_model_len,
            sequences=sequences,
            tokens_per_second=layout.data * rate,
            ttft=cost.prompt_seconds(work.prompt, step),
            tpot={size: cost.decode_seconds(size, work.held) for size in batches},
            full_tpot=sequences / rate,
        )


def _contradictions(config: Config) -> list[str]:
    """What of the settings does not go together with a layout, which ``config`` has."""
    return [
        *contradictions_of_tiers(config),
        *contradictions_of_determinism(config),
        *contradictions_of_drafts(config),
    ]

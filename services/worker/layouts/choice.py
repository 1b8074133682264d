"""Which layout ``penstock serve`` takes where no size is given, and which given ones cannot be."""

from __future__ import annotations

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_model_info
from penstock.services.worker.layouts.division import Layout, layouts
from penstock.services.worker.layouts.evaluation import Engine, Evaluator, Outcome, Refused
from penstock.services.worker.layouts.given_gpus import GivenGpus
from penstock.services.worker.layouts.report import LayoutRequest, workload_of
from penstock.services.worker.rank_choice import StageLayers

_SHOWN = "`penstock plan MODEL --gpus auto` shows them"

_NAMED = 3
"""Sizes that are named for those that do not fit: of an engine of so few GPUs as hold the model."""


class Choice(msgspec.Struct, frozen=True):
    layout: Layout
    reason: str
    """In a line, with the layout."""
    stages: StageLayers = StageLayers(())


def choose_layout(config: Config, gpus: GivenGpus, *, one_engine: bool = False) -> Choice | str:
    """The layout with the most tokens a second by the roofline, of all that fit on these GPUs or on
    fewer of them; or why no plan can tell which fits. config: complete, but for the sizes.
    one_engine: of the layouts of one engine on the fewest GPUs that hold the model.

    A layout fits where an engine of it starts: where none holds sequences of the usual length, the
    rates are those of the longest that one of them holds. Raises ``BadModelFolder``, and
    ``ConfigError``, with the numbers, where none fits.
    """
    info = read_model_info(config.model.model)
    shorter = ""
    try:
        evaluator = _evaluator(info, config, gpus)
        fitting, refused = _evaluated(evaluator, gpus)
        if not fitting and (tokens := _longest(evaluator, gpus)):
            evaluator = _evaluator(info, config, gpus, tokens)
            fitting, refused = _evaluated(evaluator, gpus)
            shorter = f" in sequences of {tokens:,} tokens (the longest that fit)"
    except (BadModelFolder, ConfigError) as unknown:
        return str(unknown)
    if not fitting:
        if not evaluator.own_code:
            least = min(refused, key=lambda one: one.layout.engine_gpus)
            return f"by an estimate no layout of this model fits on {gpus}: {least.reason}"
        widest = max(refused, key=lambda one: (one.layout.engine_gpus, one.layout.tensor))
        raise ConfigError(
            f"no layout of this model fits on {gpus}; {widest.layout}: {widest.reason}; "
            "`penstock plan MODEL --gpus auto` tells of each"
        )
    if one_engine:
        alone = [one for one in fitting if one.layout.data == 1]
        # The first of those on equally many GPUs is the fastest of them.
        first = min(alone, key=lambda one: one.layout.engine_gpus)
        layout = first.layout
        reason = f"{layout} on {gpus}: one engine on the fewest GPUs that hold the model"
        return Choice(layout, reason, first.stages)
    best = max(fitting, key=lambda one: one.tokens_per_second)
    rate = f"about {best.tokens_per_second:,.0f}{shorter}"
    reason = (
        f"{best.layout} on {gpus}: the most tokens a second, {rate}, "
        f"of {len(fitting)} layouts that fit and {len(refused)} that do not ({_SHOWN})"
    )
    return Choice(best.layout, reason, best.stages)


def refuse_impossible(config: Config, gpus: GivenGpus) -> StageLayers:
    """The layers of each stage; none where no plan can tell.

    Raises ``ConfigError``, with the numbers, where an engine of the sizes that were given does not
    fit on GPUs of this kind, and names the sizes that do. Where no plan can tell whether it fits,
    the worker does. Raises ``BadModelFolder``.
    """
    cluster, engines = config.cluster, config.launch.data_parallel_size
    layout = Layout(cluster.tensor_parallel_size, cluster.pipeline_parallel_size, engines)
    info = read_model_info(config.model.model)
    try:
        evaluator = _evaluator(info, config, gpus)
        if not evaluator.own_code and layout.engine_gpus == 1:
            return StageLayers(())  # its memory is an estimate until it is loaded
        engine = evaluator.engine(layout)
    except (BadModelFolder, ConfigError):
        return StageLayers(())
    if not isinstance(engine, Refused):
        return engine.stages
    fitting: list[Layout] = []
    for count in range(1, gpus.count + 1):
        outcomes, _ = evaluator.evaluate(count, "throughput")
        fitting += [one.layout for one in outcomes if one.layout.data == 1][:1]
    remedy = f"no sizes do on {gpus}"
    if fitting:
        flags = (" ".join(one.flags) or "one GPU an engine" for one in fitting[:_NAMED])
        remedy = f"what fits on {gpus}: {', or '.join(flags)}"
    given = " ".join(layout.flags) or "one GPU an engine"
    raise ConfigError(f"{given}: {engine.reason}; {remedy}")


def _evaluator(
    info: ModelInfo, config: Config, gpus: GivenGpus, context: int | None = None
) -> Evaluator:
    """context: tokens of a sequence, as many as usual unless told."""
    request = LayoutRequest(gpus, str(info.folder), [], context)
    return Evaluator(info, config, gpus, workload_of(config, info, request))


def _evaluated(evaluator: Evaluator, gpus: GivenGpus) -> tuple[list[Outcome], list[Refused]]:
    """All layouts of these GPUs or of fewer of them: those that fit, and the others."""
    fitting: list[Outcome] = []
    refused: list[Refused] = []
    for count in range(gpus.count, 0, -1):
        found = evaluator.evaluate(count, "throughput")
        fitting += found[0]
        refused += found[1]
    return fitting, refused


def _longest(evaluator: Evaluator, gpus: GivenGpus) -> int:
    """Tokens of the longest sequence that an engine of any layout holds; 0: no engine fits."""
    every = (layout for count in range(1, gpus.count + 1) for layout in layouts(count))
    engines = [evaluator.engine(layout) for layout in every if layout.data == 1]
    return max((one.max_model_len for one in engines if isinstance(one, Engine)), default=0)

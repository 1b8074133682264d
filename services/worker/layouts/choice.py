"""Which layout ``penstock serve`` takes where no size is given, and which given ones cannot be."""

from __future__ import annotations

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.layouts.division import Layout
from penstock.services.worker.layouts.evaluation import Evaluator, Outcome, Refused
from penstock.services.worker.layouts.given_gpus import GivenGpus
from penstock.services.worker.layouts.report import LayoutRequest, workload_of

_SHOWN = "`penstock plan MODEL --gpus auto` shows them"

_NAMED = 3
"""Sizes that are named for those that do not fit: of an engine of so few GPUs as hold the model."""


class Choice(msgspec.Struct, frozen=True):
    layout: Layout
    reason: str
    """In a line, with the layout."""


def choose_layout(config: Config, gpus: GivenGpus) -> Choice:
    """The layout with the most tokens a second by the roofline, of all that fit on these GPUs or on
    fewer of them. config: complete, but for the sizes.

    Raises ``BadModelFolder``, and ``ConfigError``, with the numbers, where none fits.
    """
    evaluator = _evaluator(config, gpus)
    fitting: list[Outcome] = []
    refused: list[Refused] = []
    for count in range(gpus.count, 0, -1):
        found = evaluator.evaluate(count, "throughput")
        fitting += found[0]
        refused += found[1]
    if not fitting:
        widest = max(refused, key=lambda one: (one.layout.engine_gpus, one.layout.tensor))
        raise ConfigError(
            f"no layout of this model fits on {gpus}; {widest.layout}: {widest.reason}; "
            "`penstock plan MODEL --gpus auto` tells of each"
        )
    best = max(fitting, key=lambda one: one.tokens_per_second)
    reason = (
        f"{best.layout} on {gpus}: the most tokens a second, about {best.tokens_per_second:,.0f}, "
        f"of {len(fitting)} layouts that fit and {len(refused)} that do not ({_SHOWN})"
    )
    return Choice(best.layout, reason)


def refuse_impossible(config: Config, gpus: GivenGpus) -> None:
    """Raises ``ConfigError``, with the numbers, where an engine of the sizes that were given does
    not fit on GPUs of this kind, and names the sizes that do."""
    cluster, engines = config.cluster, config.launch.data_parallel_size
    layout = Layout(cluster.tensor_parallel_size, cluster.pipeline_parallel_size, engines)
    evaluator = _evaluator(config, gpus)
    if not evaluator.own_code and layout.engine_gpus == 1:
        return  # its memory is an estimate until it is loaded
    engine = evaluator.engine(layout)
    if not isinstance(engine, Refused):
        return
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


def _evaluator(config: Config, gpus: GivenGpus) -> Evaluator:
    info = read_model_info(config.model.model)
    workload = workload_of(config, info, LayoutRequest(gpus, str(info.folder), []))
    return Evaluator(info, config, gpus, workload)

"""``penstock plan --gpus``: layouts as a table for people, or as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.services.worker.layouts.evaluation import (
    BATCHES,
    Evaluator,
    Objective,
    Outcome,
    Refused,
    Workload,
)
from penstock.services.worker.layouts.given_gpus import MOST, GivenGpus
from penstock.services.worker.memory_account import GIB, shown_parameters
from penstock.services.worker.plan import CANNOT_FIT, titled

USUAL_CONTEXT = 2048
"""Tokens of a sequence unless told: as many as most benchmarks have, or fewer."""
_NOT_NATIVE = (
    "transformers' code computes this model: times are told by all of its weights, of experts too"
)
_QUANTIZED = "times are those of plain weights: products of quantized ones are not measured yet"
_FLOAT32 = "rates are those of 16 bits: products in float32 take several times as long"
_HEADS = [
    "TP", "PP", "DP", "weights", "KV tokens", "longest", "sequences", "tokens/s", "TTFT",
    *(f"TPOT at {size}" for size in BATCHES), "full",
]  # fmt: skip


class LayoutRequest(msgspec.Struct, frozen=True):
    """What was asked for on the command line."""

    gpus: GivenGpus
    model: str
    """Its name."""
    command: list[str]
    """``penstock serve`` with the model and the settings that were given, sizes left out."""
    context: int | None = None
    """Tokens of a sequence."""
    output_len: int | None = None
    """Those of them that are the answer."""
    objective: Objective = "throughput"
    sizes: dict[str, int] = {}
    """Parallel sizes that were given, by their settings."""
    as_json: bool = False


def report(config: Config, request: LayoutRequest) -> tuple[str, int]:
    """The layouts in lines, and the exit code: ``CANNOT_FIT`` where none fits.

    Raises ``BadModelFolder`` and ``ConfigError`` for what is wrong whatever the layout.
    """
    info = read_model_info(config.model.model)
    workload = workload_of(config, info, request)
    evaluator = Evaluator(info, config, request.gpus, workload)
    found = evaluator.evaluate(request.gpus.count, request.objective, request.sizes)
    fitting, refused = found
    code = 0 if fitting else CANNOT_FIT
    if request.as_json:
        return _as_json(info, evaluator, workload, request, fitting, refused), code
    lines = [*_head(evaluator, workload, request)]
    if fitting:
        lines += ["", *_table(fitting), "", "Take the first:"]
        lines.append(f"  {command_of(request, fitting[0])}")
        lines += _stages(fitting)
    if refused:
        lines += ["", "These do not fit:", *(f"  {one.layout}: {one.reason}" for one in refused)]
    if not fitting:
        lines += ["", *_remedies(evaluator, request)]
    return "\n".join(lines), code


def workload_of(config: Config, info: ModelInfo, request: LayoutRequest) -> Workload:
    """Raises ``ConfigError`` for a sequence that is too long, and for an answer that is no part of
    it."""
    longest = min(config.model.max_model_len or info.max_model_len, info.max_model_len)
    tokens = request.context or min(USUAL_CONTEXT, longest)
    if tokens > longest:
        raise ConfigError(
            f"--context {tokens}: a sequence of this model may have {longest} tokens (as its "
            "config.json or --max-model-len says); give at most that"
        )
    answer = tokens // 2 if request.output_len is None else request.output_len
    if not 1 <= answer < tokens:
        raise ConfigError(
            f"--output-len {answer}: of the {tokens} tokens of a sequence (--context) the answer "
            f"may have 1 to {tokens - 1}, and the prompt has the others"
        )
    return Workload(tokens - answer, answer)


def command_of(request: LayoutRequest, outcome: Outcome) -> str:
    return shlex.join([*request.command, *outcome.layout.flags])


def _head(evaluator: Evaluator, workload: Workload, request: LayoutRequest) -> Iterator[str]:
    quantized = evaluator.shape.quantized
    dtype = evaluator.dtype if quantized is None else titled(evaluator.dtype, quantized)
    size = shown_parameters(evaluator.shape.parameters, dtype)
    link = f", {request.gpus.gpu.link.name}" if request.gpus.count > 1 else ""
    yield f"{request.model}: {size}, on {request.gpus}{link}"
    yield (
        f"sequences of {workload.tokens:,} tokens, {workload.answer:,} of them the answer; "
        f"{'most tokens a second' if request.objective == 'throughput' else 'shortest answer'} "
        "first; rates and times (ms) are estimates"
    )
    if not evaluator.own_code:
        yield _NOT_NATIVE
    if quantized is not None:
        yield _QUANTIZED
    if evaluator.dtype == "float32":
        yield _FLOAT32


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [_HEADS, *(_cells(one) for one in outcomes)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEADS))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _cells(one: Outcome) -> list[str]:
    each = f"{one.layout.data} × " if one.layout.data > 1 else ""
    return [
        *(str(size) for size in (one.layout.tensor, one.layout.pipeline, one.layout.data)),
        f"{one.weight_bytes / GIB:.1f} GiB",
        f"{each}{one.kv_tokens:,}",
        f"{one.max_model_len:,}",
        f"{each}{one.sequences}",
        f"{one.tokens_per_second:,.0f}",
        *map(_milliseconds, (one.ttft, *map(one.tpot.get, BATCHES), one.full_tpot)),
    ]


def _stages(outcomes: Sequence[Outcome]) -> list[str]:
    """Of each number of stages, once."""
    found = {
        one.layout.pipeline: f"  PP {one.layout.pipeline}: "
        f"{', '.join(map(str, one.stages.counts))} ({one.stages.reason})"
        for one in reversed(outcomes)
        if one.stages.counts
    }
    return ["", "Layers of the stages:", *(found[key] for key in sorted(found))] if found else []


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f}"


def _remedies(evaluator: Evaluator, request: LayoutRequest) -> Iterator[str]:
    count = request.gpus.count
    while (count := 2 * count) <= MOST:
        fitting, _ = evaluator.evaluate(count, request.objective)
        if fitting:
            yield f"{count} of these GPUs hold it: {fitting[0].layout}, for instance"
            return
    yield "no number of these GPUs holds it: `penstock plan --gpu NAME` tells of what one has"


def _as_json(
    info: ModelInfo,
    evaluator: Evaluator,
    workload: Workload,
    request: LayoutRequest,
    fitting: Sequence[Outcome],
    refused: Sequence[Refused],
) -> str:
    gpus = request.gpus
    answer: dict[str, Any] = {
        "model": str(info.folder),
        "parameters": evaluator.shape.parameters,
        "dtype": evaluator.dtype,
        "gpus": {
            "count": gpus.count,
            "name": gpus.device.name,
            "memory_bytes": gpus.device.total,
            "memory_bytes_per_second": gpus.gpu.bandwidth,
            "operations_per_second": gpus.gpu.flops,
            "link": gpus.gpu.link.name,
            "link_bytes_per_second": gpus.gpu.link.bandwidth,
        },
        "prompt_tokens": workload.prompt,
        "answer_tokens": workload.answer,
        "objective": request.objective,
        "layouts": [_fields(one) | {"command": command_of(request, one)} for one in fitting],
        "refused": [one.layout.sizes | {"reason": one.reason} for one in refused],
    }
    return msgspec.json.format(msgspec.json.encode(answer)).decode()


def _fields(one: Outcome) -> dict[str, Any]:
    stages = {"stage_layers": list(one.stages.counts), "stage_reason": one.stages.reason}
    return (
        one.layout.sizes
        | (stages if one.stages.counts else {})
        | {
            "weight_bytes": one.weight_bytes,
            "kv_tokens": one.kv_tokens,
            "max_model_len": one.max_model_len,
            "sequences": one.sequences,
            "tokens_per_second": one.tokens_per_second,
            "ttft_ms": 1e3 * one.ttft,
            "tpot_ms": {str(size): 1e3 * seconds for size, seconds in one.tpot.items()},
            "full_tpot_ms": 1e3 * one.full_tpot,
        }
    )

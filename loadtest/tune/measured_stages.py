"""Divides a model among the stages of a pipeline by times that it measures, in a process of its
own that gives the device back when it ends.

    python -m penstock.loadtest.tune.measured_stages MODEL --stages 2 3 4 --rows 64 --prefill 2048 …

A line of JSON on standard output for each number of stages, a ``StageChoice``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from penstock.loadtest.offline.offline_engine import engine_of
from penstock.loadtest.tune.objective import Workload
from penstock.loadtest.tune.stage_choice import Step, choose_stages
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.flags import build_parser
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.library.server_process import GROUPS
from penstock.services.worker.cpu_libraries import set_up_cpu_libraries
from penstock.services.worker.layouts.division import Layout
from penstock.services.worker.layouts.stage_room import stage_room
from penstock.services.worker.models.stage_division import StageRoom
from penstock.services.worker.plan import Planner, planned_device
from penstock.services.worker.rank_choice import check_division


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    engine = engine_of(parsed)
    config = replace(
        engine.config, model=replace(engine.config.model, model=str(engine.info.folder))
    )
    try:
        layouts = [
            Layout(config.cluster.tensor_parallel_size, stages, 1) for stages in parsed.stages
        ]
        for layout in layouts:
            check_division(layout.config(config, layout.places()[0]), engine.info)
        _measure(config, engine.info, layouts, parsed)
    except (BadModelFolder, ConfigError, ValueError) as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("penstock tune", "Time layers.", GROUPS, positional_model=True)
    parser.add_argument("--stages", type=int, nargs="+", required=True)
    parser.add_argument("--rows", type=int, required=True, help="of a stage's step")
    parser.add_argument("--prefill", type=int, required=True, help="tokens of a step of prompts")
    parser.add_argument("--prompt", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, required=True, help="tokens of an answer")
    return parser


def _measure(
    config: Config, info: ModelInfo, layouts: list[Layout], parsed: argparse.Namespace
) -> None:
    work = Workload(parsed.prompt, parsed.answer)
    # Before anything else takes memory of the device.
    rooms = [_room(config, info, layout, work) for layout in layouts]
    set_up_cpu_libraries()
    from penstock.loadtest.tune.layer_times import LayerMeter

    steps = Step(parsed.rows), Step(1, parsed.prefill)
    meter = LayerMeter(layouts[-1].config(config, layouts[-1].places()[0]), info)
    times = meter.measure(list(steps), work.prompt + work.answer // 2)
    decode, prompts = zip(steps, times, strict=True)
    for layout, room in zip(layouts, rooms, strict=True):
        choice = choose_stages(layout.pipeline, decode, prompts, work.prompt / work.answer, room)
        sys.stdout.write(msgspec.json.encode(choice).decode() + "\n")
        sys.stdout.flush()


def _room(config: Config, info: ModelInfo, layout: Layout, work: Workload) -> StageRoom | None:
    """Ranks on CPUs have the host's memory together, however the layers are divided."""
    if config.device.device == "cpu":
        return None
    planner = Planner(info, planned_device(config, None))
    return stage_room(planner, info, config, layout, work.prompt + work.answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

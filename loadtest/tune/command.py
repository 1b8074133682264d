"""``penstock tune MODEL --objective ttft:200,tpot:20``: measure here, write a configuration.

Exit codes: 0 the file is written, 1 the objective cannot be kept here, time is too short or the
server failed, 2 wrong flags, 3 the model's folder cannot be served, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.loadtest.options import integer, number
from penstock.loadtest.tune.objective import Impossible, Workload, read_objective
from penstock.loadtest.tune.time_limit import OutOfTime, TimeLimit
from penstock.protocol.config import Config, ConfigError, Provenance, resolve
from penstock.protocol.config.complete import complete
from penstock.protocol.config.flags import FlagParser, build_parser
from penstock.protocol.config.machine import Machine, read_machine
from penstock.protocol.config.resolve import fields
from penstock.protocol.config.shown import show
from penstock.services.command_table import COMMANDS
from penstock.services.commands.failure import CommandError

if TYPE_CHECKING:
    from penstock.loadtest.tune.tuning import Found, Task

FAILED, INTERRUPTED = 1, 130
FILE = "penstock-tuned.toml"
SECONDS = 180
TUNED = ("max_num_seqs", "max_num_batched_tokens", "frontends", "tokenizers")
FIXED = (*TUNED, "kernel_table")
"""Settings that are not tuned where they are given."""
MEASURED_GROUPS = ("model", "cache", "scheduler", "speculation", "device", "loading")
MEASURED = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("pipeline_layers", "frontends", "tokenizers"),
)
"""Settings that change what is measured: these, and all of those groups."""


def parser() -> FlagParser:
    found = build_parser(
        "penstock tune",
        "Measure steps and a short load on this machine, and write the settings with which most "
        "requests a second keep the objective, each with its reason. Takes the flags of `penstock "
        "serve`; what they say is kept.",
        COMMANDS["serve"].groups,
        positional_model=True,
    )
    group = found.add_argument_group("tuning")
    group.add_argument(
        "--objective", type=read_objective, required=True, metavar="NAME:MS,…",
        help="what 90 %% of the requests must keep, in milliseconds: ttft, tpot or both, as in "
        "ttft:200,tpot:20",
    )  # fmt: skip
    count = integer(1, 2**20)
    group.add_argument(
        "--input-len", type=count, metavar="N", help="tokens of a prompt, about [256]"
    )
    group.add_argument(
        "--output-len", type=count, metavar="N", help="tokens of an answer, about [64]"
    )
    group.add_argument(
        "--seconds", type=number(1, 86_400), default=SECONDS, metavar="S",
        help=f"how long it may take [{SECONDS}]",
    )  # fmt: skip
    group.add_argument("-o", "--output", metavar="FILE", default=FILE, help=f"[{FILE}]")
    group.add_argument("--force", action="store_true", help="write over a file that is there")
    group.add_argument("--quiet", action="store_true", help="say nothing until the end")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code. Raises ``ConfigError``, ``BadModelFolder``."""
    parsed = parser().parse_args(arguments)
    groups = COMMANDS["serve"].groups
    given, sources = resolve(groups, parsed, os.environ)
    machine = read_machine(environment=os.environ)
    config, known = _whole(given, sources, machine)
    if parsed.show_config:
        print(show(config, known, groups))
        return 0
    path = _file(parsed)
    task = _task(parsed, config, known, sources, machine)
    limit = TimeLimit(parsed.seconds, quiet=parsed.quiet)
    try:
        found = _tuned(task, limit)
    except KeyboardInterrupt:
        return INTERRUPTED
    layout = _layout(config, known)
    settings = _given(given, sources) | layout | found.settings
    reasons = {name: known[name].detail for name in layout} | found.reasons
    path.write_text(_text(path, settings, reasons, found, task, config, parsed))
    print(f"wrote {path}; start the server with: penstock serve --config {path}")
    return 0


def _tuned(task: Task, limit: TimeLimit) -> Found:
    """Raises ``CommandError`` with the reason where there is nothing to write."""
    from penstock.loadtest.tune.load_level import LoadFailed
    from penstock.loadtest.tune.step_process import StepsFailed
    from penstock.loadtest.tune.tuning import Tuning
    from penstock.services.library.server_process import ServerFailed

    with tempfile.TemporaryDirectory(prefix="penstock-tune-") as folder:
        try:
            return Tuning(task, limit, Path(folder)).run()
        except (Impossible, OutOfTime, LoadFailed, StepsFailed, ServerFailed) as error:
            raise CommandError(str(error), FAILED) from None


def _whole(config: Config, sources: Provenance, machine: Machine) -> tuple[Config, Provenance]:
    """As ``penstock serve`` would have it, the layout over several GPUs included. Raises
    ``ConfigError`` and ``BadModelFolder``."""
    from penstock.services.launcher.named_model import with_builtin_model, with_hub_model
    from penstock.services.layout_choice import with_layout

    launch = config.launch
    if launch.nodes > 1 or launch.join or launch.executor != "process":
        raise ConfigError(
            "penstock tune measures this machine alone: leave --nodes, --join and --executor out"
        )
    named = with_hub_model if config.model.model else with_builtin_model
    resolved = named(config, sources)
    whole, _ = with_layout(resolved, complete(*resolved, machine, may_lack_model=False), machine)
    return whole


def _file(parsed: argparse.Namespace) -> Path:
    """Where the result goes; tried before anything is measured. Raises ``ConfigError``."""
    path = Path(parsed.output).expanduser()
    if path.exists() and not parsed.force:
        raise ConfigError(f"--output {path}: it is there already; choose another, or add --force")
    if path.suffix != ".toml":
        raise ConfigError(f"--output {path}: a TOML file is written; give a name that ends so")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None
    return path


def _task(
    parsed: argparse.Namespace,
    config: Config,
    known: Provenance,
    sources: Provenance,
    machine: Machine,
) -> Task:
    """config, known: whole; sources: as given. Raises ``ConfigError``."""
    from penstock.loadtest.tune.estimate import Given
    from penstock.loadtest.tune.tuning import Task
    from penstock.protocol.model_info import read_model_info
    from penstock.protocol.pooling import read_pooling

    info = read_model_info(config.model.model)
    if not read_pooling(info, config.model).generates:
        raise ConfigError(
            "penstock tune is for models that generate: TTFT and TPOT are times of tokens"
        )
    scheduler, cluster = config.scheduler, config.cluster
    divides = not _is_given(sources, "pipeline_layers") and config.device.device != "null"
    declared = fields()
    measured = {
        name: value
        for name, value in _given(config, known).items()
        if declared[name].group in MEASURED_GROUPS or name in MEASURED
    }
    return Task(
        objective=parsed.objective,
        workload=_workload(parsed, config.model.max_model_len or info.max_model_len),
        standing=measured | _layout(config, known) | {"model": config.model.model},
        given=Given(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            frozenset(name for name in FIXED if _is_given(sources, name)),
        ),
        device=config.device.device,
        cores=machine.cores,
        ranks=cluster.world_size,
        engines=config.launch.data_parallel_size,
        measured_stages=cluster.pipeline_parallel_size if divides else 1,
    )


def _workload(parsed: argparse.Namespace, longest: int) -> Workload:
    """Raises ``ConfigError`` for requests that the model does not take."""
    from penstock.loadtest.tune.objective import RANGE

    prompt = parsed.input_len or min(256, longest // 4)
    answer = parsed.output_len or min(64, longest // 8)
    most = int((1 + RANGE) * (prompt + answer)) + 2
    if not prompt >= 1 or not answer >= 2 or most > longest:
        raise ConfigError(
            f"--input-len {prompt} and --output-len {answer}: a request may have up to {most} "
            f"tokens then, of the {longest} that the model takes, and an answer has 2 at least"
        )
    return Workload(prompt, answer)


def _is_given(sources: Provenance, name: str) -> bool:
    return sources[name].origin in ("flag", "file", "environment")


def _given(config: Config, sources: Provenance) -> dict[str, Any]:
    """Settings that flags, a file or the environment gave, by name."""
    return {
        name: getattr(getattr(config, field.group), name)
        for name, field in fields(COMMANDS["serve"].groups).items()
        if _is_given(sources, name) and field.group != "test"
    }


def _layout(config: Config, known: Provenance) -> dict[str, Any]:
    """Sizes that were chosen for this host's GPUs, by name: all servers of a tuning have those, and
    so has the one that the file is for. Empty where nothing was chosen."""
    from penstock.services.layout_choice import SIZES

    return {
        name: getattr(getattr(config, fields()[name].group), name)
        for name in SIZES
        if known[name].origin == "derived"
    }


def _text(
    path: Path,
    settings: dict[str, Any],
    reasons: dict[str, str],
    found: Found,
    task: Task,
    config: Config,
    parsed: argparse.Namespace,
) -> str:
    """The file."""
    from penstock.loadtest.tune.written import written

    kept = f"{found.best}" if found.best.rate else f"requests one at a time: {found.best.p90}"
    head = [
        f"penstock serve --config {path.name}",
        f"Written by `penstock tune` of Penstock {penstock.__version__} on "
        f"{datetime.now():%Y-%m-%d %H:%M} for {config.model.names()[0]} on {platform.node()} "
        f"(device {task.device}, {task.cores} cores), within {parsed.seconds:g} s.",
        f"Objective: {task.objective} for 90 % of the requests, {task.workload}. Best that was "
        f"found: {kept}.",
        *found.told,
        "Settings without a reason were given. Delete what is to be decided anew.",
    ]
    told = {name: f"{reason}." for name, reason in reasons.items() if name in settings}
    return written(settings, told, head)

"""The course of a tuning: steps, a search for the rate that is kept, other sizes, the proof."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.tune.estimate import Given, Sizes, estimate, without_steps
from penstock.loadtest.tune.load_level import Level, LoadFailed
from penstock.loadtest.tune.objective import RANGE, Objective, Workload, refuse, shown_ms
from penstock.loadtest.tune.rate_search import NEAR, RateSearch
from penstock.loadtest.tune.stage_process import measure_stages
from penstock.loadtest.tune.step_points import Steps
from penstock.loadtest.tune.step_process import measure_steps
from penstock.loadtest.tune.time_limit import TimeLimit
from penstock.loadtest.tune.trial import Trial, Trials
from penstock.services.library.server_process import ServerFailed

BUSY = 0.5
"""Of a core, that a frontend or a tokenizer should use at most."""
ALONE = (3, 10)
"""Requests one at a time, at least and at most."""
BEGIN_OPEN = 4
"""Requests of an engine that are open at once, about, at the first rate."""
MOST_OTHERS = 2
"""Other numbers of tokens a step that are tried."""
PROCESSES = ("frontend", "tokenizer")


class Task(msgspec.Struct, frozen=True):
    """What is to be tuned."""

    objective: Objective
    workload: Workload
    standing: dict[str, Any]
    """Settings that were given, by name, as far as they matter to what is measured, and the layout
    that was chosen."""
    given: Given
    device: str
    cores: int
    ranks: int
    """Devices of an engine."""
    engines: int
    measured_stages: int = 1
    """Of a pipeline whose layers are to be divided by what they take here."""


class Found(msgspec.Struct, frozen=True):
    """What came of it."""

    settings: dict[str, Any]
    reasons: dict[str, str]
    best: Level
    """The highest rate that was kept."""
    told: list[str]
    """Sentences about the whole."""


class Tuning:
    """One course. Times in seconds."""

    def __init__(self, task: Task, limit: TimeLimit, folder: Path) -> None:
        """folder: for files of its own, that nobody else may enter."""
        self._task, self._limit, self._folder = task, limit, folder
        self._trials = Trials(task.standing, task.objective, task.workload, limit, folder)
        self._answer_s = 0.0
        """Of a request that is alone."""
        self._told: list[str] = []

    def run(self) -> Found:
        """Raises ``Impossible``, ``OutOfTime``, ``StepsFailed``, ``LoadFailed`` and
        ``ServerFailed``."""
        settings: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        sizes = self._sizes(settings, reasons)
        settings["max_num_seqs"] = sizes.max_num_seqs
        settings["max_num_batched_tokens"] = sizes.max_num_batched_tokens
        reasons |= {"max_num_seqs": sizes.why_seqs, "max_num_batched_tokens": sizes.why_tokens}
        if self._task.measured_stages > 1:
            self._divide(settings, reasons)
        with self._trials.server(settings) as trial:
            alone = self._alone(trial, sizes)
            search = self._search(trial, sizes)
        best = search.low or alone
        self._say_search(search)
        self._limit.found(f"load: {best}")
        self._fewer_sequences(search, settings, reasons)
        if search.low is not None:
            best = self._other_tokens(sizes, best, settings, reasons)
        self._processes(best, settings, reasons)
        self._prove(best, settings)
        return Found(settings, reasons, best, self._told)

    def _search(self, trial: Trial, sizes: Sizes) -> RateSearch:
        """Rates on one server: the first at any price, others while there is time for the proof."""
        self._limit.need(self._load_seconds(), "a load")
        search = RateSearch(
            trial.level,
            self._keeps,
            lambda: self._may_load(servers=1 if search.low or search.high else 0),
        )
        most = 0.5 * sizes.max_num_seqs / max(sizes.request_seconds, 1e-3)
        first = self._task.engines * min(most, BEGIN_OPEN / self._answer_s)
        search.run(first, 0.5 / self._answer_s)
        if not (search.low or search.high):
            self._limit.need(3 * self._load_seconds(), "a load")
        return search

    def _sizes(self, settings: dict[str, Any], reasons: dict[str, str]) -> Sizes:
        """Takes up choices of kernels, too."""
        task = self._task
        if task.ranks > 1:
            why = f"steps of {task.ranks} devices together are not measured, the load is"
            return without_steps(task.given, task.workload, task.objective, why)
        steps = measure_steps(
            task.standing,
            task.device,
            task.given,
            task.objective,
            task.workload,
            self._limit,
            self._folder,
            kernels=task.device == "cuda" and "kernel_table" not in task.given.fixed,
        )
        self._say_steps(steps)
        self._kernels(steps, settings, reasons)
        return estimate(steps, task.objective, task.workload, task.given)

    def _kernels(self, steps: Steps, settings: dict[str, Any], reasons: dict[str, str]) -> None:
        """Choices of kernels that were measured beside the steps."""
        for one in steps.kernels:
            self._limit.found(f"kernels: {one}")
        ended = steps.kernels_measured
        if steps.kernels:
            settings["kernel_table"] = [one.line for one in steps.kernels]
            settings["kernel_table_device"] = steps.device
            reasons["kernel_table"] = "\n".join(map(str, steps.kernels))
            reasons["kernel_table_device"] = "the choices of kernels hold for this GPU alone"
        elif ended is not None and ended.trials:
            self._told.append(
                f"Kernels: of {ended.trials} choices none was better than the standing one."
            )
        if ended is not None and (ended.left or ended.note):
            why = ended.note or f"there was no time for {ended.left}, --seconds gives more"
            self._told.append(f"Not all choices of kernels were measured: {why}.")

    def _divide(self, settings: dict[str, Any], reasons: dict[str, str]) -> None:
        """The layers of a pipeline among its stages."""
        task, limit = self._task, self._limit
        found = measure_stages(
            task.standing, task.measured_stages, task.device, task.given, task.workload, limit,
            self._folder,
        )  # fmt: skip
        if isinstance(found, str):
            self._told.append(f"Layers could not be timed, and are divided as by default: {found}.")
            return
        settings["pipeline_layers"] = ",".join(map(str, found.counts))
        reasons["pipeline_layers"] = found.reason
        limit.found(f"layers: {settings['pipeline_layers']}, {found.reason}")

    def _say_steps(self, steps: Steps) -> None:
        for rows, ms in steps.decode:
            self._limit.found(f"steps: {rows} rows at {steps.context} positions: {shown_ms(ms)}")
        for chunk, rows, ms in steps.prefill:
            text = f"steps: {rows} rows and {chunk} tokens of prompts: {shown_ms(ms)}"
            self._limit.found(text)
        notes = [one.note for one in steps.points if one.note]
        if notes:
            self._told.append(f"Not all steps could be measured: {'; '.join(notes)}.")

    def _alone(self, trial: Trial, sizes: Sizes) -> Level:
        """Requests one at a time: the least that must keep the objective."""
        trial.alone(1)  # what the first request brings about is no part of it
        few, many = ALONE
        wanted = int(self._trials.load_s / max(sizes.request_seconds, 1e-3))
        level = trial.alone(min(many, max(few, wanted)))
        if level.is_cut:
            self._limit.need(10 * self._trials.load_s, "requests one at a time")
        if not level.keeps(0.0):
            raise refuse(
                self._task.objective,
                f"{level.p90}, within which 90 % of the requests were that came one at a time",
            )
        longest = (1 + RANGE) * self._task.workload.answer
        self._answer_s = max(1e-3, (level.ttft + longest * level.tpot) / 1e3)
        self._limit.found(f"load: {level}")
        return level

    def _keeps(self, level: Level) -> bool:
        return level.keeps(self._answer_s)

    def _load_seconds(self) -> float:
        """What a load takes, about."""
        return 1.5 * self._trials.load_s + 2 * self._answer_s + self._trials.around_s

    def _may_load(self, servers: int = 1) -> bool:
        """Whether there is time for one more load beside so many starts with a load each: the last
        is for the proof."""
        later = servers * (self._trials.start_s + self._load_seconds())
        return self._limit.left > self._load_seconds() + later

    def _say_search(self, search: RateSearch) -> None:
        if search.low is None:
            self._told.append(
                "No rate was kept but by requests that come one at a time: any that come together "
                "are too slow."
            )
        if search.high is not None:
            self._told.append(f"Not kept: {search.high}.")
        if search.cut:
            self._told.append(
                "Time was up before a higher rate failed: more may be possible, --seconds gives "
                "more time."
            )

    def _fewer_sequences(
        self, search: RateSearch, settings: dict[str, Any], reasons: dict[str, str]
    ) -> None:
        """Where the load that failed had too long a TPOT with fewer sequences than were allowed,
        no more than lay between it and the one that was kept."""
        task, high, low = self._task, search.high, search.low
        if "max_num_seqs" in task.given.fixed or high is None or task.objective.tpot is None:
            return
        open_then = high.most_open // task.engines
        if high.tpot <= task.objective.tpot or open_then >= settings["max_num_seqs"]:
            return
        kept = 1 if low is None else max(1, low.most_open // task.engines)
        settings["max_num_seqs"] = max(kept, (kept + open_then) // 2)
        reasons["max_num_seqs"] += (
            f"; but under load TPOT was {shown_ms(high.tpot)} with up to {open_then} sequences, "
            f"and short enough with up to {kept}"
        )

    def _other_tokens(
        self, sizes: Sizes, best: Level, settings: dict[str, Any], reasons: dict[str, str]
    ) -> Level:
        """Steps of other lengths, at a rate that is just too high for the best ones so far."""
        tried = []
        for tokens in sizes.others[:MOST_OTHERS]:
            if tokens < settings["max_num_seqs"] or not self._may_load(servers=2):
                continue
            changed = settings | {"max_num_batched_tokens": tokens}
            level = self._on_new_server(changed, NEAR * best.rate)
            self._limit.found(f"load, {tokens} tokens a step: {level}")
            tried.append(f"{tokens}: {level}")
            if isinstance(level, Level) and self._keeps(level):
                settings["max_num_batched_tokens"], best = tokens, level
                break
        if sizes.others:
            told = "; ".join(tried) or "time was left for none"
            reasons["max_num_batched_tokens"] += f".\nOthers under load: {told}"
        return best

    def _processes(self, best: Level, settings: dict[str, Any], reasons: dict[str, str]) -> None:
        """As many frontends and tokenizers as the load needs."""
        for service in PROCESSES:
            name = f"{service}s"
            if name in self._task.given.fixed:
                continue
            if service not in best.cpu:
                self._told.append(f"What {name} took was not measured: they stay as they were.")
                continue
            used = best.cpu[service]
            most = max(1, self._task.cores // 2)
            settings[name] = max(1, min(most, math.ceil(used / BUSY)))
            reasons[name] = (
                f"together they took {used:.2f} of a core under that load; one may take {BUSY:g}, "
                f"and this machine has {self._task.cores}"
            )

    def _prove(self, best: Level, settings: Mapping[str, Any]) -> None:
        """The same load on a server with all that was found, and on one as it stood."""
        if best.rate == 0:
            return
        if not self._may_load(servers=0):
            self._told.append("Time was up before these settings were tried together.")
            return
        level = self._on_new_server(settings, best.rate)
        self._limit.found(f"load, all together: {level}")
        proof = f"On a new server with all of these settings, {level}."
        if isinstance(level, str) or not self._keeps(level):
            proof += (
                " So the rate is not proven: take it for a limit, or tune again on a quiet machine."
            )
        self._told.append(proof)
        if self._may_load(servers=1):
            level = self._on_new_server({}, best.rate)
            self._limit.found(f"load, as it stood: {level}")
            self._told.append(f"With the settings as they stood, {level}.")

    def _on_new_server(self, settings: Mapping[str, Any], rate: float) -> Level | str:
        """What came of a load on a server of its own, or why nothing did."""
        try:
            with self._trials.server(settings) as trial:
                trial.alone(1)
                level = trial.level(rate)
        except (ServerFailed, LoadFailed) as error:
            return f"it failed ({str(error).splitlines()[-1]})"
        return "time was up before its end" if level.is_cut else level

"""Products with quantized weights on a GPU.

    python -m penstock.loadtest.studies.quantized_kernels

For layers of Qwen3-8B's shapes, numbers of rows and formats of weights every kernel that could
compute them, each cut in several ways: microseconds in a CUDA graph over copies of the weight that
no cache holds, GB/s of the weight's bytes, and the error beside fp32. Prints the fastest of each
kernel; ``--json`` keeps all. From that the tables of ``kernels/gpu/code_shapes`` are written.
Kernels are compiled by several processes first.

Exit codes: 0, 1 a case failed or was wrong, 2 wrong flags.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.kernels.gpu.cache_keys import make_keys_stable
from penstock.kernels.gpu.device_facts import facts_of, pretend

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.loadtest.studies.quantized_cases import Case, Layer

FORMATS = ("bf16", "fp8 x fp8", "fp8 blocks", "fp8", "int8", "int4")
_MOST_ERROR = 1e-2
"""Of bf16 results."""
_MOST_CALLS, _REPLAYS = 24, 5
_LEAST_SECONDS = 4e-4
"""A graph takes about so long, if that is not too many calls."""


class Run:
    """Cases of this process: measured within a time, or compiled."""

    def __init__(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self._end = self.begun + seconds
        self.results: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def measure(self, case: Case, wanted: Tensor | None) -> None:
        name = f"{case.shape} {case.rows} {case.format} {case.kernel} ({case.config})"
        try:
            error = _error(case, wanted)
            seconds = _seconds(case)
        except Exception as failure:  # another case may do
            self.failures.append(f"{name}: {type(failure).__name__}: {str(failure)[:300]}")
            return
        if not error < _MOST_ERROR:
            self.failures.append(f"{name}: error {error:.2e}")
        self.results.append({
            "shape": case.shape, "rows": case.rows, "format": case.format, "kernel": case.kernel,
            "config": case.config, "us": round(seconds * 1e6, 2),
            "gb_per_s": round(case.num_bytes / seconds / 1e9), "error": error,
        })  # fmt: skip


def _error(case: Case, wanted: Tensor | None) -> float:
    import torch

    if wanted is None:  # nothing is multiplied
        case.call(0)
        return 0.0
    case.out.fill_(float("nan"))
    case.call(0)
    torch.cuda.synchronize()
    found = case.out.float()
    found = found.sum(0) if found.ndim == 3 else found
    return float((found - wanted).norm() / wanted.norm())


def _seconds(case: Case) -> float:
    """Of one call, the median of several replays of a graph of calls, each for the next copy."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    case.call(case.copies - 1)
    end.record()
    torch.cuda.synchronize()
    once = max(begin.elapsed_time(end) / 1e3, 1e-6)
    calls = max(2, min(_MOST_CALLS, round(_LEAST_SECONDS / once) + 1, max(case.copies, 8)))
    if once < _LEAST_SECONDS:
        calls = max(calls, min(case.copies, _MOST_CALLS))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # without what torch.cuda.graph collects before each
        graph.capture_begin()
        try:
            for call in range(calls):
                case.call(call % case.copies)
        finally:
            graph.capture_end()
    graph.replay()
    found: list[float] = []
    for _ in range(_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / calls)
    return sorted(found)[len(found) // 2]


def measured(run: Run, shapes: Sequence[str], formats: Sequence[str], rows: Sequence[int]) -> None:
    import torch

    from penstock.loadtest.studies.quantized_cases import Layer, cases_of

    device = torch.device("cuda")
    for name in shapes:
        layer = Layer(name, device)
        for format in formats:
            if run.is_over():
                run.failures.append(f"{name}, {format}: no time was left")
                continue
            weights, plain = _weights(layer, format)
            most = layer.reference(plain, wanted_rows(name), format)
            del plain
            for case in cases_of(layer, weights, format, rows):  # type: ignore[arg-type]
                if run.is_over():
                    break
                multiplies = case.kernel != "quantize x"
                run.measure(case, most[: case.rows] if multiplies else None)
            del weights, most
            torch.cuda.empty_cache()


def wanted_rows(name: str) -> int:
    from penstock.loadtest.studies.quantized_cases import ROWS

    return 256 if name == "head" else max(ROWS)


def _weights(layer: Layer, format: str) -> tuple[list[Any], Tensor]:
    """Copies of the weight, and the first in fp32; on the meta device something else for that."""
    from penstock.loadtest.studies.quantized_cases import plain_of

    if format == "bf16":
        plain = layer.plain()
        return plain, plain[0].float()
    kind: Any = format.split()[0]
    coded = layer.coded(kind, blocks=format == "fp8 blocks")
    return coded, coded[0].words if layer.device.type == "meta" else plain_of(coded[0])


def compile_share(
    part: int, parts: int, shapes: Sequence[str], formats: Sequence[str], rows: Sequence[int]
) -> None:
    """Compile every ``parts``-th kernel of all cases into Triton's cache."""
    import torch

    from penstock.kernels.gpu.recorded_launches import Recorder
    from penstock.loadtest.studies.quantized_cases import Layer, cases_of

    major, minor = _capability()
    recorder = Recorder((major, minor))
    for name in shapes:
        layer = Layer(name, torch.device("meta"))
        for format in formats:
            weights, _ = _weights(layer, format)
            for case in cases_of(layer, weights, format, rows):  # type: ignore[arg-type]
                with contextlib.suppress(Exception):  # the measuring process says so
                    case.call(0)
    for one in recorder.recorded[part::parts]:
        with contextlib.suppress(Exception):
            recorder.compile(one)


def _capability() -> tuple[int, int]:
    major, minor = os.environ["PENSTOCK_BENCH_CAPABILITY"].split(".")
    return int(major), int(minor)


@contextlib.contextmanager
def _compiling(processes: int, arguments: Sequence[str], capability: str) -> Iterator[None]:
    """Processes that compile, waited for."""
    environment = {**os.environ, "PENSTOCK_BENCH_CAPABILITY": capability}
    command = [sys.executable, "-m", "penstock.loadtest.studies.quantized_kernels", *arguments]
    started = [
        subprocess.Popen([*command, "--compile", f"{part}/{processes}"], env=environment)
        for part in range(processes)
    ]
    try:
        yield
        for one in started:
            one.wait()
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()


def best(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest of each kernel for each shape, number of rows and format."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in results:
        key = one["shape"], one["rows"], one["format"], one["kernel"]
        if key not in found or one["us"] < found[key]["us"]:
            found[key] = one
    return list(found.values())


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each shape and number of rows."""
    short = {"library": "lib", "widened": "wide", "quantize x": "quant"}
    places = dict.fromkeys((one["shape"], one["rows"]) for one in results)
    for shape, rows in sorted(places, key=lambda place: list(places).index(place)):
        cells = []
        for format in FORMATS:
            own = [o for o in best(results) if (o["shape"], o["rows"], o["format"]) == (
                shape, rows, format)]  # fmt: skip
            texts = [
                f"{short.get(o['kernel'], o['kernel'])} {o['us']:.1f}"
                + (f"/{o['gb_per_s']}" if o["kernel"] != "quantize x" else "")
                + (f" [{_brief(o['config'])}]" if o["config"] else "")
                for o in own
            ]
            if texts:
                cells.append(f"{format}: " + ", ".join(texts))
        yield f"{shape} {rows} | " + " | ".join(cells)


def _brief(config: str) -> str:
    """The numbers of it."""
    words = config.replace(",", " ").split()
    return " ".join(word for word in words if word[0].isdigit()) or config


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parser = argparse.ArgumentParser("penstock.loadtest.studies.quantized_kernels")
    parser.add_argument("--shapes", default="gate+up,down,qkv,out,head")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,4,16,64,256,2048")
    parser.add_argument("--seconds", type=float, default=95.0, help="with compiling")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 4)
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    shapes, formats = parsed.shapes.split(","), parsed.formats.split(",")
    rows = [int(each) for each in parsed.rows.split(",")]
    if parsed.compile:
        pretend(facts_of(_capability()))
        part, parts = parsed.compile.split("/")
        compile_share(int(part), int(parts), shapes, formats, rows)
        return 0
    run = Run(parsed.seconds)
    make_keys_stable()
    import torch

    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="penstock-kernels-")
    flags = ["--shapes", parsed.shapes, "--formats", parsed.formats, "--rows", parsed.rows]
    with torch.inference_mode():
        with _compiling(parsed.processes, flags, capability):
            torch.empty(1, device="cuda")  # the driver's part, meanwhile
        compiled = time.monotonic() - run.begun
        measured(run, shapes, formats, rows)
    if parsed.json:
        parsed.json.write_text("\n".join(map(json.dumps, run.results)) + "\n")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled {compiled:.0f} s, "
        f"all {time.monotonic() - run.begun:.0f} s; µs / GB per s of weights [blocks, warps, deep]"
    )
    print("\n".join(table(run.results)))
    worst: dict[tuple[str, str], float] = {}
    for one in run.results:
        key = one["format"], one["kernel"]
        worst[key] = max(worst.get(key, 0.0), one["error"])
    print("errors: " + ", ".join(f"{f} {k} {e:.1e}" for (f, k), e in worst.items()))
    print(f"{len(run.failures)} failures", *run.failures[:12], sep="\n")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

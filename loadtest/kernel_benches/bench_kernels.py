"""``penstock bench kernels``: each kernel alone, beside the floor of its bytes and operations.

No server is started. Exit codes: 0, 1 the device's limits could not be found, 2 wrong flags,
3 the model's folder cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from penstock.kernels.rotary import RopeParameters
from penstock.loadtest.kernel_benches.kernel_case import Grid, KernelCase, Maker, NotedCall
from penstock.loadtest.kernel_benches.kernel_timer import KernelTimer
from penstock.loadtest.models.make_model import ModelShape
from penstock.loadtest.models.model_sizes import SIZES
from penstock.loadtest.offline.offline_engine import add_result_flags, guarded, recorded
from penstock.loadtest.options import integer
from penstock.loadtest.progress import note
from penstock.loadtest.reports import report
from penstock.loadtest.roofline.decoder_cost import decoder_config
from penstock.loadtest.roofline.device_limits import DeviceLimits, add_limit_flags, limits_of
from penstock.protocol.config.flags import FlagParser
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.cpu_libraries import set_up_cpu_libraries
from penstock.services.worker.model_loading import choose_device
from penstock.services.worker.models.dense import DenseConfig

_LENGTH = integer(1, 2**20)
_GRIDS = {
    "cpu": {"batch_size": [1, 8], "context": [128, 512], "rows": [128], "cached_prefix": [0, 512]},
    "cuda": {
        "batch_size": [1, 8, 64, 256], "context": [512, 4096], "rows": [128, 2048, 8192],
        "cached_prefix": [0, 8192],
    },
}  # fmt: skip
COLUMNS = {
    "kernel": "kernel", "size": "size", "median_us": "µs", "least_us": "least", "most_us": "most",
    "gb_per_s": "GB/s", "tflops": "TFLOP/s", "floor_us": "floor µs", "share": "floor / µs",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parsed = _parser().parse_args(arguments)
    set_up_cpu_libraries()
    device = choose_device(parsed.device)
    config = _config_of(parsed.MODEL)
    grid = _grid(parsed, device)
    if parsed.threads:
        torch.set_num_threads(parsed.threads)

    def measure() -> dict[str, Any]:
        limits = limits_of(parsed, device.type, parsed.dtype)
        dtype = getattr(torch, parsed.dtype)
        maker = Maker(config, dtype, device, parsed.kv_cache_dtype, parsed.window)
        timer = KernelTimer(
            device, repetitions=parsed.repetitions, warm_up=parsed.warm_up, cold=parsed.cold
        )
        chosen = [case for case in _cases(maker, grid) if _wanted(case, parsed.only)]
        return {
            **recorded("kernels", arguments),
            "model": parsed.MODEL,
            "dtype": parsed.dtype,
            "kv_cache_dtype": parsed.kv_cache_dtype,
            "window": parsed.window,
            "cold": parsed.cold,
            "repetitions": parsed.repetitions,
            "limits": limits,
            "kernels": list(_measured(chosen, timer, limits, quiet=parsed.quiet)),
        }

    with torch.inference_mode():
        return guarded(measure, _table, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        "penstock bench kernels",
        usage="penstock bench kernels [MODEL] [flags]",
        description="Time each kernel alone at the sizes of a model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "MODEL", nargs="?", default="0.6b",
        help=f"folder with a config.json, or {', '.join(SIZES)} (default: 0.6b)",
    )  # fmt: skip
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "fp8", "int8"], default="auto",
        help="of keys and values (default: as --dtype)",
    )  # fmt: skip
    parser.add_argument("--threads", type=integer(1, 4096), metavar="N", help="of the CPU")
    parser.add_argument("--block-size", type=int, choices=[8, 16, 32, 64], default=16)
    sizes = parser.add_argument_group("sizes (defaults: cpu; cuda)")
    for name, text in (
        ("batch_size", "sequences of a decode step"),
        ("context", "cached positions of each sequence of a decode step"),
        ("rows", "tokens of a prefill chunk"),
        ("cached_prefix", "cached positions before a prefill chunk"),
    ):
        shown = "; ".join(" ".join(map(str, grid[name])) for grid in _GRIDS.values())
        least = 0 if name == "cached_prefix" else 1
        sizes.add_argument(
            "--" + name.replace("_", "-"), type=integer(least, 2**20), nargs="+", metavar="N",
            help=f"{text} ({shown})",
        )  # fmt: skip
    sizes.add_argument(
        "--window",
        type=_LENGTH,
        default=0,
        metavar="N",
        help="positions that attention sees (default: all)",
    )
    timing = parser.add_argument_group("timing")
    timing.add_argument("--repetitions", type=_LENGTH, default=20, metavar="N")
    timing.add_argument("--warm-up", type=_LENGTH, default=3, metavar="N")
    timing.add_argument(
        "--cold", action="store_true", help="push the operands out of the caches before each call"
    )
    timing.add_argument(
        "--only", nargs="+", metavar="KERNEL", help="kernels whose names begin like this"
    )
    add_limit_flags(parser)
    add_result_flags(parser)
    return parser


def _config_of(model: str) -> DenseConfig:
    """The config of a folder, or of a size by its name. Raises ``BadModelFolder``."""
    if model not in SIZES:
        return decoder_config(read_model_info(model))
    shape = ModelShape(**SIZES[model])
    return DenseConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=1e-6,
        rope=RopeParameters(10_000.0),
        tie_word_embeddings=shape.tie,
        qk_norm=shape.architecture == "qwen3",
    )


def _grid(parsed: argparse.Namespace, device: torch.device) -> Grid:
    defaults = _GRIDS[device.type]
    given = {name: getattr(parsed, name) or default for name, default in defaults.items()}
    return Grid(
        given["batch_size"], given["context"], given["rows"], given["cached_prefix"],
        parsed.block_size,
    )  # fmt: skip


def _cases(maker: Maker, grid: Grid) -> Iterator[KernelCase]:
    if maker.device.type == "cpu":
        from penstock.loadtest.kernel_benches.cpu_kernels import cpu_cases

        return cpu_cases(maker, grid)
    from penstock.loadtest.kernel_benches.gpu_kernels import gpu_cases

    return gpu_cases(maker, grid)


def _wanted(case: KernelCase, only: Sequence[str] | None) -> bool:
    return only is None or case.kernel.startswith(tuple(only))


def _measured(
    cases: Iterable[KernelCase], timer: KernelTimer, limits: DeviceLimits, *, quiet: bool
) -> Iterator[dict[str, Any]]:
    """A row for each case; one whose operands do not fit into memory has no figures."""
    for case in cases:
        if not quiet and sys.stderr.isatty():
            note(f"{case.kernel} {case.size}")
        floor = limits.floor(case.bytes, case.flops)
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {
            "kernel": case.kernel,
            "size": case.size,
            "bytes": case.bytes,
            "flops": case.flops,
            "floor_us": floor * 1e6,
        }
        try:
            call = case.make()
            times = timer.times(call)
        except (torch.OutOfMemoryError, MemoryError):
            row["note"] = "its operands do not fit into the device's memory"
        else:
            row |= {
                "median_us": times.median * 1e6,
                "least_us": times.least * 1e6,
                "most_us": times.most * 1e6,
                "gb_per_s": case.bytes / times.median / 1e9,
                "tflops": case.flops / times.median / 1e12 if case.flops else None,
                "share": floor / times.median,
            }
            if isinstance(call, NotedCall):
                row["note"] = call.note
        yield row


def _table(result: dict[str, Any]) -> str:
    if not result["kernels"]:
        return "no kernel has such a name"
    notes = [
        f"{row['kernel']} {row['size']}: {row['note']}"
        for row in result["kernels"]
        if "note" in row
    ]
    table = report.table(COLUMNS, result["kernels"])
    return "\n".join([report.limits_line(result), "", table, *notes])

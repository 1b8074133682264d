"""What a device can do at most: bytes of memory and arithmetic operations a second.

The floor of a piece of work is the time of its bytes and operations alone at these rates. They come
from flags, from the data sheets of GPUs that are known by name, or from a probe: the fastest of
some copies and of some large products.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from penstock.loadtest.options import number
from penstock.services.worker.gpus import gpu_of_driver

PROBE_SECONDS = 300.0
"""A probe in a process of its own may take so long: it imports torch first."""
_COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
_PRODUCT = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the multiplied matrices."""
_LEAST_REPEATS = 5
_LEAST_SECONDS = 1.0
"""A probe is repeated so often and for so long; the fastest counts."""


class LimitsFailed(RuntimeError):
    """The probe failed. The message holds what it said."""


class DeviceLimits(msgspec.Struct, frozen=True):
    device: str
    """Its name."""
    bandwidth: float
    """Bytes a second, read and written together."""
    flops: float
    """Operations a second in matrix products of the data type in question."""
    source: str
    """Where the two come from."""

    def floor(self, size: float, flops: float) -> float:
        """Seconds that ``size`` bytes and ``flops`` operations need, whichever take longer."""
        return max(size / self.bandwidth, flops / self.flops)


HALF_TYPES = ("bfloat16", "float16")


def known_limits(name: str, dtype: str) -> DeviceLimits | None:
    """What the data sheet of a GPU says; name: that of the driver."""
    gpu = gpu_of_driver(name)
    if gpu is None or dtype not in HALF_TYPES:
        return None
    if dtype == "bfloat16" and gpu.capability < (8, 0):  # its sheet has the rate of float16 alone
        return None
    return DeviceLimits(name, gpu.bandwidth, gpu.flops, "data sheet")


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits of the device, for the floor")
    group.add_argument(
        "--bandwidth-gb", type=number(0, 1e6, above=True), metavar="X",
        help="memory bandwidth in 10^9 bytes a second",
    )  # fmt: skip
    group.add_argument(
        "--peak-tflops", type=number(0, 1e6, above=True), metavar="X",
        help="matrix products in 10^12 operations a second",
    )  # fmt: skip
    group.add_argument(
        "--measure-limits", action="store_true", help="probe also a GPU whose data sheet is known"
    )


def limits_of(parsed: argparse.Namespace, device: str, dtype: str) -> DeviceLimits:
    """The limits of ``cpu`` or ``cuda``, as the flags ask. Imports torch."""
    found = None
    name = device_name(device)
    if not parsed.measure_limits and device == "cuda":
        found = known_limits(name, dtype)
    both = parsed.bandwidth_gb is not None and parsed.peak_tflops is not None
    if found is None:
        found = DeviceLimits(name, 1.0, 1.0, "flags") if both else measured_limits(device, dtype)
    if parsed.bandwidth_gb is not None:
        found = msgspec.structs.replace(found, bandwidth=parsed.bandwidth_gb * 1e9)
    if parsed.peak_tflops is not None:
        found = msgspec.structs.replace(found, flops=parsed.peak_tflops * 1e12)
    if not both and (parsed.bandwidth_gb is not None or parsed.peak_tflops is not None):
        found = msgspec.structs.replace(found, source=f"flags, {found.source}")
    return found


def limits_apart(parsed: argparse.Namespace, device: str, dtype: str) -> DeviceLimits:
    """As ``limits_of``, found by a process of its own that leaves no memory taken on the device.

    Raises ``LimitsFailed``.
    """
    command = [sys.executable, "-m", "penstock.loadtest.roofline.device_limits", device, dtype]
    for flag in ("bandwidth_gb", "peak_tflops"):
        if (value := getattr(parsed, flag)) is not None:
            command += ["--" + flag.replace("_", "-"), repr(value)]
    if parsed.measure_limits:
        command.append("--measure-limits")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    if done.returncode:
        raise LimitsFailed(f"the limits of {device} could not be found: {done.stderr.strip()}")
    return msgspec.json.decode(done.stdout, type=DeviceLimits)


def device_name(device: str) -> str:
    import torch

    if device == "cuda":
        return str(torch.cuda.get_device_name())
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def measured_limits(device: str, dtype: str) -> DeviceLimits:
    """Probe a device: the fastest copy and the fastest square product."""
    import torch

    where, kind = torch.device(device), getattr(torch, dtype)
    source = torch.ones(_COPY_BYTES[device] // 4, dtype=torch.float32, device=where)
    target = torch.empty_like(source)
    size = _PRODUCT[device]
    left = torch.randn(size, size, device=where).to(kind)
    product = torch.empty_like(left)

    def copy() -> None:
        target.copy_(source)

    def multiply() -> None:
        torch.mm(left, left, out=product)

    copying, multiplying = _fastest(copy, device), _fastest(multiply, device)
    moved = 2 * source.numel() * source.element_size()
    return DeviceLimits(device_name(device), moved / copying, 2 * size**3 / multiplying, "measured")


def _fastest(work: Callable[[], None], device: str) -> float:
    """Seconds of the fastest of several calls, after one that is not counted."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times: list[float] = []
    work()
    while len(times) < _LEAST_REPEATS or sum(times) < _LEAST_SECONDS:
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print the limits of the device and type on the command line as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("dtype", choices=["float32", *HALF_TYPES])
    add_limit_flags(parser)
    parsed = parser.parse_args()
    found = limits_of(parsed, parsed.device, parsed.dtype)
    print(json.dumps(msgspec.to_builtins(found)))


if __name__ == "__main__":
    main()

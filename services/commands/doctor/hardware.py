"""Processor, memory, and the GPUs as the driver and torch see them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.protocol.config.machine import Machine
from penstock.protocol.process.limited_process import answer_within
from penstock.services.commands.doctor.finding import Finding, of_bytes
from penstock.services.commands.doctor.software import version

GIB = 1 << 30
LITTLE_MEMORY = 2 * GIB
"""The built-in model needs about so much: every process has libraries of its own."""
PROBE_S = 180.0
"""It imports torch, which reads hundreds of megabytes, and computes something on each GPU."""
CAPABILITY = (7, 5)
"""The least for which torch's present builds have code."""


class _Device(msgspec.Struct):
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


class Product(msgspec.Struct, tag="product"):
    """What came of a product of matrices on a device, which ``device_probe`` prints."""

    device: int
    wrong: int
    """Entries that are not the CPU's."""
    error: str = ""


class Probe(msgspec.Struct, tag="probe"):
    """What ``penstock.services.worker.device_probe`` prints first."""

    torch: str
    built_for: str | None
    """The CUDA version of torch's build; ``None``: it is for CPUs alone."""
    driver_cuda: str | None
    """The newest CUDA version that the driver does; ``None``: there is no driver."""
    threads: int
    devices: list[_Device]
    error: str = ""
    """Why there are no such facts; with devices, why not all of them have computed."""
    products: list[Product] = []


def processor(machine: Machine, root: Path = Path("/")) -> Iterator[Finding]:
    bf16 = "" if machine.multiplies_bf16 else "; no products in bfloat16, so float32 is used"
    yield Finding(
        "processor",
        f"{_model(root)}; {machine.cores} usable cores, {machine.physical_cores} physical{bf16}",
    )
    total = _total_bytes(root)
    of_total = f" of {of_bytes(total)}" if total else ""
    free = f"{of_bytes(machine.free_bytes)} free{of_total}"
    if machine.free_bytes < LITTLE_MEMORY:
        yield Finding(
            "memory", free, "warning",
            f"models need more; a server with the built-in one takes about {LITTLE_MEMORY // GIB} "
            "GiB. End what else runs, or raise the limit of the container",
        )  # fmt: skip
    else:
        yield Finding("memory", free)


def _model(root: Path) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except (OSError, UnicodeDecodeError):
        pass
    return "unknown"


def _total_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def probed(environment: Mapping[str, str], limit_s: float = PROBE_S) -> Probe:
    """Asked in a process of its own: torch may be absent, hang, or end the process. One that does
    not end within ``limit_s`` is killed, and left behind where even that does not end it."""
    command = [sys.executable, "-m", "penstock.services.worker.device_probe"]
    answer = answer_within(command, limit_s, environment)
    return _read(answer.output, answer.ending)


def _read(output: str, why: str) -> Probe:
    """why: what is to be said where something is missing."""
    found, products = None, []
    for line in output.splitlines():
        try:
            one = msgspec.json.decode(line, type=Probe | Product)
        except msgspec.MsgspecError:  # of a library
            continue
        if isinstance(one, Probe):
            found = one
        else:
            products.append(one)
    if found is None:
        return Probe("", None, None, 0, [], f"torch cannot be asked: {why}")
    missing = len(products) < len(found.devices)
    return msgspec.structs.replace(found, products=products, error=why if missing else "")


def driver_version(root: Path = Path("/")) -> str:
    """Of NVIDIA's kernel module, as it writes it; empty where there is none."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text().partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        return ""
    number = re.search(r"\d+\.\d+(\.\d+)?", first)
    return number[0] if number else ""


def torch_and_gpus(machine: Machine, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Nothing where torch is not installed, which is found with the other packages."""
    if version("torch"):
        yield from gpus(machine, probed(environment))


def gpus(machine: Machine, found: Probe, root: Path = Path("/")) -> Iterator[Finding]:
    """machine.gpus: those that a server would use."""
    if found.error and not found.devices:
        yield Finding(
            "torch", found.error, "problem",
            "`python -c 'import torch'` shows more; install torch again (make clean setup)",
        )  # fmt: skip
        return
    build = f"CUDA {found.built_for}" if found.built_for else "CPUs alone"
    yield Finding("torch", f"{found.torch} for {build}, {found.threads} threads")
    does = f"for CUDA {found.driver_cuda} or older" if found.driver_cuda else ""
    parts = [part for part in (driver_version(root), does) if part]
    yield Finding("NVIDIA driver", ", ".join(parts) or "none")
    if not machine.gpus:
        yield Finding("GPUs", "none: a server computes on the CPU")
        return
    if not found.devices:
        yield _unused(machine, found)
        return
    for number, device in enumerate(found.devices):
        yield _gpu(number, device)
        product = next((one for one in found.products if one.device == number), None)
        yield _product(number, product, found.error)


def _unused(machine: Machine, found: Probe) -> Finding:
    """Of GPUs that torch cannot use, though a server would choose them."""
    told = f"{machine.gpus} in this machine, none that torch can use"
    if not found.built_for:
        remedy = "install a build of torch for CUDA (make clean setup TORCH=…)"
    elif not found.driver_cuda:
        remedy = "install the NVIDIA driver; in a container, run it with --gpus all"
    else:
        remedy = (
            f"the driver does CUDA {found.driver_cuda} and torch was built for {found.built_for}: "
            "a newer driver, or an older build of torch"
        )
    return Finding("GPUs", told, "problem", f"{remedy}; or serve with --device cpu")


def _gpu(number: int, device: _Device) -> Finding:
    name = f"GPU {number}"
    capability = ".".join(map(str, device.capability))
    told = (
        f"{device.name}, {of_bytes(device.free_bytes)} free of {of_bytes(device.total_bytes)}, "
        f"compute capability {capability}"
    )
    if device.capability < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        return Finding(
            name, told, "problem", f"torch needs compute capability {needed}; --device cpu"
        )
    if device.free_bytes < device.total_bytes / 2:
        return Finding(
            name, told, "warning",
            "another process uses it: a server takes --gpu-memory-utilization of the whole, 0.9 "
            "unless set; nvidia-smi shows who",
        )  # fmt: skip
    return Finding(name, told)


def _product(number: int, product: Product | None, why: str) -> Finding:
    """product: ``None``: the device did not come to it; why not."""
    name = f"product on GPU {number}"
    if product is None:
        return Finding(
            name, f"none: {why}", "problem",
            "nvidia-smi and dmesg may say why; a restart of the machine frees a stuck driver",
        )  # fmt: skip
    if product.error:
        return Finding(
            name, product.error, "problem",
            "nvidia-smi shows who uses the GPU; else another build of torch, or a newer driver",
        )  # fmt: skip
    if product.wrong:
        return Finding(
            name, f"{product.wrong:,} entries are not the CPU's", "problem",
            "the driver or the GPU computes wrongly: report it with all of this; --device cpu",
        )  # fmt: skip
    return Finding(name, "the same as on the CPU")

"""GPUs by name, as their makers' data sheets give them: for plans without the GPU at hand.

Rates are those of the sheets; what of them is reached is said by who counts with them. Operations
are those of dense products in 16 bits that are summed in fp32. ``docs/planning.md`` names the
sheets.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.config import ConfigError
from penstock.protocol.suggestions import closest
from penstock.services.worker.memory_account import GIB

_VISIBLE_SHARE = 0.985
"""What a driver leaves of a card's memory."""
_ECC_SHARE = 15 / 16
"""What error correction leaves of memory that holds its check bits too."""


class Link(msgspec.Struct, frozen=True):
    """What carries data between the GPUs of a host."""

    name: str
    bandwidth: float
    """Bytes a second that a GPU sends, while it receives as many."""
    nvlink: bool = False


PCIE3, PCIE4, PCIE5 = (Link(f"PCIe {n}.0 x16", 2e9 * 2**n) for n in (3, 4, 5))
NVLINK2, NVLINK3, NVLINK4, NVLINK5 = (
    Link(f"NVLink {n}", bandwidth, nvlink=True)
    for n, bandwidth in ((2, 150e9), (3, 300e9), (4, 450e9), (5, 900e9))
)


class Gpu(msgspec.Struct, frozen=True):
    title: str
    memory: int
    """GiB on the card."""
    capability: tuple[int, int]
    """Compute capability."""
    multiprocessors: int
    bandwidth: float
    """Bytes of its memory a second."""
    flops: float
    """Operations a second."""
    link: Link
    driver_name: str
    """What the driver calls it."""
    inline_ecc: bool = False
    """Whether check bits lie in the memory itself, as with GDDR on cards for servers."""

    @property
    def usable_bytes(self) -> int:
        """What a process sees of it, about."""
        share = _VISIBLE_SHARE * (_ECC_SHARE if self.inline_ecc else 1.0)
        return int(share * self.memory * GIB)


GPUS = {
    "t4": Gpu("NVIDIA T4", 16, (7, 5), 40, 0.3e12, 65e12, PCIE3, "Tesla T4", True),
    "v100": Gpu("NVIDIA V100", 32, (7, 0), 80, 0.9e12, 125e12, NVLINK2, "Tesla V100-SXM2-32GB"),
    "v100-16gb": Gpu(
        "NVIDIA V100 16 GB", 16, (7, 0), 80, 0.9e12, 125e12, NVLINK2, "Tesla V100-SXM2-16GB"
    ),
    "a10": Gpu("NVIDIA A10", 24, (8, 6), 72, 0.6e12, 125e12, PCIE4, "NVIDIA A10", True),
    "a30": Gpu("NVIDIA A30", 24, (8, 0), 56, 0.933e12, 165e12, PCIE4, "NVIDIA A30"),
    "a40": Gpu("NVIDIA A40", 48, (8, 6), 84, 0.696e12, 149.7e12, PCIE4, "NVIDIA A40", True),
    "a100": Gpu(
        "NVIDIA A100 80 GB", 80, (8, 0), 108, 2.039e12, 312e12, NVLINK3, "NVIDIA A100-SXM4-80GB"
    ),
    "a100-pcie": Gpu(
        "NVIDIA A100 80 GB PCIe", 80, (8, 0), 108, 1.935e12, 312e12, PCIE4,
        "NVIDIA A100 80GB PCIe",
    ),
    "a100-40gb": Gpu(
        "NVIDIA A100 40 GB", 40, (8, 0), 108, 1.555e12, 312e12, NVLINK3, "NVIDIA A100-SXM4-40GB"
    ),
    "l4": Gpu("NVIDIA L4", 24, (8, 9), 58, 0.3e12, 121e12, PCIE4, "NVIDIA L4", True),
    "l40s": Gpu("NVIDIA L40S", 48, (8, 9), 142, 0.864e12, 362e12, PCIE4, "NVIDIA L40S", True),
    "h100": Gpu(
        "NVIDIA H100", 80, (9, 0), 132, 3.35e12, 989e12, NVLINK4, "NVIDIA H100 80GB HBM3"
    ),
    "h100-pcie": Gpu(
        "NVIDIA H100 PCIe", 80, (9, 0), 114, 2.0e12, 756e12, PCIE5, "NVIDIA H100 PCIe"
    ),
    "h100-nvl": Gpu(
        "NVIDIA H100 NVL", 94, (9, 0), 132, 3.9e12, 835e12, PCIE5, "NVIDIA H100 NVL"
    ),
    "h200": Gpu("NVIDIA H200", 141, (9, 0), 132, 4.8e12, 989e12, NVLINK4, "NVIDIA H200"),
    "b200": Gpu("NVIDIA B200", 180, (10, 0), 148, 8.0e12, 2250e12, NVLINK5, "NVIDIA B200"),
    "3090": Gpu(
        "NVIDIA GeForce RTX 3090", 24, (8, 6), 82, 0.936e12, 71e12, PCIE4,
        "NVIDIA GeForce RTX 3090",
    ),
    "4090": Gpu(
        "NVIDIA GeForce RTX 4090", 24, (8, 9), 128, 1.008e12, 165.2e12, PCIE4,
        "NVIDIA GeForce RTX 4090",
    ),
    "5090": Gpu(
        "NVIDIA GeForce RTX 5090", 32, (12, 0), 170, 1.792e12, 209.5e12, PCIE5,
        "NVIDIA GeForce RTX 5090",
    ),
    "rtx-6000-ada": Gpu(
        "NVIDIA RTX 6000 Ada", 48, (8, 9), 142, 0.96e12, 364.2e12, PCIE4,
        "NVIDIA RTX 6000 Ada Generation",
    ),
}  # fmt: skip


def gpu_named(name: str, given: str = "") -> Gpu:
    """However it is spelled. given: the flag and its value, by default those of ``--gpu``. Raises
    ``ConfigError`` that lists the known ones."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    for prefix in ("nvidia-", "geforce-", "rtx-"):
        if plain.removeprefix(prefix) in GPUS or plain not in GPUS:
            plain = plain.removeprefix(prefix)
    if plain not in GPUS:
        likely = closest(plain, list(GPUS))
        meant = f"did you mean {likely}? " if likely else ""
        raise ConfigError(f"{given or f'--gpu {name}'}: {meant}known are {', '.join(GPUS)}")
    return GPUS[plain]


def gpu_of_driver(name: str) -> Gpu | None:
    """The one that the driver calls so; names that merely resemble it are other products."""
    return next((gpu for gpu in GPUS.values() if gpu.driver_name == name), None)

"""GPUs by name, as their makers' data sheets give them: for plans without the GPU at hand."""

from __future__ import annotations

import msgspec

from penstock.protocol.config import ConfigError
from penstock.protocol.suggestions import closest
from penstock.services.worker.memory_account import GIB

_VISIBLE_SHARE = 0.985
"""What a driver leaves of a card's memory."""
_ECC_SHARE = 15 / 16
"""What error correction leaves of memory that holds its check bits too."""


class Gpu(msgspec.Struct, frozen=True):
    title: str
    memory: int
    """GiB on the card."""
    capability: tuple[int, int]
    """Compute capability."""
    multiprocessors: int
    inline_ecc: bool = False
    """Whether check bits lie in the memory itself, as with GDDR on cards for servers."""

    @property
    def usable_bytes(self) -> int:
        """What a process sees of it, about."""
        share = _VISIBLE_SHARE * (_ECC_SHARE if self.inline_ecc else 1.0)
        return int(share * self.memory * GIB)


GPUS = {
    "t4": Gpu("NVIDIA T4", 16, (7, 5), 40, True),
    "v100": Gpu("NVIDIA V100", 32, (7, 0), 80),
    "v100-16gb": Gpu("NVIDIA V100 16 GB", 16, (7, 0), 80),
    "a10": Gpu("NVIDIA A10", 24, (8, 6), 72, True),
    "a30": Gpu("NVIDIA A30", 24, (8, 0), 56),
    "a40": Gpu("NVIDIA A40", 48, (8, 6), 84, True),
    "a100": Gpu("NVIDIA A100 80 GB", 80, (8, 0), 108),
    "a100-40gb": Gpu("NVIDIA A100 40 GB", 40, (8, 0), 108),
    "l4": Gpu("NVIDIA L4", 24, (8, 9), 58, True),
    "l40s": Gpu("NVIDIA L40S", 48, (8, 9), 142, True),
    "h100": Gpu("NVIDIA H100", 80, (9, 0), 132),
    "h100-nvl": Gpu("NVIDIA H100 NVL", 94, (9, 0), 132),
    "h200": Gpu("NVIDIA H200", 141, (9, 0), 132),
    "b200": Gpu("NVIDIA B200", 180, (10, 0), 148),
    "3090": Gpu("NVIDIA GeForce RTX 3090", 24, (8, 6), 82),
    "4090": Gpu("NVIDIA GeForce RTX 4090", 24, (8, 9), 128),
    "5090": Gpu("NVIDIA GeForce RTX 5090", 32, (12, 0), 170),
    "rtx-6000-ada": Gpu("NVIDIA RTX 6000 Ada", 48, (8, 9), 142),
}


def gpu_named(name: str) -> Gpu:
    """However it is spelled. Raises ``ConfigError`` that lists the known ones."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    for prefix in ("nvidia-", "geforce-", "rtx-"):
        if plain.removeprefix(prefix) in GPUS or plain not in GPUS:
            plain = plain.removeprefix(prefix)
    if plain not in GPUS:
        likely = closest(plain, list(GPUS))
        meant = f"did you mean {likely}? " if likely else ""
        raise ConfigError(f"--gpu {name}: {meant}known are {', '.join(GPUS)}")
    return GPUS[plain]

"""Settings that the CPU libraries below torch read from the environment, once, at first use."""

from __future__ import annotations

import os
from pathlib import Path


def set_up_cpu_libraries() -> None:
    """Call before torch computes anything. What the user has set is kept.

    - ``GOMP_SPINCOUNT``: how long a waiting OpenMP thread spins before it sleeps; this count is
      some ten microseconds. The default of milliseconds takes the cores from the other
      processes; not spinning at all was measured to halve the speed of small models.
    - ``MKL_CBWR=AUTO,STRICT`` (Intel only): oneMKL's strict reproducibility. Without it a row of
      an fp32 product has other bits for 4, 16 or 64 rows (measured on Sapphire Rapids: with it
      every multiple of 4 agrees, with 1, 2 and 16 threads, at the same speed). On AMD oneMKL
      agrees without it (measured on Zen 5), and with it does not.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if _is_intel():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def _is_intel() -> bool:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return any("GenuineIntel" in line for line in lines if line.startswith("vendor_id"))
    except OSError:
        return False

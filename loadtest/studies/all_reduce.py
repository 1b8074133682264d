"""Sums over the GPUs of this host: over peer memory and by NCCL, whether they are right and how
long they take.

    python -m penstock.loadtest.studies.all_reduce --ranks 2 --json FILE

One process a GPU, each of which sees its own alone, as workers do. First graphs with sums of all
sizes are repeated while the ranks are late at random, and every result is compared with the sum in
fp32 of what NCCL gathers; then each size is timed. Exit codes: 0, 1 a sum was wrong or peer memory
cannot be used, 2 wrong flags.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.loadtest.options import integer
from penstock.services.worker.visible_device import show_one_device

LIMIT_SECONDS = 150.0
_COLUMNS = ("dtype", "rows", "bytes", "one_shot_us", "nccl_us", "fused_us", "nccl_and_norm_us")


def main() -> int:
    """Run with the flags on the command line. Returns the exit code."""
    parsed = _parser().parse_args()
    if parsed.rank is not None:
        from penstock.loadtest.studies.all_reduce_rank import measure

        found = measure(parsed.rank, parsed.ranks, parsed.port, parsed.most_bytes, parsed.repeats)
        print(json.dumps(found), flush=True)
        return 0
    found = _of_all(parsed)
    if parsed.json:
        parsed.json.write_text(json.dumps(found, indent=1))
    _show(found)
    return 1 if found["why_not"] or found["wrong"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=integer(2, 8), default=2, help="GPUs (default: 2)")
    parser.add_argument("--most-bytes", type=integer(1 << 13, 1 << 24), default=1 << 20,
                        help="of the largest sum (default: 1 MiB)")  # fmt: skip
    parser.add_argument("--repeats", type=integer(1, 10**6), default=1000,
                        help="of the graph whose sums are compared (default: 1,000)")  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--rank", type=integer(0, 7), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=integer(0, 65535), default=0, help=argparse.SUPPRESS)
    return parser


def _of_all(parsed: argparse.Namespace) -> dict[str, Any]:
    """What the first rank has measured, with the wrong values of all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes = [f"--ranks={parsed.ranks}", f"--most-bytes={parsed.most_bytes}"]
    command = [sys.executable, "-m", "penstock.loadtest.studies.all_reduce", *sizes,
               f"--repeats={parsed.repeats}", f"--port={port}"]  # fmt: skip
    running = []
    for rank in range(parsed.ranks):
        environment = dict(os.environ)
        show_one_device(rank, environment)
        running.append(
            subprocess.Popen(
                [*command, f"--rank={rank}"], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    try:
        printed = [one.communicate(timeout=LIMIT_SECONDS)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    if any(one.returncode for one in running):
        raise SystemExit(f"ranks ended with {[one.returncode for one in running]}")
    results = [json.loads(text.strip().splitlines()[-1]) for text in printed]
    return {**results[0], "wrong": sum(result["wrong"] for result in results)}


def _show(found: dict[str, Any]) -> None:
    print(f"{found['ranks']} x {found['device']}")
    if found["why_not"]:
        print(f"not over peer memory: {found['why_not']}")
        return
    print(f"{found['compared']} values compared, {found['wrong']} of them wrong")
    print(
        f"largest difference from NCCL {found['from_nccl']:.1e} of the largest value; a look takes "
        f"{found['look_ns']:.0f} ns, an end from the host {found['stop_us']:.0f} us"
    )
    print("".join(f"{name:>18}" for name in _COLUMNS))
    for row in found["times"]:
        print("".join(f"{row[name]:>18}" for name in _COLUMNS))


if __name__ == "__main__":
    sys.exit(main())

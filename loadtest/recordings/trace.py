"""``penstock trace``: what every process of a running server does, on one timeline.

Exit codes: 0, 1 a process did not answer, 2 wrong flags or no such server, 5 refused by the router,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.loadtest.options import number
from penstock.loadtest.recordings.observer import Observer
from penstock.loadtest.recordings.timeline import Recording, chrome_trace, span_shares, step_shares
from penstock.loadtest.reports import report
from penstock.protocol.config import ClusterConfig, ConfigError, resolve
from penstock.protocol.config.flags import build_parser
from penstock.protocol.config.shown import show
from penstock.protocol.process.participant import Ended
from penstock.protocol.process.trace import MAX_SECONDS
from penstock.services.launcher.runtime_folder import running_routers

INCOMPLETE, REFUSED = 1, 5
_GROUPS = ("cluster",)
JOIN_SECONDS = 5.0
STEP_COLUMNS = {
    "process": "process", "steps": "steps", "step_us": "step µs", "pause_us": "between µs",
    "pause_p99_us": "p99", "between_percent": "share between %", "idle_s": "idle s",
}  # fmt: skip
SPAN_COLUMNS = {
    "process": "process", "lane": "lane", "name": "what", "count": "count", "median_us": "µs",
    "percent": "share %",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code.

    Raises ``ConfigError``, ``AddressError`` and ``SecurityError``.
    """
    parsed = parser().parse_args(arguments)
    config, sources = resolve(_GROUPS, parsed, os.environ)
    if parsed.show_config:
        print(show(config, sources, _GROUPS))
        return 0
    output = Path(parsed.output)
    try:
        with output.open("ab"):
            pass
        with _observer(config.cluster, parsed.url) as observer:
            count = len(observer.peers)
            print(f"recording {count} processes for {parsed.seconds:g} s", file=sys.stderr)
            recordings = observer.record(parsed.seconds)
        trace = msgspec.json.encode(chrome_trace(recordings))
        output.write_bytes(trace)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    except Ended as error:
        print(f"penstock: {error}", file=sys.stderr)
        return REFUSED
    _show(recordings, parsed.seconds)
    print(f"\nsaved in {output}; https://ui.perfetto.dev opens it")
    silent = [each for each in recordings if not each.whole]
    for recording in silent:
        reason = recording.refused or "it did not answer, or has ended"
        print(f"penstock: {recording.label}: no trace: {reason}", file=sys.stderr)
    return INCOMPLETE if silent else 0


def parser() -> argparse.ArgumentParser:
    parser = build_parser(
        "penstock trace", "Record what each process of a running server does.", _GROUPS
    )
    parser.add_argument(
        "--url", metavar="URL",
        help="the server of this user on this host that answers there; without it and --router: "
        "the only one",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=number(0, MAX_SECONDS, above=True), default=5.0, metavar="S",
        help=f"how long, {MAX_SECONDS:.0f} at most (default: 5)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", default="trace.json", metavar="FILE", help="(default: trace.json)"
    )
    return parser


def _observer(cluster: ClusterConfig, url: str | None) -> Observer:
    """Joined. Raises ``ConfigError`` when there is no such server, and ``Ended``."""
    if cluster.router:
        observer = _joined(cluster)
        if observer is None:
            raise ConfigError(f"--router {cluster.router}: no answer within {JOIN_SECONDS:g} s")
        return observer
    found: list[Observer] = []
    for router in running_routers(os.environ, cluster.runtime_dir):
        observer = _joined(msgspec.structs.replace(cluster, router=router))
        if observer is None:
            continue
        if url is None or _serves(observer, url):
            found.append(observer)
        else:
            observer.close()
    if len(found) == 1:
        return found[0]
    for observer in found:
        observer.close()
    where = f"--url {url}: " if url else ""
    count = "several servers" if found else "no server"
    raise ConfigError(
        f"{where}{count} of this user on this host; name the router's address, which "
        "`penstock serve` prints, with --router"
    )


def _joined(cluster: ClusterConfig) -> Observer | None:
    observer = Observer(cluster)
    try:
        if observer.join(JOIN_SECONDS):
            return observer
    except BaseException:
        observer.close()
        raise
    observer.close()
    return None


def _serves(observer: Observer, url: str) -> bool:
    """Whether a frontend listens at the port of ``url``."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    return any(peer.identity.http.endswith(f":{port}") for peer in observer.peers)


def _show(recordings: Sequence[Recording], seconds: float) -> None:
    if spans := span_shares(recordings, seconds):
        print(report.table(SPAN_COLUMNS, spans))
    if steps := step_shares(recordings):
        print(f"\n{report.table(STEP_COLUMNS, steps)}")
    for recording in recordings:
        if recording.dropped:
            print(f"{recording.label}: the oldest {recording.dropped:,} events were overwritten")
    hosts = {recording.peer.identity.host for recording in recordings}
    if len(hosts) > 1:
        print(f"the clocks of {', '.join(sorted(hosts))} have nothing to do with each other")

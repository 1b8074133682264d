"""A real Prometheus that scrapes a loaded server answers the query of every panel and alert."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.served import Served
from support.polling import until
from test_monitoring import QUERIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs Debian's package prometheus"
    ),
]
EMPTY_WHEN_WELL = ("Penstock", "overview: Requests refused", "keys: Refused by a limit")
"""Queries that answer nothing of a server that does well."""


def ask(url: str, query: str) -> list[Any]:
    asked = urllib.parse.urlencode({"query": query.replace("$__rate_interval", "10s")})
    with urllib.request.urlopen(f"{url}/api/v1/query?{asked}", timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    result: list[Any] = found["data"]["result"]
    return result


def test_every_query_answers_in_a_prometheus_that_scrapes_a_loaded_server(tmp_path: Path) -> None:
    server = Served("--device", "null", "--null-step-ms", "5", "--data-parallel-size", "2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    target = server.url.partition("//")[2]
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: penstock, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    prometheus = subprocess.Popen(
        [
            *("prometheus", f"--config.file={tmp_path}/prometheus.yml"),
            *(f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"),
            "--enable-feature=exemplar-storage",
        ],
        stderr=subprocess.DEVNULL,
    )
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            server.post(
                "/v1/completions",
                {"model": "penstock-demo", "prompt": "x " * 40, "max_tokens": 20},
                {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"},
            )

    loading = threading.Thread(target=load)
    loading.start()
    try:
        wanted = {
            name: query for name, query in QUERIES.items() if not name.startswith(EMPTY_WHEN_WELL)
        }

        def all_answered() -> bool:
            with contextlib.suppress(OSError):  # it starts
                for name, query in list(wanted.items()):
                    if ask(f"http://{address}", query):
                        del wanted[name]
            return not wanted

        until(all_answered, 90, told=lambda: wanted)
        for query in QUERIES.values():
            ask(f"http://{address}", query)
        asked = "query=penstock_time_to_first_token_seconds_bucket&start=0&end=9999999999"
        url = f"http://{address}/api/v1/query_exemplars?{asked}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            series = json.load(answer)["data"]
        assert series[0]["exemplars"][0]["labels"] == {"trace_id": "ab" * 16}
    finally:
        stop.set()
        loading.join()
        prometheus.terminate()
        prometheus.wait(30)
        server.kill()

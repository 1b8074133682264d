"""While the only engine comes back, no request is judged by limits that it does not know."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from served import Served, served

ATTACH_SECONDS = 2.0


def asked(url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def killed_scheduler(server: Served) -> None:
    for process in server.processes().values():
        if server.role_of(process) == "scheduler":
            process.kill()


def test_token_ids_are_not_refused_while_the_engine_has_no_limits_yet() -> None:
    # The second scheduler waits for its worker's answer, so it does not know the model's limits.
    with served("--device", "null", "--fault", f"worker:delay={ATTACH_SECONDS}@Attach=2") as server:
        models = asked(server.url + "/v1/models")
        assert models[1]["data"][0]["max_model_len"] > 0
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
        assert asked(server.url + "/v1/completions", body)[0] == 200
        killed_scheduler(server)
        while asked(server.url + "/ready")[0] == 200:
            time.sleep(0.01)  # what comes sooner is sent to it yet, and waits for the next one
        assert asked(server.url + "/v1/models") == models
        status, answer = asked(server.url + "/v1/completions", body)  # it waits for the engine
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 2
        assert asked(server.url + "/v1/models") == models

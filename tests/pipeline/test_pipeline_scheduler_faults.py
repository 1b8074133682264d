"""A whole server on the null device: a request of giant plans, and a policy that fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.served import Served, served
from support.pipeline.site_package import install

from penstock.services.launcher.builtin_model import builtin_model

CONTEXT = 131_072
POISON = 13
POLICY = f"""
from penstock.services.scheduler.policy import FirstComeFirstServed

class Policy(FirstComeFirstServed):
    def key(self, request):
        if request.head.priority == {POISON}:
            raise KeyError("this policy has no key for it")
        return super().key(request)
"""


def long_model(folder: Path) -> Path:
    """The built-in model, said to have been trained for a long context."""
    folder.mkdir()
    for file in Path(builtin_model()).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("faults")
    flags = [
        *("--device", "null", "--null-step-ms", "10", "--scheduling-policy", "brittle"),
        *("--model", str(long_model(folder / "long")), "--num-kv-blocks", "20000"),
    ]
    entry_points = {"penstock.scheduling_policies": "brittle = brittle_policy:Policy"}
    environment = install(folder / "site", "brittle_policy", POLICY, entry_points)
    with served(*flags, environment=environment) as found:
        yield found


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def complete(server: Served, request_id: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"x-request-id": request_id, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    return server.post("/v1/completions", {"ignore_eos": True, **body}, headers)


def test_a_hundred_choices_of_the_longest_prompt_are_answered(server: Served) -> None:
    prompt = [10 + position % 500 for position in range(CONTEXT - 1)]
    status, answer = complete(server, prompt=prompt, n=128, max_tokens=1)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 128


def test_a_policy_that_fails_on_a_request_ends_it_with_an_error_and_no_other(
    server: Served,
) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    neighbour = threading.Thread(
        target=lambda: answers.append(complete(server, prompt="Once", max_tokens=300, seed=1))
    )
    neighbour.start()
    while server.metrics().get("penstock_requests_running", 0) < 1:
        time.sleep(0.02)
    status, answer = complete(server, "poison-7", prompt="Once", max_tokens=3, priority=POISON)
    assert status == 500
    assert "the scheduler failed when it took this request in" in answer["error"]["message"]
    neighbour.join(60)
    ((status, answer),) = answers
    assert (status, answer["usage"]["completion_tokens"]) == (200, 300), answer
    server.find("(scheduler 0 ended with exit code 1)")
    server.find("(the scheduler's core failed in add: KeyError)")
    server.find('("poison-7","route".*"event":"request")')
    named = [json.loads(line) for line in server.output.splitlines() if "poison-7" in line]
    said = {line["event"]: (line["id"], line["trace"]) for line in named}
    assert said["a request could not be taken in"] == ("poison-7", TRACE), "the scheduler's line"
    assert said["request"] == ("poison-7", TRACE), "the frontend's line"

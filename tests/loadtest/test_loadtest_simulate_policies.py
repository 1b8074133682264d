"""The simulation of policies: its clock, and the order of the policies on a short trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.loadtest.studies import policy_trace
from penstock.loadtest.studies.policy_trace import RECORDED, Tenant, TraceRequest, generate, read
from penstock.loadtest.studies.simulate_policies import (
    ENGINE,
    Report,
    Simulation,
    StepTime,
    main,
    simulate,
)
from penstock.services.scheduler.fair import FairByTenant
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.policy_choice import POLICIES, make_policy
from penstock.services.scheduler.shortest_job import AGEING_TOKENS_PER_SECOND, ShortestJobFirst


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    """Other draws than the recorded trace, and a quarter of its length."""
    return generate(seed=7, scale=0.25)


@pytest.fixture(scope="module")
def reports(trace: list[TraceRequest]) -> dict[str, Report]:
    return {report.policy: report for report in simulate(trace, list(POLICIES))}


def one(prompt: int, output: int, arrival: float = 0.0, tenant: str = "t") -> TraceRequest:
    return TraceRequest(arrival, tenant, prompt, output, max_tokens=1000)


def test_a_request_alone_takes_what_the_step_times_add_up_to() -> None:
    simulation = Simulation([one(100, 4, arrival=5.0)], make_policy("fcfs"))
    report = simulation.run()
    # A prefill of 100 tokens, then three steps with one decode row.
    assert report.mean_ttft == pytest.approx(0.012 + 100 * 0.0001)
    assert report.mean_e2e == pytest.approx(0.022 + 3 * 0.0121)
    assert report.slowdown == {"t": pytest.approx(1.0)}
    assert report.max_wait == 0.0


def test_a_prompt_longer_than_a_step_is_prefilled_in_two() -> None:
    request = one(3000, 1)
    report = Simulation([request], make_policy("fcfs")).run()
    assert report.mean_ttft == pytest.approx(2 * 0.012 + 3000 * 0.0001)
    assert StepTime().alone(request, ENGINE) == pytest.approx(report.mean_e2e)


def test_requests_that_come_together_share_steps() -> None:
    report = Simulation([one(100, 2), one(50, 2)], make_policy("fcfs")).run()
    assert report.mean_ttft == pytest.approx(0.012 + 150 * 0.0001)
    assert report.mean_e2e == pytest.approx(report.mean_ttft + 0.012 + 2 * 0.0001)


def test_a_request_that_the_engine_cannot_hold_is_named() -> None:
    with pytest.raises(ValueError, match=r"request 1 of the trace.*5000 tokens"):
        Simulation([one(5, 1), one(5000, 1)], make_policy("fcfs")).run()


def test_the_recorded_trace_is_the_one_that_the_seed_gives() -> None:
    recorded = read(RECORDED)
    assert recorded == generate()
    assert 2000 < len(recorded) < 4000
    counts = {t.name: sum(r.tenant == t.name for r in recorded) for t in policy_trace.TENANTS}
    assert counts["batch"] > counts["chat"] + counts["docs"]
    assert all(r.output <= r.max_tokens for r in recorded)


def test_every_policy_ends_every_request(
    trace: list[TraceRequest], reports: dict[str, Report]
) -> None:
    for report in reports.values():
        assert report.requests == len(trace) > 400
        for request, times in zip(trace, report.times, strict=True):
            assert request.arrival <= times.started < times.first_token <= times.ended


def test_no_policy_costs_throughput(reports: dict[str, Report]) -> None:
    best = max(report.throughput for report in reports.values())
    assert all(report.throughput > 0.9 * best for report in reports.values())


def test_sjf_has_the_smallest_mean_latency_by_far(reports: dict[str, Report]) -> None:
    sjf = reports["sjf"]
    for other in ("fcfs", "priority", "fair"):
        assert sjf.mean_ttft < 0.8 * reports[other].mean_ttft
        assert sjf.mean_e2e < 0.85 * reports[other].mean_e2e


@pytest.mark.parametrize("light", ["chat", "docs"])
def test_fair_protects_the_light_tenants_from_the_flood(
    reports: dict[str, Report], light: str
) -> None:
    fair, fcfs = reports["fair"], reports["fcfs"]
    assert fair.slowdown[light] < 4
    assert fair.slowdown[light] < 0.3 * fcfs.slowdown[light]
    assert fair.tenant_ttft[light] < 0.1 * fcfs.tenant_ttft[light]
    # The flood pays for it, but less than what the others gain.
    assert fair.slowdown["batch"] < 3 * fcfs.slowdown["batch"]


def test_priority_keeps_the_order_of_urgency(reports: dict[str, Report]) -> None:
    priority, fcfs = reports["priority"], reports["fcfs"]
    assert priority.tenant_ttft["chat"] < 0.1 * fcfs.tenant_ttft["chat"]
    assert priority.tenant_ttft["docs"] < 0.1 * fcfs.tenant_ttft["docs"]
    assert priority.tenant_ttft["batch"] > fcfs.tenant_ttft["batch"]


def test_fcfs_has_the_smallest_longest_wait(reports: dict[str, Report]) -> None:
    assert all(reports["fcfs"].max_wait <= report.max_wait + 1 for report in reports.values())


def test_nothing_starves_under_sjf(trace: list[TraceRequest], reports: dict[str, Report]) -> None:
    """Nothing starts before a request that came later than the other one's lead allows."""
    times = reports["sjf"].times
    for request, own in zip(trace, times, strict=True):
        lead = (request.prompt + request.max_tokens) / AGEING_TOKENS_PER_SECOND
        for other, others in zip(trace, times, strict=True):
            if other.arrival > request.arrival + lead:
                assert others.started >= own.started


def test_a_long_request_gets_in_while_short_ones_go_on_coming_faster_than_they_are_served() -> None:
    last = 45.0
    tenants = (Tenant("short", 70.0, (100.0, 0.1), (20.0, 0.1), 0, 0.0, last),)
    trace = [*generate(seed=1, tenants=tenants), one(200, 100, 10.0, "long")]
    trace.sort(key=lambda request: request.arrival)
    (number,) = [n for n, request in enumerate(trace) if request.tenant == "long"]
    policies: dict[str, SchedulingPolicy] = {
        "fair": FairByTenant(),
        "sjf": ShortestJobFirst(),
        "without ageing": ShortestJobFirst(ageing=1e-6, longest_lead=1e12),
    }
    started = {
        name: Simulation(trace, policy).run().times[number].started
        for name, policy in policies.items()
    }
    assert started["fair"] < 11.0
    assert started["sjf"] < 0.75 * last
    assert started["without ageing"] > last


def test_the_command_prints_a_table_of_the_policies_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    policy_trace.write(path, [one(10, 2), one(20, 3, 0.5, "u")])
    assert main(["--trace", str(path), "--policy", "sjf", "--policy", "fcfs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 requests of trace.jsonl"
    assert [line.split()[1] for line in lines[3:]] == ["sjf", "fcfs"]
    assert len({len(line) for line in lines[1:]}) == 1
    assert main(["--trace", str(path), "--policy", "fair", "--requests", "1", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["policy"], report["requests"]) == ("fair", 1)
    assert report["mean_ttft"] == pytest.approx(0.013)


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival":0,"tenant":"a","prompt":1,"output":1,"max_tokens":1}\n{"arrival"}')
    for arguments, words in (
        (["--trace", str(path)], "trace.jsonl, line 2"),
        (["--trace", str(tmp_path / "none")], "No such file"),
        (["--trace", "/dev/null"], "holds no request"),
        (["--requests", "1", "--policy", "lifo"], "unknown scheduling policy 'lifo'"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_the_generator_writes_what_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    assert policy_trace.main([str(path), "--seed", "3"]) == 0
    assert read(path) == generate(3) != generate()
    assert "3 tenants" in capsys.readouterr().out

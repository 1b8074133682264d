"""The arithmetic of the figures, on answers whose times are written down here."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from penstock.loadtest.client.answer_stream import Failure
from penstock.loadtest.client.load import Outcome
from penstock.loadtest.client.results import details, failures, prefix_hits, summarise
from penstock.loadtest.client.time_bins import quantiles, timeline

ALL = ("ttft", "tpot", "itl", "e2el", "queue")


def outcome(index: int, started: float, stamps: list[float], **fields: Any) -> Outcome:
    last = stamps[-1] if stamps else started
    known: dict[str, Any] = {
        "index": index, "scheduled": started, "started": started, "stamps": array("d", stamps),
        "last": last, "ended": last, "prompt_tokens": 10, "completion_tokens": len(stamps),
        "failure": None, "text": "",
    }  # fmt: skip
    return Outcome(**(known | fields))


def figures(*outcomes: Outcome, duration: float = 2.0, **limits: float) -> dict[str, Any]:
    return summarise(
        outcomes,
        duration,
        input_lens=[7] * len(outcomes),
        limits=limits,
        names=ALL,
        percentiles=(0, 50, 100),
        since="sent",
    )


ONE = outcome(0, 0.0, [0.1, 0.2, 0.4], scheduled=-0.05)
"""TTFT 100 ms, gaps 100 and 200 ms, TPOT 150 ms, E2EL 400 ms."""
TWO = outcome(1, 0.5, [0.8, 1.1])
"""TTFT 300 ms, a gap of 300 ms, E2EL 600 ms."""


def test_latencies_are_those_of_the_definitions() -> None:
    found = figures(ONE, TWO)
    expected = {
        "mean_ttft_ms": 200, "p0_ttft_ms": 100, "p100_ttft_ms": 300, "std_ttft_ms": 100,
        "mean_tpot_ms": 225, "p0_tpot_ms": 150,
        "mean_itl_ms": 200, "median_itl_ms": 200, "p100_itl_ms": 300,
        "mean_e2el_ms": 500, "p100_e2el_ms": 600,
        "mean_queue_ms": 25, "p100_queue_ms": 50,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_latencies_count_from_when_a_request_was_to_be_sent_unless_asked_otherwise() -> None:
    """Coordinated omission: the second request waited 400 ms in the client."""
    late = outcome(1, 0.5, [0.8, 1.1], scheduled=0.1)
    found = summarise(
        [ONE, late], 2.0, input_lens=[7, 7], limits={}, names=ALL, percentiles=(0, 100)
    )
    expected = {
        "p0_ttft_ms": 150, "p100_ttft_ms": 700, "p0_e2el_ms": 450, "p100_e2el_ms": 1000,
        "p100_queue_ms": 400, "mean_itl_ms": 200, "mean_tpot_ms": 225,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_prefix_hits_are_those_that_the_server_tells() -> None:
    told = outcome(0, 0.0, [0.1], cached_tokens=8)
    silent = outcome(1, 0.0, [0.1], prompt_tokens=100)
    assert prefix_hits([told, silent]) == {"total_cached_tokens": 8, "prefix_hit_share": 0.8}
    assert prefix_hits([silent]) == {"total_cached_tokens": None, "prefix_hit_share": None}


def test_a_time_line_shares_the_run_over_round_bins() -> None:
    found = timeline([outcome(0, 0.0, [0.15, 0.25]), outcome(1, 0.1, [0.35])], 0.35, "sent")
    assert found["bin_s"] == 0.1
    assert found["arrived"] == [1, 1, 0, 0]
    assert found["completed"] == [0, 0, 1, 1]
    assert found["open"] == pytest.approx([1, 2, 1.5, 0.5])
    assert found["output_tokens_per_s"] == pytest.approx([0, 10, 10, 10])
    assert found["median_ttft_ms"] == [None, 150.0, None, 250.0]
    assert len(timeline([outcome(0, 0.0, [3000.0])], 3000.0, "sent")["open"]) <= 121


def test_quantiles_are_the_latencies_below_which_a_share_stays() -> None:
    found = quantiles([outcome(n, 0.0, [n / 1000]) for n in range(101)], "sent")
    assert found["ttft"] == pytest.approx(list(found["shares"]))
    assert "itl" not in found  # nothing was measured


def test_rates_are_over_the_duration() -> None:
    found = figures(ONE, TWO)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 2.5
    assert found["total_token_throughput"] == 12.5
    assert found["max_concurrent_requests"] == 1
    assert figures(ONE, outcome(1, 0.3, [0.5]))["max_concurrent_requests"] == 2


def test_the_busiest_second_shares_an_answers_tokens_over_its_chunks() -> None:
    found = figures(outcome(0, 0.0, [0.5, 0.9, 1.5], completion_tokens=6), duration=1.5)
    assert found["max_output_tokens_per_s"] == 4.0


def test_tpot_is_by_tokens_and_leaves_out_answers_of_one() -> None:
    found = figures(outcome(0, 0.0, [0.1, 0.5], completion_tokens=5), outcome(1, 0.0, [0.3]))
    assert found["mean_tpot_ms"] == pytest.approx(100)


def test_without_usage_chunks_and_known_lengths_are_counted() -> None:
    found = figures(outcome(0, 0.0, [0.1, 0.5], completion_tokens=None, prompt_tokens=None))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (7, 2)


def test_goodput_wants_all_limits_kept() -> None:
    assert figures(ONE, TWO, ttft=300.1, e2el=400.1)["request_goodput"] == 0.5
    assert figures(ONE, TWO, ttft=300.1, e2el=600.1)["request_goodput"] == 1.0
    assert figures(ONE, TWO, ttft=99.0)["request_goodput"] == 0.0
    assert figures(outcome(0, 0.0, [0.1]), tpot=0.0)["request_goodput"] == 0.5


def test_a_run_in_which_nothing_succeeded_has_zeros() -> None:
    failed = outcome(0, 0.0, [], failure=Failure("connect", "refused"), completion_tokens=None)
    found = figures(failed, duration=0.0)
    assert (found["completed"], found["failed"], found["p50_ttft_ms"]) == (0, 1, 0.0)
    assert figures(duration=0.0)["request_throughput"] == 0.0


def test_failures_show_a_few_different_messages() -> None:
    failed = [outcome(n, 0.0, [], failure=Failure("http 500", f"no {n % 6}")) for n in range(20)]
    found = failures([*failed, outcome(20, 0.0, [], failure=Failure("timeout", "late"))])
    assert list(found) == ["http 500", "timeout"]
    assert found["http 500"] == {"count": 20, "examples": ["no 0", "no 1", "no 2"]}


def test_details_are_in_the_order_of_sending() -> None:
    found = details([TWO, ONE], [7, 7], "sent")
    assert found["ttfts"] == pytest.approx([0.1, 0.3])
    assert found["itls"][0] == pytest.approx([0.1, 0.2])
    assert found["start_times"] == [0.0, 0.5]
    assert found["queue_delays"] == pytest.approx([0.05, 0.0])

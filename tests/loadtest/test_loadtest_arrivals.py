"""When requests arrive."""

from __future__ import annotations

import math
import statistics

import pytest

from penstock.loadtest.client.arrivals import Ramp, arrival_times, burst_times, ramp_times


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("rate", [0.5, 16.0, 1000.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_rate_is_the_asked_one(rate: float, seed: int) -> None:
    times = arrival_times(300, rate, 1.0, seed)
    assert len(times) == 300
    assert times == sorted(times)
    assert times[-1] == pytest.approx(300 / rate)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(4, math.inf, 1.0, 0) == [0.0] * 4


def test_the_same_seed_gives_the_same_times_and_another_others() -> None:
    assert arrival_times(100, 8.0, 1.0, 5) == arrival_times(100, 8.0, 1.0, 5)
    assert arrival_times(100, 8.0, 1.0, 5) != arrival_times(100, 8.0, 1.0, 6)


def test_the_gaps_of_burstiness_1_are_exponential() -> None:
    """Share of gaps above k means is e^-k (Kolmogorov: 1.63 / sqrt(n) at 1 %)."""
    n = 20_000
    found = gaps(arrival_times(n, 10.0, 1.0, 1))
    for k in (0.1, 0.5, 1.0, 2.0, 3.0):
        share = sum(gap > k / 10.0 for gap in found) / n
        assert share == pytest.approx(math.exp(-k), abs=1.63 / math.sqrt(n))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 100.0])
def test_burstiness_sets_how_regular_the_gaps_are(burstiness: float) -> None:
    """A gamma distribution of shape b has a coefficient of variation of 1 / sqrt(b)."""
    found = gaps(arrival_times(20_000, 10.0, burstiness, 2))
    variation = statistics.pstdev(found) / statistics.mean(found)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


@pytest.mark.parametrize("kind", ["linear", "exponential"])
@pytest.mark.parametrize(("first", "last"), [(2.0, 50.0), (50.0, 2.0), (9.0, 9.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(kind: Ramp, first: float, last: float) -> None:
    """Of the rate's integral over each tenth of the run, as many arrivals come."""
    n = 20_000
    times = ramp_times(n, first, last, kind, 100.0, 3)
    assert times == sorted(times)
    length = times[-1]
    mean = (first + last) / 2
    if kind == "exponential" and first != last:
        mean = (last - first) / math.log(last / first)
    assert length == pytest.approx(n / mean, rel=1e-6)
    for tenth in range(10):
        begin, end = length * tenth / 10, length * (tenth + 1) / 10
        share = (tenth + 0.5) / 10
        middle = first + (last - first) * share
        if kind == "exponential":
            middle = first * (last / first) ** share
        found = sum(begin < time <= end for time in times) / (end - begin)
        assert found == pytest.approx(middle, rel=0.03)


def test_bursts_come_at_once_and_others_between_them() -> None:
    assert burst_times(5, 2, 3.0, math.inf, 1.0, 0) == [0.0, 0.0, 3.0, 3.0, 6.0]
    mixed = burst_times(100, 5, 1.0, 10.0, 1.0, 0)
    assert mixed == sorted(mixed)
    assert [mixed.count(float(second)) for second in range(6)] == [5] * 6
    between = [time for time in mixed if not time.is_integer()]
    assert len(between) / mixed[-1] == pytest.approx(10, rel=0.3)

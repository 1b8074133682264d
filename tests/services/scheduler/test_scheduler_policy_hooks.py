"""What a policy is told: each hook at its time, and no token twice."""

from __future__ import annotations

from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.services.scheduler.policy import FirstComeFirstServed
from penstock.services.scheduler.sequence import Request, Sequence


class Recorder(FirstComeFirstServed):
    """First come, first served, a lane for each tenant; writes down what it hears."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, float | None]] = []
        self.prefilled: dict[int, list[int]] = {}
        self.decoded: dict[int, int] = {}
        self.finished: list[tuple[int, int]] = []
        self.lists: list[list[Sequence]] = []

    def lane(self, request: Request) -> str:
        return request.head.tenant

    def lane_key(self, lane: str) -> float:
        return float(len(lane))

    def on_lane_opened(self, lane: str, floor: float | None) -> None:
        self.opened.append((lane, floor))

    def on_prefill(self, sequence: Sequence, count: int) -> None:
        self.prefilled.setdefault(sequence.request.id, []).append(count)

    def on_decode(self, decoding: list[Sequence]) -> None:
        if not self.lists or self.lists[-1] is not decoding:
            self.lists.append(decoding)
        for sequence in decoding:
            self.decoded[sequence.request.id] = self.decoded.get(sequence.request.id, 0) + 1

    def on_finished(self, sequence: Sequence) -> None:
        self.finished.append((sequence.request.id, sequence.num_output))


def test_a_lane_is_opened_by_the_first_new_request_that_waits_in_it() -> None:
    recorder = Recorder()
    engine = Engine(small(max_num_seqs=1), policy=recorder)
    for request_id, tenant in enumerate(["bob", "bob", "a", "bob"]):
        engine.submit(request_id, prompt(5), max_tokens=2, tenant=tenant)
    assert recorder.opened == [("bob", None), ("a", 3.0)]
    engine.run()
    engine.submit(9, prompt(5), max_tokens=2, tenant="bob")
    assert recorder.opened[2:] == [("bob", None)]


def test_every_prompt_token_and_every_decode_row_is_told_once() -> None:
    recorder = Recorder()
    engine = Engine(small(max_num_batched_tokens=8, num_blocks=60), policy=recorder, caching=False)
    engine.submit(1, prompt(20), max_tokens=6)
    engine.submit(2, prompt(3, 50), max_tokens=4)
    engine.run()
    assert recorder.prefilled[1] == [8, 8, 4]
    assert sum(recorder.prefilled[2]) == 3
    # The last chunk draws the first token, so a request decodes one token less than it has.
    assert recorder.decoded == {1: 5, 2: 3}
    assert sorted(recorder.finished) == [(1, 6), (2, 4)]


def test_the_list_of_decode_rows_is_a_new_one_only_when_the_rows_change() -> None:
    recorder = Recorder()
    engine = Engine(small(num_blocks=60), policy=recorder)
    engine.submit(1, prompt(3), max_tokens=20)
    engine.submit(2, prompt(3, 50), max_tokens=10)
    engine.run()
    assert [len(rows) for rows in recorder.lists] == [2, 1]


def test_tokens_from_the_prefix_cache_are_not_told() -> None:
    recorder = Recorder()
    engine = Engine(policy=recorder)
    for request_id in (1, 2):
        engine.submit(request_id, prompt(20), max_tokens=2)
        engine.run()
    assert recorder.prefilled == {1: [20], 2: [4]}


def test_tokens_computed_anew_are_not_told_again() -> None:
    recorder = Recorder()
    limits = small(num_blocks=9, max_num_batched_tokens=60)
    engine = Engine(limits, policy=recorder, caching=False)
    for request_id in (1, 2):
        engine.submit(request_id, prompt(8, 20 * request_id), max_tokens=20)
    engine.run()
    assert engine.core.stats().counters.preemptions > 0
    for request_id in (1, 2):
        told = sum(recorder.prefilled[request_id]) + recorder.decoded[request_id]
        # All positions but the last token's; one drawn in vain is possible at each preemption.
        assert 27 <= told <= 27 + engine.core.stats().counters.preemptions


def test_what_is_cancelled_is_never_told_as_finished() -> None:
    recorder = Recorder()
    engine = Engine(policy=recorder)
    engine.submit(1, prompt(5), max_tokens=9)
    engine.step()
    engine.cancel(1)
    engine.run()
    assert recorder.finished == []

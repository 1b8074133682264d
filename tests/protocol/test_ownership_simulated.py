"""Property tests of the ownership rules on a simulated network."""

from __future__ import annotations

import random

import pytest
from simulated_cluster import (
    FrontendNode,
    Node,
    Record,
    RouterNode,
    SchedulerNode,
    TokenizerNode,
    World,
    expected_events,
)

from penstock.protocol.sampling import SamplingParams


def start(world: World, frontends: int = 2, tokenizers: int = 2, engines: int = 2) -> RouterNode:
    router = RouterNode(world)
    for kind, count in (
        (FrontendNode, frontends),
        (TokenizerNode, tokenizers),
        (SchedulerNode, engines),
    ):
        for _ in range(count):
            kind(world)
    world.run(world.now + 4.0)
    return router


def load(world: World, records: list[Record], count: int, over: float, cancel: float = 0.0) -> None:
    """``count`` requests at random moments of the next ``over`` seconds."""
    rng = random.Random(world.random.random())

    def arrive() -> None:
        frontends = world.of(FrontendNode)
        if not frontends:
            return
        frontend = rng.choice(frontends)
        assert isinstance(frontend, FrontendNode)
        stop = [f"<{rng.randrange(1, 1001)}>"] if rng.random() < 0.3 else []
        params = SamplingParams(
            temperature=0.0, top_p=1.0, top_k=0, seed=1, n=rng.choice([1, 1, 1, 3]),
            max_tokens=rng.randrange(1, 120), stop=stop,
        )  # fmt: skip
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
        record = frontend.submit(prompt, params, rng.randrange(101))
        records.append(record)
        if rng.random() < cancel:
            world.after(rng.random() * 2, lambda: record.ended or frontend.cancel(record))

    for _ in range(count):
        world.after(rng.random() * over, arrive)


def open_anywhere(world: World) -> dict[str, int]:
    found = {}
    for node in world.nodes.values():
        match node:
            case FrontendNode() | TokenizerNode():
                found[node.address] = len(node.ledger.open)
            case SchedulerNode():
                found[node.address] = len(node.core.open)
            case RouterNode():
                found[node.address] = len(node.dispatcher.held)
    return {address: count for address, count in found.items() if count}


def check(records: list[Record], *, may_reject: bool) -> None:
    for record in records:
        assert record.late == 0
        assert record.accepted <= 1
        if record.cancelled or (record.frontend is not None and not record.frontend.alive):
            continue
        if record.rejected:
            assert may_reject, record.rejected
            assert len(record.rejected) == 1
            continue
        assert sorted(record.ends) == list(range(record.params.n)), record
        for choice, ends in record.ends.items():
            assert len(ends) == 1
            events, tokens = expected_events(record, choice)
            assert record.answers[choice].events() == events
            assert record.tokens[choice] == tokens


def kill_and_replace(world: World, router: list[RouterNode], kind: type[Node]) -> None:
    """One process dies at a random moment; its replacement comes a little later."""
    victims = world.of(kind)
    if not victims:
        return
    victim = world.random.choice(victims)
    world.kill(victim)
    if kind is RouterNode:
        world.after(world.random.random(), lambda: router.__setitem__(0, RouterNode(world)))
        return
    if world.random.random() < 0.7:  # the others fall silent without an obituary
        world.after(0.01, lambda: router[0].alive and router[0].report_death(victim))
    world.after(0.5 + world.random.random(), lambda: kind(world) and None)


@pytest.mark.parametrize("seed", range(5))
def test_on_a_perfect_network_every_request_ends_once_with_its_own_text(seed: int) -> None:
    world = World(seed)
    start(world)
    records: list[Record] = []
    load(world, records, 150, 10.0, cancel=0.2)
    world.run(40.0)
    check(records, may_reject=False)
    assert open_anywhere(world) == {}


@pytest.mark.parametrize("seed", range(12))
def test_lost_messages_cost_time_but_no_text(seed: int) -> None:
    world = World(seed, loss=0.02, delay=0.02)
    start(world)
    records: list[Record] = []
    load(world, records, 80, 10.0, cancel=0.2)
    world.run(90.0)
    check(records, may_reject=True)
    assert sum(bool(r.rejected) for r in records) <= 2 + len(records) // 10
    assert open_anywhere(world) == {}


@pytest.mark.parametrize("kind", [RouterNode, TokenizerNode, SchedulerNode])
@pytest.mark.parametrize("seed", range(6))
def test_a_death_is_survived_by_every_request(kind: type[Node], seed: int) -> None:
    world = World(seed)
    router = [start(world)]
    records: list[Record] = []
    load(world, records, 100, 10.0, cancel=0.1)
    for at in (2.0, 5.0, 8.0):
        world.after(at, lambda: kill_and_replace(world, router, kind))
    world.run(100.0)
    check(records, may_reject=False)
    assert open_anywhere(world) == {}


@pytest.mark.parametrize("kind", [TokenizerNode, SchedulerNode])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_on_its_way_to_the_only_one_that_stops_waits_for_the_next(
    kind: type[Node], seed: int
) -> None:
    """Whether it had accepted a request when it stopped, nobody knows; it may also go on."""
    world = World(seed)
    start(world, tokenizers=1, engines=1)
    records: list[Record] = []
    load(world, records, 100, over=2.0)  # its silence is noticed after that
    [late] = world.of(kind)
    world.after(0.2, lambda: world.stop(late))
    world.after(6.0, lambda: kind(world) and None)
    world.after(6.0 + world.random.random(), lambda: world.go_on(late))
    world.run(world.now + 30.0)
    assert late.address not in world.nodes, "it hears that it is lost"
    check(records, may_reject=False)
    assert open_anywhere(world) == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_dead_frontend_leaves_nothing_open(seed: int) -> None:
    world = World(seed)
    router = [start(world)]
    records: list[Record] = []
    load(world, records, 60, 5.0)
    for at in (1.0, 3.0):
        world.after(at, lambda: kill_and_replace(world, router, FrontendNode))
    world.run(60.0)
    check(records, may_reject=False)
    assert open_anywhere(world) == {}


@pytest.mark.parametrize("seed", range(15))
def test_everything_at_once(seed: int) -> None:
    world = World(seed, loss=0.005, delay=0.01)
    router = [start(world, 2, 3, 3)]
    records: list[Record] = []
    load(world, records, 120, 20.0, cancel=0.2)
    kinds = [RouterNode, TokenizerNode, SchedulerNode, FrontendNode]
    for _ in range(6):
        kind = world.random.choice(kinds)
        world.after(world.random.random() * 20, lambda k=kind: kill_and_replace(world, router, k))
    world.run(150.0)
    check(records, may_reject=True)
    assert sum(bool(r.rejected) for r in records) <= 3 + len(records) // 10
    assert open_anywhere(world) == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_full_engine_turns_requests_away_soon_and_without_a_storm(seed: int) -> None:
    world = World(seed)
    start(world, engines=1)
    [engine] = world.of(SchedulerNode)
    assert isinstance(engine, SchedulerNode)
    engine.core.room = 5
    records: list[Record] = []
    load(world, records, 200, over=1.0)
    world.run(world.now + 15.0)
    check(records, may_reject=True)
    refused = [record.rejected[0] for record in records if record.rejected]
    assert 0 < len(refused) < 200
    assert engine.core.refusals <= 4 * len(records)
    assert all(answer.status == 503 and answer.retry_after for answer in refused)
    assert all(record.ended or record.cancelled for record in records)
    assert open_anywhere(world) == {}

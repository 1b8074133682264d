"""Whatever happens to messages and processes: every request reaches one end with its own text.

The rules of ownership, the router's choice, the scheduler with its core and the worker's message
loop are the real ones, on a simulated network under a virtual clock.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.simulation.simulated_clients import Asked, Crowd, Record
from support.simulation.simulated_cluster import Cluster, FrontendNode, RouterNode, TokenizerNode
from support.simulation.simulated_engine import EngineTraits, SchedulerNode, WorkerNode
from support.simulation.simulated_network import Node, World

from penstock.protocol.ownership.tombstones import TOMBSTONE_SECONDS
from penstock.protocol.sampling import SamplingParams
from penstock.services.scheduler.policy_choice import POLICIES

KINDS = [RouterNode, TokenizerNode, SchedulerNode, WorkerNode, FrontendNode]
ROOMY = EngineTraits()
TIGHT = ROOMY.with_limits(num_blocks=40, max_model_len=120)
"""Memory for a quarter of what could run: sequences lose their slots to others."""

MANY = replace(TIGHT.with_limits(max_row_tokens=5), counts=True)
"""Rows that bring none to five tokens."""


def seeds(usual: int, all_of_them: int) -> pytest.MarkDecorator:
    """The first few with every test run, the others with the long ones."""
    chosen = [
        pytest.param(seed, marks=() if seed < usual else pytest.mark.slow)
        for seed in range(all_of_them)
    ]
    return pytest.mark.parametrize("seed", chosen)


def load(cluster: Cluster, count: int, over: float, cancel: float = 0.0) -> list[Record]:
    """``count`` requests at random moments of the next ``over`` seconds."""
    world = cluster.world
    rng = random.Random(world.random.random())
    crowd = Crowd(rng, cluster.traits)
    records: list[Record] = []

    def arrive() -> None:
        frontends = world.of(FrontendNode)
        if not frontends:
            return
        frontend = rng.choice(frontends)
        record = frontend.submit(crowd.ask())
        records.append(record)
        if rng.random() < cancel:
            world.after(rng.random() * 2, lambda: record.ended or frontend.cancel(record))

    for _ in range(count):
        world.after(rng.random() * over, arrive)
    return records


def losses_told(records: list[Record]) -> int:
    return sum(record.progress.continuations for record in records)


def long_answer() -> Asked:
    """A request that nothing but its length ends."""
    params = SamplingParams(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=1,
        max_tokens=150, ignore_eos=True,
    )  # fmt: skip
    return Asked([1, 2, 3], params)


LATE = 10.0
"""Seconds within which whatever is still on its way has come, and what a timer does was done."""


def finish(cluster: Cluster, records: list[Record], most: float, arrivals: float = 10.0) -> None:
    """Let time pass until nobody holds a request any more, and ``LATE`` seconds beside; never
    beyond the moment ``most``. arrivals: seconds after which all have come, and whoever is to die
    has died."""
    world = cluster.world
    world.run(world.now + arrivals)
    while world.now < most - LATE:
        ended = all(record.ended or not record.frontend.alive for record in records)
        if ended and not cluster.open_anywhere():
            break
        world.run(world.now + 1.0)
    world.run(min(most, world.now + LATE))


def check(cluster: Cluster, records: list[Record], *, may_reject: bool = False) -> None:
    """Every client saw what it ought to, and nothing is left open."""
    for record in records:
        record.check(cluster.traits, cluster.world.failures, may_reject=may_reject)
    assert cluster.open_anywhere() == {}


def check_forgotten(cluster: Cluster) -> None:
    """What is kept of requests that have ended is gone when nobody can ask for it any more."""
    cluster.world.run(cluster.world.now + TOMBSTONE_SECONDS + 5.0)
    assert cluster.open_anywhere() == {}
    assert cluster.remembered_anywhere() == {}


@pytest.mark.parametrize(
    "traits",
    [
        pytest.param(ROOMY, marks=pytest.mark.slow, id="roomy"),
        pytest.param(TIGHT, id="tight"),
        pytest.param(MANY, id="many"),
    ],
)
@seeds(1, 3)
def test_on_a_perfect_network_every_request_ends_once_with_its_own_text(
    traits: EngineTraits, seed: int
) -> None:
    cluster = Cluster(World(seed), traits)
    records = load(cluster, 100, 10.0, cancel=0.2)
    finish(cluster, records, 40.0)
    check(cluster, records)
    check_forgotten(cluster)
    cores = [node.core for node in cluster.world.of(SchedulerNode)]
    assert sum(core.counters.prefix_hit_tokens for core in cores) > 0
    assert (sum(core.counters.preemptions for core in cores) > 0) == (traits is not ROOMY)


@seeds(1, 8)
def test_lost_and_doubled_messages_cost_time_but_no_text(seed: int) -> None:
    cluster = Cluster(World(seed, loss=0.02, delay=0.02, doubles=0.02))
    records = load(cluster, 80, 10.0, cancel=0.2)
    finish(cluster, records, 90.0)
    check(cluster, records, may_reject=True)
    rejected = sum(record.rejected[0].status != 504 for record in records if record.rejected)
    assert rejected <= 2 + len(records) // 10
    check_forgotten(cluster)


@pytest.mark.parametrize("kind", [RouterNode, TokenizerNode, SchedulerNode, WorkerNode])
@seeds(1, 4)
def test_a_death_is_survived_by_every_request(kind: type[Node], seed: int) -> None:
    cluster = Cluster(World(seed))
    records = load(cluster, 80, 10.0, cancel=0.1)
    for at in (2.0, 5.0, 8.0):
        cluster.world.after(at, lambda: cluster.kill_one(kind))
    finish(cluster, records, 100.0)
    check(cluster, records)
    if kind is not RouterNode:
        assert losses_told(records) > 0


@pytest.mark.parametrize(
    ("kind", "told"), [(TokenizerNode, 1), (SchedulerNode, 1), (WorkerNode, 1), (RouterNode, 0)]
)
def test_a_client_is_told_of_each_loss_that_its_stream_survives(
    kind: type[Node], told: int
) -> None:
    cluster = Cluster(World(0), tokenizers=1, engines=1)
    (record,) = records = [cluster.world.of(FrontendNode)[0].submit(long_answer())]
    for number in range(3):
        while losses_told(records) < told * number or not cluster.world.of(kind):
            cluster.world.run(cluster.world.now + 0.05)
        seen = sum(record.tokens.values())
        while sum(record.tokens.values()) <= seen:
            cluster.world.run(cluster.world.now + 0.05)
        assert not record.ended
        assert losses_told(records) == told * number
        cluster.kill_one(kind)
    finish(cluster, records, 100.0)
    check(cluster, records)
    assert losses_told(records) == told * 3


def test_a_client_is_told_that_the_router_it_waited_at_was_lost() -> None:
    cluster = Cluster(World(0), engines=1)
    world = cluster.world
    cluster.kill_one(SchedulerNode)
    (record,) = records = [world.of(FrontendNode)[0].submit(long_answer())]
    world.run(world.now + 0.2)
    assert not record.accepted
    cluster.kill_one(RouterNode)
    finish(cluster, records, 100.0)
    check(cluster, records)
    assert losses_told(records) == 1


@seeds(2, 4)
def test_an_engine_of_three_ranks_survives_the_loss_of_one(seed: int) -> None:
    cluster = Cluster(World(seed), replace(ROOMY, world_size=3), engines=1 + seed % 2)
    records = load(cluster, 60, 10.0, cancel=0.1)
    for at in (2.0, 7.0):
        cluster.world.after(at, lambda: cluster.kill_one(WorkerNode))
    finish(cluster, records, 100.0)
    check(cluster, records)
    groups = [node.scheduler.group for node in cluster.world.of(SchedulerNode)]
    assert all(group.attached for group in groups)
    assert len(cluster.world.of(WorkerNode)) == 3 * len(groups)


@seeds(1, 8)
def test_an_engine_survives_the_loss_of_a_rank_while_messages_are_lost_and_doubled(
    seed: int,
) -> None:
    """What the lost rank's group still says, and says twice, comes while the next one works."""
    traits = replace(MANY, world_size=3, collective=False)
    cluster = Cluster(World(seed, loss=0.02, delay=0.02, doubles=0.02), traits, engines=1)
    world = cluster.world
    [engine] = world.of(SchedulerNode)
    group, core = engine.scheduler.group, engine.core
    first_epoch = group.epoch
    records = load(cluster, 60, 10.0, cancel=0.1)
    running: list[int] = []
    for at in (2.0, 8.0):
        world.after(at, lambda: running.append(core.stats().running))
        world.after(at, lambda: cluster.kill_one(WorkerNode))
    finish(cluster, records, 90.0)
    check(cluster, records, may_reject=True)
    rejected = sum(record.rejected[0].status != 504 for record in records if record.rejected)
    assert rejected <= 2 + len(records) // 10
    check_forgotten(cluster)
    assert any(running), "ranks were lost while they computed"
    assert core.counters.failed_steps > 0, "and plans on their way to them"
    assert engine.scheduler.group is group
    assert group.attached
    assert group.epoch == first_epoch + 2, "each loss ended a group"
    assert len(world.of(WorkerNode)) == 3


@seeds(1, 4)
def test_no_rank_reads_a_cached_block_that_it_has_not_written(seed: int) -> None:
    """Ranks that do not wait for each other: one may lack a plan that the first has answered."""
    traits = replace(MANY, world_size=3, collective=False)
    cluster = Cluster(World(seed, loss=0.02, delay=0.02), traits, engines=1)
    records = load(cluster, 80, 10.0, cancel=0.1)
    finish(cluster, records, 90.0)
    check(cluster, records, may_reject=True)  # every executor compares what it reads
    [engine] = cluster.world.of(SchedulerNode)
    assert engine.core.counters.failed_steps > 0
    assert engine.core.counters.prefix_hit_tokens > 0


@pytest.mark.parametrize("kind", [TokenizerNode, SchedulerNode, WorkerNode])
@seeds(1, 4)
def test_what_was_on_its_way_to_the_only_one_that_stops_waits_for_the_next(
    kind: type[Node], seed: int
) -> None:
    """Whether it had accepted a request when it stopped, nobody knows; it may also go on."""
    cluster = Cluster(World(seed), tokenizers=1, engines=1)
    world = cluster.world
    records = load(cluster, 80, over=2.0)  # its silence is noticed after that
    [late] = world.of(kind)
    late.is_replaced = True
    world.after(0.2, lambda: world.stop(late))
    world.after(6.0, lambda: late.replacement() and None)
    world.after(6.0 + world.random.random(), lambda: world.go_on(late))
    world.run(world.now + 40.0)
    assert late.address not in world.nodes, "it hears that it is lost"
    check(cluster, records)


@seeds(1, 4)
def test_a_dead_frontend_leaves_nothing_open(seed: int) -> None:
    cluster = Cluster(World(seed))
    records = load(cluster, 60, 5.0)
    for at in (1.0, 3.0):
        cluster.world.after(at, lambda: cluster.kill_one(FrontendNode))
    finish(cluster, records, 60.0)
    check(cluster, records)


@seeds(1, 4)
def test_steps_that_fail_and_requests_that_fail_them_cost_nobody_else_anything(seed: int) -> None:
    rng = random.Random(seed)
    traits = replace(
        rng.choice([ROOMY, TIGHT]),
        poison=rng.choice([-1, 990]),
        not_a_number=rng.choice([-1, 991]),
        early=0.3,
        failing_steps=rng.choice([0.0, 0.003]),
        broken_steps=rng.choice([0.0, 0.001]),
    )
    cluster = Cluster(World(seed), traits)
    records = load(cluster, 60, 10.0, cancel=0.1)
    finish(cluster, records, 80.0)
    check(cluster, records, may_reject=cluster.world.failures >= 3)


def play_everything(seed: int) -> None:
    """An engine and a network of any kind, and deaths of all kinds."""
    world = World(
        seed,
        loss=random.Random(seed).choice([0.0, 0.005, 0.02]),
        delay=random.Random(seed + 1).choice([0.001, 0.01, 0.05]),
        doubles=random.Random(seed + 2).choice([0.0, 0.01]),
    )
    rng = world.random
    row_tokens = rng.choice([1, 1, 2, 5])
    traits = rng.choice([ROOMY, TIGHT, TIGHT.with_limits(block_size=16, num_blocks=12)])
    traits = replace(
        traits.with_limits(max_row_tokens=row_tokens),
        world_size=rng.choice([1, 3]),
        collective=not world.loss,  # ranks that wait for each other end when one lacks a plan
        counts=row_tokens > 1,
        policy=rng.choice(list(POLICIES)),
        caching=rng.random() < 0.75,
        max_waiting=rng.choice([4096, 4096, 8]),
        max_in_flight=rng.choice([1, 2, 4]),
        step_seconds=rng.choice([0.0005, 0.01, 0.04]),
        token_seconds=rng.choice([0.0, 0.001]),
        poison=rng.choice([-1, -1, 990]),
        not_a_number=rng.choice([-1, -1, 991]),
        early=rng.choice([0.0, 0.3]),
        failing_steps=rng.choice([0.0, 0.002]),
        broken_steps=rng.choice([0.0, 0.0005]),
    )
    cluster = Cluster(world, traits, 2, rng.choice([1, 3]), rng.choice([1, 2, 3]))
    records = load(cluster, 100, 20.0, cancel=0.2)
    for _ in range(rng.choice([0, 3, 6])):
        kind = rng.choice(KINDS)
        world.after(rng.random() * 20, lambda k=kind: cluster.kill_one(k))
    # One engine of 12 blocks with steps of 40 ms, of which messages are lost, may take minutes.
    finish(cluster, records, 400.0, arrivals=20.0)
    check(cluster, records, may_reject=True)
    rejected = sum(record.rejected[0].status != 504 for record in records if record.rejected)
    if traits.max_waiting > 8 and world.failures < 6:
        assert rejected <= 3 + len(records) // 10
    check_forgotten(cluster)


@seeds(1, 10)
def test_everything_at_once(seed: int) -> None:
    play_everything(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_everything_at_once_with_two_thousand_seeds(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        try:
            play_everything(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@seeds(1, 3)
def test_a_full_engine_turns_requests_away_soon_and_without_a_storm(seed: int) -> None:
    traits = replace(ROOMY.with_limits(max_num_seqs=2), max_waiting=5)
    cluster = Cluster(World(seed), traits, engines=1)
    records = load(cluster, 200, over=1.0)
    cluster.world.run(cluster.world.now + 40.0)
    check(cluster, records, may_reject=True)
    ended = [record.rejected[0] for record in records if record.rejected]
    refused = [answer for answer in ended if answer.status != 504]  # and some had no time
    assert 0 < len(refused) < 200
    [engine] = cluster.world.of(SchedulerNode)
    assert engine.core.counters.rejected_requests <= 4 * len(records)
    assert all(answer.status == 503 and answer.retry_after for answer in refused)

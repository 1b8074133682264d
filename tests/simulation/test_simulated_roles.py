"""Prefill and decode in engines of their own, whatever happens to either or to what lies between.

Router, ledgers, schedulers, the keeper and the workers' copies are the real ones, on a simulated
network under a virtual clock. Blocks are really copied, and what is read is compared.
"""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.simulation.simulated_cluster import Cluster, TokenizerNode
from support.simulation.simulated_engine import EngineNode, EngineTraits, SchedulerNode, WorkerNode
from support.simulation.simulated_keeper import KeeperNode
from support.simulation.simulated_network import Node, World
from test_simulated_cluster import check, check_forgotten, finish, load, seeds

from penstock.services.scheduler import hand_overs

KEPT = EngineTraits(kept_bytes=1 << 20)
TIGHT = replace(KEPT.with_limits(num_blocks=40, max_model_len=120), kept_bytes=1 << 13)
"""Memory for a quarter of what could run, and a keeper that has room for as much again."""
APART = ("prefill", "decode")


def scheduler(cluster: Cluster, role: str) -> SchedulerNode:
    (found,) = (node for node in cluster.world.of(SchedulerNode) if node.role == role)
    return found


def handed_over(cluster: Cluster) -> int:
    found = (node.scheduler._hand_overs for node in cluster.world.of(SchedulerNode))
    return sum(one._count for one in found if one is not None)


def continuations(cluster: Cluster) -> int:
    """How often a request was started again because something was lost."""
    return sum(node.ledger.continuations for node in cluster.world.of(TokenizerNode))


def end(cluster: Cluster, kind: type[Node], role: str = "", *, for_good: bool = False) -> None:
    """One process dies."""
    for victim in cluster.world.of(kind):
        named = f"engine-{APART.index(role)}" if role else ""
        if isinstance(victim, EngineNode) and victim.engine == named:
            cluster.world.kill(victim)
            if for_good:
                cluster.router.report_death(victim)
            else:
                cluster.replace(victim)
            return


@seeds(1, 4)
def test_prompts_are_computed_by_one_engine_and_go_on_at_the_other_with_their_text(
    seed: int,
) -> None:
    cluster = Cluster(World(seed), KEPT, roles=APART)
    records = load(cluster, 80, 8.0, cancel=0.2)
    finish(cluster, records, 40.0)
    check(cluster, records)
    check_forgotten(cluster)
    assert handed_over(cluster) > 20
    handed = [record for record in records if record.hand_overs]
    assert len(handed) > 20
    assert all(record.starts.keys() == record.tokens.keys() for record in handed)
    assert continuations(cluster) == 0, "nothing was lost"
    core = scheduler(cluster, "decode").core
    counts = core.counters
    assert 2 * counts.prefix_hit_tokens > counts.prefix_query_tokens, "it computes ends alone"
    assert core._tier.counters.hits > handed_over(cluster)


@seeds(1, 6)
@pytest.mark.parametrize(
    ("kind", "role"),
    [
        (SchedulerNode, "prefill"),
        (WorkerNode, "prefill"),
        (SchedulerNode, "decode"),
        (WorkerNode, "decode"),
        (KeeperNode, ""),
        (TokenizerNode, ""),
    ],
    ids=lambda one: one if isinstance(one, str) else one.service,
)
def test_the_loss_of_any_side_is_survived_by_every_request(
    kind: type[Node], role: str, seed: int
) -> None:
    cluster = Cluster(World(seed), KEPT, roles=APART)
    records = load(cluster, 50, 6.0, cancel=0.1)
    for at in (1.0, 3.0, 5.0):
        if kind is TokenizerNode:
            cluster.world.after(at, lambda: cluster.kill_one(kind))
        else:
            cluster.world.after(at, lambda: end(cluster, kind, role))
    finish(cluster, records, 100.0)
    check(cluster, records)


@seeds(1, 6)
def test_lost_late_and_doubled_messages_cost_time_but_no_text(seed: int) -> None:
    world = World(seed, loss=0.02, delay=0.02, doubles=0.02)
    cluster = Cluster(world, TIGHT if seed % 2 else KEPT, roles=APART)
    records = load(cluster, 50, 8.0, cancel=0.2)
    finish(cluster, records, 100.0)
    check(cluster, records, may_reject=True)


SLOW = replace(KEPT, step_seconds=0.1)
"""Streams last for seconds."""


def test_streams_of_a_lost_decode_engine_are_handed_over_to_the_one_in_its_place() -> None:
    cluster = Cluster(World(1), SLOW, roles=APART)
    records = load(cluster, 20, 1.0)
    cluster.world.run(cluster.world.now + 2.0)
    assert handed_over(cluster)
    lost = scheduler(cluster, "decode")
    end(cluster, SchedulerNode, "decode", for_good=True)
    cluster.world.after(1.0, lambda: lost.replacement() and None)
    finish(cluster, records, 100.0)
    check(cluster, records)
    assert any(record.hand_overs > 1 for record in records)


def test_a_decode_engine_is_handed_no_more_than_it_has_room_for() -> None:
    few = replace(KEPT.with_limits(max_num_seqs=3), step_seconds=0.02)
    cluster = Cluster(World(1), few, roles=APART)
    records = load(cluster, 40, 6.0)
    finish(cluster, records, 100.0)
    check(cluster, records)
    decode = scheduler(cluster, "decode").scheduler
    assert handed_over(cluster) > 5
    assert decode.metrics.counter("hand_overs_returned_total").value == 0
    assert continuations(cluster) == 0


def test_what_finds_no_room_goes_on_at_the_prefill_engine() -> None:
    few = replace(KEPT.with_limits(max_num_seqs=3), step_seconds=0.02)
    cluster = Cluster(World(1), few, roles=APART)
    decode = scheduler(cluster, "decode").scheduler
    with patch.object(hand_overs, "_holds", lambda *_: True):  # it believes in room that is gone
        records = load(cluster, 40, 6.0)
        finish(cluster, records, 100.0)
    check(cluster, records)
    assert decode.metrics.counter("hand_overs_returned_total").value > 0
    assert continuations(cluster) == 0, "nothing was lost"


@pytest.mark.parametrize("role", APART)
def test_one_role_alone_serves_everything(role: str) -> None:
    cluster = Cluster(World(1), KEPT, roles=APART)
    lost = APART[1 - APART.index(role)]
    records = load(cluster, 40, 6.0)
    cluster.world.after(2.0, lambda: end(cluster, SchedulerNode, lost, for_good=True))
    finish(cluster, records, 60.0)
    check(cluster, records)
    assert scheduler(cluster, role).core.counters.generated_tokens > 0


def test_without_a_keeper_requests_stay_where_they_are() -> None:
    cluster = Cluster(World(1), KEPT, roles=APART)
    end(cluster, KeeperNode, for_good=True)
    cluster.world.run(cluster.world.now + 1.0)
    records = load(cluster, 40, 6.0)
    finish(cluster, records, 60.0)
    check(cluster, records)
    assert handed_over(cluster) == 0
    assert continuations(cluster) == 0


def play_everything(seed: int) -> None:
    """Engines of any roles, a network of any kind, and deaths of all kinds."""
    rng = random.Random(seed)
    world = World(
        seed,
        loss=rng.choice([0.0, 0.005, 0.02]),
        delay=rng.choice([0.001, 0.01, 0.05]),
        doubles=rng.choice([0.0, 0.01]),
    )
    row_tokens = rng.choice([1, 1, 3])
    traits = replace(
        rng.choice([KEPT, TIGHT]).with_limits(max_row_tokens=row_tokens),
        counts=row_tokens > 1,
        max_in_flight=rng.choice([1, 2, 4]),
        step_seconds=rng.choice([0.0005, 0.01, 0.04]),
        token_seconds=rng.choice([0.0, 0.001]),
        early=rng.choice([0.0, 0.3]),
        not_a_number=rng.choice([-1, -1, 991]),
        failing_steps=rng.choice([0.0, 0.002]),
    )
    roles = rng.choice([APART, APART, ("prefill", "decode", "decode"), ("prefill", "both")])
    cluster = Cluster(world, traits, 2, rng.choice([1, 2]), len(roles), roles)
    records = load(cluster, 60, 12.0, cancel=0.2)
    for _ in range(rng.choice([0, 2, 4])):
        kind = rng.choice([SchedulerNode, WorkerNode, KeeperNode, TokenizerNode])
        world.after(rng.random() * 12, lambda k=kind: cluster.kill_one(k))
    finish(cluster, records, 150.0, arrivals=12.0)
    check(cluster, records, may_reject=True)
    check_forgotten(cluster)


@seeds(1, 10)
def test_everything_at_once(seed: int) -> None:
    play_everything(seed)


@pytest.mark.slow
@pytest.mark.parametrize("ten", range(20))
def test_everything_at_once_with_two_hundred_seeds(ten: int) -> None:
    for seed in range(10 * ten, 10 * (ten + 1)):
        try:
            play_everything(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise

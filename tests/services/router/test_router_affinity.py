"""A request goes to the engine that has cached its beginning, while that one is not too busy."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest
from support.counted import instructions

from penstock.protocol.prefix_digest import chain_root, covered, extended, split
from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import (
    Beat,
    BeatAnswer,
    Capacity,
    Hello,
    Identity,
    MetricsReport,
    Phase,
    PrefixReport,
    WhoAreYou,
)
from penstock.protocol.wire.messages.requests import Enqueue, RequestHead, first_attempt
from penstock.services.router.dispatch import YOUNG_SECONDS, Dispatcher
from penstock.services.router.placement import (
    FADE_SECONDS,
    MAX_EXCESS,
    SEQUENCE_TOKENS,
    _cost,
)
from penstock.services.router.prefix_index import SENT_SECONDS
from penstock.services.router.roster import Roster

FIRST = first_attempt(1)
SLOTS = 64


def prefix_of(length: int, seed: int = 0, salt: str = "", shared: int = 0) -> bytes:
    """Digests of a prompt; those of all seeds share their first tokens, ``shared`` of them."""
    one, own = random.Random("shared"), random.Random(seed)
    tokens = [one.randrange(1000) for _ in range(shared)]
    tokens += [own.randrange(1000) for _ in range(length - shared)]
    root = chain_root(RequestHead(model="model", cache_salt=salt))
    return extended(b"", root, array("i", tokens).tobytes())


class World:
    """A router's parts, its engines, and a clock."""

    def __init__(self, engines: int = 4) -> None:
        self.now = 1000.0
        self.sent: list[tuple[str, Message]] = []
        self.new_router()
        self.versions = dict.fromkeys(range(1, engines + 1), 1)
        for number in self.versions:
            self.join(number)
            self.beat(number, report=PrefixReport(0, 1))

    def new_router(self) -> None:
        self.roster = Roster(99, self.send, lambda *_: None, lambda _: None, lambda *_: None)
        self.dispatcher = Dispatcher(self.roster, self.send, self.now - 2 * YOUNG_SECONDS)
        self.numbers = iter(range(10**6))

    def send(self, to: str, message: Message) -> bool:
        self.sent.append((to, message))
        return True

    def join(self, number: int) -> None:
        identity = msgspec.msgpack.encode(Identity(number, "host-a"))
        hello = Hello(
            *("scheduler", f"ipc:///{number}", number),
            *(codec.PROTOCOL_VERSION, codec.SCHEMA_HASH, identity),
        )
        self.roster.hello(hello, self.now)
        self.beat(number)

    def beat(
        self,
        number: int,
        load: int = 0,
        report: PrefixReport | None = None,
        slots: int = SLOTS,
    ) -> None:
        beat = Beat(
            *(f"ipc:///{number}", number, Phase.READY, "", 1, 0.0, 0.0, load),
            *(Capacity(max_num_seqs=slots), msgspec.msgpack.encode(MetricsReport([])), 10**6),
            prefixes=report,
        )
        self.roster.beat(beat, self.now)

    def holds(self, number: int, prefix: bytes, gone: bytes = b"", load: int = 0) -> None:
        """An engine tells that it holds a prompt now."""
        version = self.versions[number]
        self.versions[number] += 1
        self.beat(number, load, PrefixReport(version, version + 1, prefix, gone))

    def place(self, prefix: bytes = b"", number: int | None = None, attempt: int = FIRST) -> int:
        """Send a request; returns the engine that it went to."""
        number = next(self.numbers) if number is None else number
        self.sent.clear()
        message = Enqueue(number, attempt, "ipc:///tokenizer", b"", "model", prefix)
        self.dispatcher.request(message, self.now)
        ((to, _),) = [(to, m) for to, m in self.sent if isinstance(m, Enqueue)]
        return int(to.rpartition("/")[2])

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.dispatcher.tick(self.now)


@pytest.fixture
def world() -> World:
    return World()


def test_the_engine_with_the_longest_prefix_gets_the_request(world: World) -> None:
    prompt = prefix_of(2000)
    world.holds(2, prompt[: 8 * 10])
    world.holds(3, prompt[: 8 * 20])
    world.beat(3, load=2)
    assert world.place(prompt) == 3
    assert world.place(prefix_of(2000, seed=1)) in (1, 2, 4), "nobody knows it: where there is room"
    assert world.dispatcher.placement.placed_by == {"prefix": 1, "load": 0, "room": 1}


def test_of_equal_holders_the_one_with_the_most_room_gets_it(world: World) -> None:
    prompt = prefix_of(2000)
    for number, load in ((1, 9), (2, 4), (3, 6)):
        world.holds(number, prompt, load=load)
    assert world.place(prompt) == 2
    world.beat(2, load=20)
    assert world.place(prompt) == 3


def test_a_prefix_is_worth_a_bounded_number_of_requests_more_than_elsewhere(world: World) -> None:
    short = prefix_of(2 * SEQUENCE_TOKENS)
    world.holds(2, short, load=7)
    assert world.place(short) == 2
    world.beat(2, load=8)
    assert world.place(short) != 2, "computing it anew is cheaper than waiting there"
    for number in world.versions:
        world.beat(number)
    long = prefix_of(200_000)
    most = int(MAX_EXCESS * SLOTS) + 1
    world.holds(3, long, load=most)
    assert world.place(long) == 3
    world.beat(3, load=most + 1)
    assert world.place(long) != 3


@pytest.mark.parametrize("engines", [4, 64])
def test_the_busier_all_engines_are_the_more_sequences_a_prefix_is_worth(engines: int) -> None:
    """With many engines one is always emptier by some, and to compute there what another holds
    delays what is open there."""
    world, chat = World(engines), prefix_of(900)
    for least, most in ((0, 6), (8, 26), (20, 56), (100, 216)):
        for number in world.versions:
            world.beat(number, load=most)
        world.holds(3, chat[: 8 * 11], load=most)
        world.beat(2, load=least)
        assert world.place(chat) == 3, (least, most)
        world.holds(3, chat[: 8 * 11], load=most + 30)
        world.beat(2, load=least // 2)
        assert world.place(chat) == 2, (least, most)
        world.roster.prefixes.expire(world.now + 2 * SENT_SECONDS)


def test_one_engine_that_is_much_emptier_draws_no_chats_from_all_others() -> None:
    """Else all leave theirs at once, and everybody computes what others hold."""
    world, chat = World(engines=64), prefix_of(900)
    for number in world.versions:
        world.beat(number, load=90)
    world.holds(3, chat, load=90)
    world.beat(2, load=20)
    assert world.place(chat) == 3
    world.holds(3, chat, load=240)
    assert world.place(chat) != 3


def test_of_unlike_engines_that_hold_nothing_the_emptiest_for_its_size_gets_it() -> None:
    world, prompt = World(engines=3), prefix_of(900)
    world.holds(1, prompt[:8], load=SLOTS)
    world.beat(2, load=50, slots=256)
    world.beat(3, load=8, slots=16)
    assert world.place(prompt) == 2


def test_what_was_just_sent_there_counts_before_any_beat(world: World) -> None:
    prompts = [prefix_of(1500 + 100 * turn) for turn in range(4)]
    assert len({world.place(prompt) for prompt in prompts}) == 1
    first = world.place(prefix_of(1500, seed=5))
    world.pass_time(SENT_SECONDS + 0.5)
    for number in range(1, 5):
        world.beat(number, load=3 if number == first else 0)
    assert world.place(prefix_of(1500, seed=5)) != first, "it would have told by now"


def test_an_engine_that_no_longer_holds_a_prefix_is_no_better_than_others(world: World) -> None:
    prompt = prefix_of(1000)
    world.holds(2, prompt)
    world.holds(2, b"", gone=prompt, load=1)
    assert world.place(prompt) != 2


def test_another_salt_does_not_find_a_prefix(world: World) -> None:
    world.holds(2, prefix_of(1000, salt="of one tenant"), load=1)
    assert world.place(prefix_of(1000, salt="of another")) != 2
    assert world.place(prefix_of(1000, salt="of one tenant")) == 2


def test_chats_that_begin_alike_spread_while_little_is_going_on(world: World) -> None:
    """One at a time: by load alone there would be no reason to leave the first engine."""
    counts = dict.fromkeys(range(1, 5), 0)
    shared = len(split(prefix_of(600))) * 8
    for seed in range(200):
        prompt = prefix_of(900, seed=seed, shared=600)
        assert prompt[:shared] == prefix_of(900, shared=600)[:shared]
        number = world.place(prompt)
        world.holds(number, prompt)
        counts[number] += 1
        world.pass_time(0.5)
    assert max(counts.values()) < 1.5 * 200 / 4


def test_a_chat_stays_though_its_engine_got_more_than_its_share(world: World) -> None:
    own = prefix_of(3000, seed=1)
    world.holds(1, own)
    for seed in range(100):
        number = world.place(prefix_of(3000, seed=seed + 10))
        world.beat(number, load=0)
    world.roster.members[1].recent *= 1.5
    assert world.place(own) == 1
    world.roster.members[1].recent *= 3.0
    assert world.place(own) != 1
    for _ in range(100):
        world.pass_time(FADE_SECONDS / 10)
    assert world.place(own) == 1


def test_chats_stay_with_their_engines_when_another_joins(world: World) -> None:
    """It has got none of the latest requests, so that all others have got more than their share."""
    chat = prefix_of(900)
    for _ in range(400):
        world.beat(world.place(), load=0)
    world.holds(1, chat[: 8 * 9], load=1)
    world.join(5)
    assert world.place(chat) == 1
    assert world.place(prefix_of(900, seed=1)) != 1, "new ones go where there is room"


def test_requests_that_end_between_beats_do_not_count_until_the_next_one(world: World) -> None:
    """Else whoever beat last would have the most room, and chats would change engines for it."""
    prompt = prefix_of(1000)
    world.holds(1, prompt)
    engine = world.roster.members[1]
    for _ in range(10):
        engine.routed += 8
        world.pass_time(0.5)
        for number in world.versions:
            world.beat(number)
    engine.routed += 8
    world.pass_time(0.45)
    for number in (2, 3, 4):
        world.beat(number)
    assert world.place(prompt) == 1
    engine.routed += 20
    assert world.place(prompt) != 1, "those can hardly have ended"


def test_resent_requests_return_and_refused_ones_go_elsewhere_whatever_is_cached(
    world: World,
) -> None:
    prompt = prefix_of(1000)
    world.holds(3, prompt)
    assert world.place(prompt, number=7) == 3
    world.holds(4, prompt)
    world.beat(3, load=SLOTS)
    assert world.place(prompt, number=7) == 3, "the same attempt: elsewhere it would run twice"
    assert world.place(prompt, number=7, attempt=FIRST + 1) == 4
    assert world.place(prompt, number=7, attempt=FIRST + 2) in (1, 2), "both have refused it"


def test_a_lost_engine_and_its_prefixes_are_forgotten(world: World) -> None:
    prompt = prefix_of(1000)
    world.holds(3, prompt)
    world.holds(4, prompt[:64])
    world.roster.bury(world.roster.members[3], "a test")
    assert world.place(prompt) == 4


def test_an_engine_is_told_what_the_router_knows_of_it(world: World) -> None:
    world.sent.clear()
    world.holds(2, prefix_of(300))
    world.beat(2, report=PrefixReport(9, 10, prefix_of(400)))
    answers = [m.prefixes for _, m in world.sent if isinstance(m, BeatAnswer)]
    assert answers == [2, 2], "a change of what was missed is not taken"


def test_a_new_router_knows_nothing_until_it_is_told_all(world: World) -> None:
    prompt = prefix_of(1000)
    world.holds(3, prompt)
    world.new_router()
    world.beat(3)
    assert any(isinstance(m, WhoAreYou) for _, m in world.sent)
    for number in world.versions:
        world.join(number)
    assert world.place(prompt, number=1_000_000) in world.versions
    world.beat(3, load=1, report=PrefixReport(0, 2, prompt))
    assert world.place(prompt) == 3


def test_digests_say_how_many_tokens_they_cover() -> None:
    prefix = prefix_of(1000)
    assert covered(len(split(prefix))) == 960


def test_of_an_engine_that_has_stopped_beating_no_more_requests_are_reckoned_to_end() -> None:
    world = World(engines=1)
    (engine,) = world.roster.members.values()
    for _ in range(20):  # a hundred requests a second, all ended by the next beat
        for _ in range(50):
            world.place()
        world.now += 0.5
        world.beat(1, load=0)
    for _ in range(200):
        world.place()
    assert engine.open_at(world.now + 0.5) == pytest.approx(150, abs=5)
    assert engine.open_at(world.now + 3.0) == pytest.approx(140, abs=5)


def best_of_all(world: World, prefix: bytes) -> tuple[float, float, float] | None:
    """The cost at the member where it is the least, found by looking at each; ``None``: nobody
    holds any of it."""
    roster, now = world.roster, world.now
    held = {
        one: covered(depth)
        for depth, bits in roster.prefixes.deepest(prefix)
        for one in roster.prefixes.engines_of(bits)
    }
    if not held:
        return None
    members = roster.ready("scheduler", "model")
    full = {m.incarnation: (m.open_at(now) + 1) / SLOTS for m in members}
    share, prompt = sum(m.recent for m in members) / len(members), covered(len(prefix) // 8)
    costs = []
    for number, member in zip(full, members, strict=True):
        others = [full[other] for other in full if other != number]
        most = 2 * sum(others) / len(others) + MAX_EXCESS
        holds = held.get(number, 0)
        costs.append(_cost(member, full[number], most, SLOTS, holds, prompt, share))
    return min(costs)


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_costs_less_at_nobody_that_is_not_looked_at(seed: int) -> None:
    """The router looks at those that hold the most first, and not at all of them."""
    world, rng = World(engines=9), random.Random(seed)
    prompts = [prefix_of(1500, seed=n % 40, shared=rng.choice((0, 300, 300))) for n in range(40)]
    for turn in range(400):
        if turn % 5 == 0:
            number = rng.randint(1, 9)
            prompt = rng.choice(prompts)
            world.holds(number, prompt[: 8 * rng.randint(1, 20)], load=rng.choice((0, 2, 9, 40)))
        if turn % 50 == 0:
            world.pass_time(rng.choice((0.2, 3.0)))
        member = world.roster.members[rng.randint(1, 9)]
        member.recent *= rng.choice((1.0, 1.0, 1.0, 0.3, 2.0))
        prompt = rng.choice(prompts)
        best = best_of_all(world, prompt)
        before = {
            m.incarnation: ((m.open_at(world.now) + 1) / SLOTS, m.recent)
            for m in world.roster.members.values()
        }
        full, recent = before[world.place(prompt)]
        assert best is None or (full, recent) == best[1:], (turn, best)


def test_who_joins_is_considered_from_its_first_beat_and_who_leaves_no_longer() -> None:
    world = World(engines=1)
    assert world.place() == 1
    world.join(2)
    assert world.place() == 2, "it is empty"
    world.roster.goodbye(2)
    assert world.place() == 1


def test_a_request_hardly_costs_more_where_there_are_many_engines() -> None:
    costs = []
    for engines in (8, 64):
        world, prompt = World(engines), prefix_of(1500, shared=300)
        for number in world.versions:
            world.holds(number, prompt if number == 3 else prompt[: 8 * 4])
        world.place(prompt)  # who is ready is found once
        costs.append(instructions(lambda world=world, prompt=prompt: world.place(prompt)))
    assert 500 < costs[0] < costs[1] < 3.5 * costs[0], costs

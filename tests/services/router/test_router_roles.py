"""Where requests go when engines compute prompts, go on with them, or both."""

from __future__ import annotations

import msgspec
import pytest
from test_router_affinity import FIRST, SLOTS, YOUNG_SECONDS, World, prefix_of

from penstock.protocol.tasks import EMBED
from penstock.protocol.wire import codec
from penstock.protocol.wire.messages.membership import (
    Beat,
    Capacity,
    Hello,
    Identity,
    MetricsReport,
    Phase,
    Role,
)
from penstock.protocol.wire.messages.requests import Enqueue
from penstock.services.router.dispatch import Dispatcher
from penstock.services.router.roster import Roster

LOCAL = 256
LONG, SHORT = prefix_of(2000), prefix_of(200, seed=1)


class RoleWorld(World):
    """Engines with roles, numbered from 1 on."""

    def __init__(self, *roles: Role) -> None:
        self.roles = dict(enumerate(roles, 1))
        super().__init__(len(roles))

    def new_router(self) -> None:
        self.roster = Roster(99, self.send, lambda *_: None, lambda _: None, lambda *_: None)
        began = self.now - 2 * YOUNG_SECONDS
        self.dispatcher = Dispatcher(self.roster, self.send, began, max_local_prefill_length=LOCAL)
        self.numbers = iter(range(10**6))

    def join(self, number: int) -> None:
        identity = Identity(number, "host-a", str(number), role=self.roles[number])
        hello = Hello(
            *("scheduler", f"ipc:///{number}", number, codec.PROTOCOL_VERSION),
            *(codec.SCHEMA_HASH, msgspec.msgpack.encode(identity)),
        )
        self.roster.hello(hello, self.now)
        self.beat(number)

    def loads(self, number: int) -> None:
        """An engine has lost its worker."""
        capacity = Capacity(max_num_seqs=SLOTS)
        report = msgspec.msgpack.encode(MetricsReport([]))
        beat = (f"ipc:///{number}", number, Phase.LOADING, "", 1, 0.0, 0.0, 0, capacity, report)
        self.roster.beat(Beat(*beat, 10**6), self.now)

    def ask(self, prefix: bytes, *, begun: bool = False, number: int = 0, attempt: int = 0) -> int:
        """Returns the engine that the request goes to."""
        self.sent.clear()
        request = Enqueue(
            *(number or next(self.numbers), FIRST + attempt, "ipc:///t", b"", "model", prefix),
            begun=begun,
        )
        self.dispatcher.request(request, self.now)
        (to,) = [to for to, message in self.sent if isinstance(message, Enqueue)]
        return int(to.rpartition("/")[2])


def test_long_prompts_go_to_prefill_engines_and_what_has_begun_to_the_others() -> None:
    world = RoleWorld("prefill", "decode", "decode")
    for seed in range(4):
        long = prefix_of(2000, seed=seed)
        assert world.ask(long) == 1
        assert world.ask(long, begun=True) in (2, 3)
        assert world.ask(SHORT) in (2, 3), "computed where it goes on"
        assert world.ask(b"") in (2, 3), "a prompt of less than 64 tokens has no digests"


def test_what_a_decode_engine_has_cached_but_for_an_end_is_computed_there() -> None:
    world = RoleWorld("prefill", "decode", "decode")
    world.holds(3, LONG[: 8 * 12])
    assert world.ask(LONG) == 1, "much is missing"
    world.holds(3, LONG[:-8])
    assert world.ask(LONG) == 3


def test_an_engine_of_both_roles_gets_either_and_no_role_changes_nothing() -> None:
    world = RoleWorld("prefill", "both")
    assert {world.ask(prefix_of(2000, seed=seed)) for seed in range(8)} == {1, 2}
    assert {world.ask(LONG, begun=True) for _ in range(8)} == {2}
    plain = RoleWorld("both", "both")
    assert not plain.roster.ready_members("scheduler", "model", "").have_roles


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_while_there_is_none_of_a_role_the_others_take_everything(role: Role) -> None:
    world = RoleWorld("prefill", "decode")
    lost, left = (1, 2) if role == "prefill" else (2, 1)
    world.loads(lost)
    assert [world.ask(LONG), world.ask(LONG, begun=True), world.ask(SHORT)] == [left] * 3


def test_a_request_that_its_prefill_engine_gives_back_tries_another_before_it_asks_that_again() -> (
    None
):
    world = RoleWorld("prefill", "prefill", "decode")
    first = world.ask(LONG, number=77)
    second = world.ask(LONG, number=77, attempt=1)
    assert {first, second} == {1, 2}
    assert world.ask(LONG, number=77, attempt=2) == 3, "they are full: it is computed there"


def test_what_decode_engines_give_back_tries_another_then_a_prefill_engine_then_them_again() -> (
    None
):
    world = RoleWorld("prefill", "decode", "decode")
    assert world.ask(LONG, number=77) == 1
    places = [world.ask(LONG, number=77, attempt=n, begun=True) for n in (1, 2)]
    assert sorted(places) == [2, 3]
    assert world.ask(LONG, number=77, attempt=3, begun=True) == 1, "neither has room"
    assert world.ask(LONG, number=77, attempt=4, begun=True) in (2, 3), "handed over again"


def test_prompts_that_bring_no_tokens_go_to_prefill_engines() -> None:
    world = RoleWorld("decode", "prefill")
    for member in world.roster.members.values():
        member.capacity = msgspec.structs.replace(member.capacity, tasks=[EMBED])
    member = world.dispatcher.placement.choose((1, "scheduler"), FIRST, world.now, task=EMBED)
    assert member is not None
    assert member.incarnation == 2

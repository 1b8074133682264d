"""Who is alive: the router's record of every process, from hellos, beats and obituaries."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.protocol.process.metrics import merge
from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import (
    Beat,
    BeatAnswer,
    Demand,
    Fenced,
    Hello,
    Identity,
    Members,
    MetricsReport,
    Phase,
    ProcessMetrics,
    Refused,
    WhoAreYou,
)
from penstock.services.router.member import REPAIR_SECONDS, Member
from penstock.services.router.prefix_index import PrefixIndex
from penstock.services.router.ready_members import ReadyMembers
from penstock.services.router.served_models import ServedModels, total
from penstock.services.router.sleeping_models import SleepingModels

_MODEL_SERVICES = ("tokenizer", "scheduler")
"""A model is ready when one of each is."""
GOODBYE_SECONDS = 0.05
"""A process says goodbye before its connection breaks, but the latter may be seen first."""
PAUSE_SECONDS = 1.0
"""A router that did not run itself for so long judges nobody's silence by it."""
NOTE_SECONDS = 1.0
"""What a process is doing in its phase is told to the others so often at most."""
MAX_LOST = 256
MAX_READY = 256
"""Services, models and tasks for which the ready members are remembered."""
_decode_identity = msgspec.msgpack.Decoder(Identity).decode


class Roster:
    """Admits, watches and buries processes; every change goes to all of them.

    N processes that load say something new N times in a while: what goes out is what has changed,
    and notes alone wait for each other.
    """

    def __init__(
        self,
        incarnation: int,
        send: Callable[[str, Message], bool],
        send_last: Callable[[str, Message], None],
        forget: Callable[[str], None],
        log: Callable[[str, str], None],
    ) -> None:
        self.incarnation = incarnation
        self.members: dict[int, Member] = {}
        self.prefixes = PrefixIndex()
        """What engines have cached."""
        self.lost: list[int] = []
        self.version = 0
        self._send = send
        self._send_last = send_last
        self._forget = forget
        self._log = log
        self._dead: dict[str, MetricsReport] = {}
        self.lost_of: Counter[str] = Counter()
        """How many processes of each service were ever lost."""
        self.models = ServedModels()
        self.asleep = SleepingModels()
        self.held: Mapping[str, int] = {}
        """How many requests wait here for each model."""
        self._ready: dict[tuple[str, str, str], ReadyMembers] = {}
        self._changed: set[int] = set()
        """Incarnations that the others must hear of at once, …"""
        self._noted: set[int] = set()
        """… those that have only a new note, …"""
        self._gone: list[int] = []
        """… and those that are no longer members, since the last call of ``publish``."""
        self._lost_since: list[int] = []
        self._noted_at = 0.0
        self._ticked_at: float | None = None

    def of(self, service: str, model: str = "", task: str = "") -> list[Member]:
        """Members of a service; of one model and, as far as is known, for one task, where those are
        named."""
        return [
            m
            for m in self.members.values()
            if m.service == service and m.identity.is_of(model) and m.may_do(task)
        ]

    def ready(self, service: str, model: str = "", task: str = "") -> Sequence[Member]:
        return self.ready_members(service, model, task).members

    def ready_members(self, service: str, model: str = "", task: str = "") -> ReadyMembers:
        """Found anew where a member has joined, changed or gone since the last time."""
        asked = (service, model, task)
        found = self._ready.get(asked)
        if found is None:
            if len(self._ready) >= MAX_READY:
                self._ready.clear()
            found = self._ready[asked] = ReadyMembers(
                [member for member in self.of(*asked) if member.phase == Phase.READY]
            )
        return found

    def hello(self, hello: Hello, now: float) -> None:
        if hello.protocol_version != codec.PROTOCOL_VERSION or (
            hello.schema_hash != codec.SCHEMA_HASH
        ):
            theirs = f"{hello.protocol_version}/{hello.schema_hash}"
            ours = f"{codec.PROTOCOL_VERSION}/{codec.SCHEMA_HASH}"
            reason = f"{hello.service} speaks protocol {theirs}, the router {ours}"
            self._refuse(hello, reason, "run the same version of penstock everywhere")
            return
        if hello.incarnation in self.lost:
            self._send_last(hello.address, Fenced(hello.incarnation))
            return
        member = self.members.get(hello.incarnation)
        if member is not None:
            self._tell_all(member)
            return
        try:
            identity = _decode_identity(hello.identity)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._refuse(hello, f"its identity is malformed: {error}", "report it as a bug")
            return
        if other := self._with_other_files(identity):
            reason = (
                f"{hello.service} has the model {_model(identity)}, but the {other.service} of "
                f"this server {_model(other.identity)}"
            )
            remedy = (
                "start all processes of a model with the same MODEL, and another model under "
                "another name (--served-model-name)"
            )
            self._refuse(hello, reason, remedy)
            return
        self.members[hello.incarnation] = Member(hello, identity, now, self._number(hello.service))
        self._ready.clear()
        self._log("debug", f"{hello.service} joined (pid {identity.pid} on {identity.host})")
        self._changed.add(hello.incarnation)
        if hello.service == "scheduler":
            self.models.engine_named(identity)
        self._name_members()

    def _number(self, service: str) -> int:
        """The first number that no living process of the service has."""
        taken = {member.number for member in self.members.values() if member.service == service}
        return next(number for number in itertools.count() if number not in taken)

    def _name_members(self) -> None:
        """Give each member the name that a scheduler has for its files."""
        for member in self.members.values():
            if member.said.model in self.asleep:  # its schedulers are away
                self.models.engine_named(member.said)
        for incarnation, member in self.members.items():
            identity = self.models.named(member.said)  # a scheduler's own is known
            if identity != member.identity:
                member.identity = identity
                self._changed.add(incarnation)
                self._ready.clear()

    def _with_other_files(self, identity: Identity) -> Member | None:
        """A member of the same model whose tokens would mean something else."""
        agreed = ("", identity.fingerprint)
        if not identity.fingerprint:
            return None
        for member in self.members.values():
            if member.identity.fingerprint not in agreed and member.identity.is_of(identity.model):
                return member
        return None

    def _refuse(self, hello: Hello, reason: str, remedy: str) -> None:
        self._log("warning", f"refused {hello.address}: {reason}")
        self._send_last(hello.address, Refused(reason, remedy))

    def beat(self, beat: Beat, now: float) -> None:
        member = self.members.get(beat.incarnation)
        if member is None:
            if beat.incarnation in self.lost:
                self._send_last(beat.address, Fenced(beat.incarnation))
            else:
                self._send(beat.address, WhoAreYou(self.incarnation))
            return
        member.heard_at = now
        member.connected = True
        member.beaten(beat.load, now)
        member.unloading = beat.unloading
        if member.sleepers != beat.sleepers:
            member.sleepers = beat.sleepers
            self.asleep.look(self.members.values())
            self._changed.add(self.incarnation)
            self._name_members()
        member.item_age = beat.item_age
        member.item_limit = beat.item_limit
        member.metrics = beat.metrics
        if beat.phase == Phase.READY and member.phase != Phase.READY:
            member.recent = max(member.recent, self._recent_share(member))
        member.was_ready |= beat.phase in (Phase.READY, Phase.DRAINING)
        if (member.phase, member.capacity) != (beat.phase, beat.capacity):
            self._changed.add(member.incarnation)
            self._ready.clear()
        elif member.note != beat.note:
            self._noted.add(member.incarnation)
        member.phase, member.note = beat.phase, beat.note
        member.says(beat.capacity, beat.demands)
        if beat.prefixes is not None:
            self.prefixes.take(beat.incarnation, beat.prefixes)
        self._look_served(member, beat.served)
        missed = beat.membership_version < member.due
        if missed and now - member.repaired_at >= REPAIR_SECONDS:
            member.repaired_at = now
            self._tell_all(member)
        member.due = member.told
        known = self.prefixes.version(member.incarnation)
        self._send(member.address, BeatAnswer(self.incarnation, self._others(member), known))

    def _recent_share(self, member: Member) -> float:
        """What a member that becomes ready counts as having got of the latest requests: as much as
        the others. Else all of them would have got more than their share for a minute, and their
        chats would leave them."""
        others = self.ready(member.service, member.model)
        return sum(other.recent for other in others) / max(1, len(others))

    def wanted(self, model: str) -> None:
        """A request waits for a model that sleeps: its launcher hears so at once."""
        for member in self.members.values():
            if any(one.model == model for one in member.sleepers):
                self._send(member.address, BeatAnswer(self.incarnation, self._others(member)))

    def _look_served(self, member: Member, told: list[str]) -> None:
        """``told``: models that the member knows to be served, maybe longer than this router."""
        model, is_news = member.model, self.models.told(told)
        is_news |= self.models.unloads(member.unloading)
        is_news |= self.models.sleeps(one.model for one in member.sleepers)
        if member.service == "scheduler" and member.phase == Phase.READY:
            self.models.does(model, member.capacity.done)
        if member.service in _MODEL_SERVICES and member.phase == Phase.READY:
            is_new = model not in self.models and not self._is_unloading(model)
            if is_new and all(self.ready(service, model) for service in _MODEL_SERVICES):
                is_news |= self.models.is_ready(model)
        if is_news:
            self._changed.add(self.incarnation)
            self._forget_models()

    def _is_unloading(self, model: str) -> bool:
        return any(model in member.unloading for member in self.members.values())

    def _forget_models(self) -> None:
        if self.models.forget({member.model for member in self.members.values()}):
            self._changed.add(self.incarnation)

    def _others(self, asking: Member) -> list[Demand]:
        """What all processes but this frontend or launcher have said, by model."""
        if asking.service not in ("frontend", "launcher"):
            return []
        found: list[Demand] = []
        for member in self.members.values():
            if member.phase == Phase.READY or member.service == "frontend":
                found += member.demands if member is not asking else ()
        if asking.service == "launcher":
            found += [Demand(model=model, held=count) for model, count in self.held.items()]
        return total(found)

    def goodbye(self, incarnation: int) -> None:
        member = self.members.get(incarnation)
        if member is not None:
            self._log("debug", f"{member.service} left (pid {member.identity.pid})")
            self._remove(member)
            is_last = not any(other.model == member.model for other in self.members.values())
            is_last = is_last and member.model not in self.asleep
            if is_last and self.models.has_nobody(member.model):
                self._changed.add(self.incarnation)
            self._forget_models()

    def died(self, pid: int, host: str) -> None:
        """The launcher saw the process end."""
        for member in list(self.members.values()):
            if (member.identity.pid, member.identity.host) == (pid, host):
                self.bury(member, "its process ended")

    def disconnected(self, address: str, now: float) -> None:
        """Its connection broke. On one host (ipc) that is death, if no goodbye is on its way; on
        tcp silence must follow."""
        for member in list(self.members.values()):
            if member.address != address:
                continue
            if address.startswith("ipc://"):
                member.broken_at = now
            else:
                member.connected = False

    def bury(self, member: Member, cause: str) -> None:
        """Declare a process lost: from now on it is fenced."""
        self._log("warning", f"{member.service} lost (pid {member.identity.pid}): {cause}")
        self.lost_of[member.service] += 1
        self.lost.append(member.incarnation)
        del self.lost[:-MAX_LOST]
        self._lost_since.append(member.incarnation)
        self._remove(member)
        self._forget_models()
        self._send_last(member.address, Fenced(member.incarnation))

    def _remove(self, member: Member) -> None:
        del self.members[member.incarnation]
        self._ready.clear()
        total = self._dead.get(member.service, MetricsReport([]))
        self._dead[member.service] = merge([total, member.report()])
        self._forget(member.address)
        self.prefixes.forget(member.incarnation)
        self._gone.append(member.incarnation)

    def tick(self, now: float) -> None:
        """Bury the silent and the stuck."""
        if self._ticked_at is not None and now - self._ticked_at > PAUSE_SECONDS:
            for member in self.members.values():
                member.heard_at = now
                member.item_age = 0.0
        self._ticked_at = now
        if self.asleep.tick(self.members.values(), now):
            self._changed.add(self.incarnation)
        for member in list(self.members.values()):
            if member.incarnation == self.incarnation:
                continue
            limit = member.silence_limit
            if member.broken_at is not None and now - member.broken_at >= GOODBYE_SECONDS:
                self.bury(member, "its connection broke")
            elif now - member.heard_at > limit:
                self.bury(member, f"no beat for {limit:.0f} s")
            elif member.item_limit and member.item_age > member.item_limit:
                self.bury(
                    member,
                    f"stuck: no progress for {member.item_age:.0f} s "
                    f"(limit {member.item_limit:.0f} s)",
                )

    def publish(self, now: float) -> bool:
        """Send everyone what has changed since the last call; whoever is new gets the whole.
        Returns whether somebody has come, gone or changed otherwise than by a note."""
        changed = bool(self._changed or self._gone)
        if not changed and not (self._noted and now - self._noted_at >= NOTE_SECONDS):
            return False
        named = [m.peer() for i, m in self.members.items() if i in self._changed | self._noted]
        change = Members(
            self.incarnation,
            self.version + 1,
            named,
            self._lost_since,
            since=self.version,
            gone=self._gone,
            served=self.models.served,
            withdrawn=self.models.withdrawn,
            sleepers=list(self.asleep.values()),
        )
        self._changed, self._noted, self._gone, self._lost_since = set(), set(), [], []
        self._noted_at, self.version = now, self.version + 1
        for member in list(self.members.values()):
            if member.told and member.told == change.since:
                member.told = change.version if self._send(member.address, change) else 0
            else:
                self._tell_all(member)
        return changed

    def _tell_all(self, member: Member) -> None:
        """Send a member the whole membership."""
        whole = Members(
            self.incarnation,
            self.version,
            [member.peer() for member in self.members.values()],
            list(self.lost),
            served=self.models.served,
            withdrawn=self.models.withdrawn,
            sleepers=list(self.asleep.values()),
        )
        member.told = self.version if self._send(member.address, whole) else 0

    def phases(self) -> Counter[tuple[str, str]]:
        """How many processes there are of each service in each phase."""
        return Counter((member.service, member.phase) for member in self.members.values())

    def metrics(self) -> list[ProcessMetrics]:
        living = [
            ProcessMetrics(member.service, member.incarnation, member.report(), member.number)
            for member in self.members.values()
        ]
        dead = [ProcessMetrics(service, 0, report) for service, report in self._dead.items()]
        return living + dead


def _model(identity: Identity) -> str:
    return f"{identity.model!r} (files {identity.fingerprint})"

"""A cluster on a simulated network: the real ownership rules, roster and participants, driven by
a virtual clock, with seeded loss, delay, reordering between pairs of peers, and deaths.

Every message goes through the real codec. A pair of processes keeps its order (as a ZeroMQ
connection does); different pairs overtake each other freely.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.client.answers import Answer
from penstock.client.ledger import ClientLedger
from penstock.client.sink import RowExtras
from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.ownership.tokenizer import TokenizerLedger
from penstock.protocol.process.participant import Ended, Participant
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire import codec
from penstock.protocol.wire.messages.membership import (
    Beat,
    Capacity,
    Goodbye,
    Hello,
    Identity,
    Phase,
)
from penstock.protocol.wire.messages.requests import (
    Cancel,
    ChoiceState,
    Enqueue,
    Rejected,
    RequestHead,
    Submit,
    Tokens,
    TokenWork,
    Work,
)
from penstock.protocol.wire.messages.tokens import (
    Content,
    End,
    EndReason,
    Event,
    Reasoning,
    Text,
    TokenBatch,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.router.dispatch import Dispatcher
from penstock.services.router.roster import Roster

ROUTER = "ipc:///sim/router.sock"
TICK = 0.25
BEAT = 0.5
STEP = 0.02


def token_at(prompt: list[int], choice: int, position: int) -> int:
    """The model: a pure function of the prompt, the choice and the position."""
    return (sum(prompt) * 31 + choice * 7919 + position * 104729) % 1000 + 1


def expected_output(prompt: list[int], choice: int, max_tokens: int, stop: int) -> list[int]:
    tokens = []
    for position in range(max_tokens):
        tokens.append(token_at(prompt, choice, position))
        if tokens[-1] % 101 == stop:
            break
    return tokens


class World:
    """The virtual clock, the network, and all processes."""

    def __init__(self, seed: int, loss: float = 0.0, delay: float = 0.005) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.loss = loss
        self.delay = delay
        self.nodes: dict[str, Node] = {}
        self.messages = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last_arrival: dict[tuple[int, str], float] = {}

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def transmit(self, sender: int, address: str, frame: bytes) -> None:
        self.messages += 1
        if self.random.random() < self.loss:
            return
        arrival = self.now + self.random.expovariate(1 / self.delay)
        pair = (sender, address)
        arrival = max(arrival, self._last_arrival.get(pair, 0.0))
        self._last_arrival[pair] = arrival
        self.after(arrival - self.now, lambda: self._arrive(address, frame))

    def _arrive(self, address: str, frame: bytes) -> None:
        node = self.nodes.get(address)
        if node is not None:
            node.receive(*codec.decode(frame))

    def kill(self, node: Node) -> None:
        node.alive = False
        if self.nodes.get(node.address) is node:
            del self.nodes[node.address]

    def stop(self, node: Node) -> None:
        """What arrives waits for it; whether it ever goes on, nobody knows."""
        node.alive = False
        node.unread = []

    def go_on(self, node: Node) -> None:
        """It reads what has arrived meanwhile, and knows nothing of the time that has passed."""
        node.alive = True
        unread, node.unread = node.unread, None
        node.go_on()
        for sender, message in unread or []:
            node.receive(sender, message)

    def of(self, kind: type[Node]) -> list[Node]:
        return [node for node in self.nodes.values() if isinstance(node, kind)]


class Node:
    """One process: an address, an incarnation, a participant, a timer."""

    service = ""
    model = ""

    def __init__(self, world: World, address: str = "") -> None:
        self.world = world
        self.incarnation = world.random.getrandbits(62) | 1
        self.address = address or f"ipc:///sim/{self.service}-{self.incarnation:x}.sock"
        self.alive = True
        self.unread: list[tuple[int, codec.Message]] | None = None
        """What has come to a stopped process."""
        self.closed: set[str] = set()
        self._encode = codec.Encoder(self.incarnation)
        self.participant = Participant(
            self.service, self, ROUTER, Identity(1, "sim", model=self.model)
        )
        self.participant.on_change = lambda gone: self.on_gone(gone)
        self.participant.status.phase = Phase.READY
        world.nodes[self.address] = self
        world.after(world.random.random() * TICK, self._tick)
        world.after(world.random.random() * BEAT, self._beat)

    def send(self, address: str, message: codec.Message) -> bool:
        if address in self.closed or not self.alive:
            return False
        self.world.transmit(self.incarnation, address, self._encode(message))
        return True

    def send_last(self, address: str, message: codec.Message) -> None:
        self.world.transmit(self.incarnation, address, self._encode(message))

    def forget(self, address: str) -> None:
        self.closed.add(address)

    def reopen(self, address: str) -> None:
        self.closed.discard(address)

    def outbox_bytes(self, address: str) -> int:
        return 0

    def receive(self, sender: int, message: codec.Message) -> None:
        if self.unread is not None:
            self.unread.append((sender, message))
        if not self.alive:
            return
        try:
            if not self.participant.handle(sender, message, self.world.now):
                self.on_message(sender, message)
        except Ended:
            self.world.kill(self)

    def go_on(self) -> None:
        """The timers of a process that was stopped run again."""
        self._tick()
        self._beat()

    def _tick(self) -> None:
        if self.alive:
            self.world.after(TICK, self._tick)
            self.participant.tick(self.world.now)
            self.on_tick()

    def _beat(self) -> None:
        if not self.alive:
            return
        self.world.after(BEAT, self._beat)
        if self.participant.joined:
            status = self.participant.status
            beat = Beat(
                self.address, self.incarnation, status.phase, "", 0, 0.0, 0.0, self.load(),
                Capacity(), b"", self.participant.membership_version,
            )  # fmt: skip
            self.send(ROUTER, beat)

    def load(self) -> int:
        return 0

    def on_message(self, sender: int, message: codec.Message) -> None: ...

    def on_tick(self) -> None: ...

    def on_gone(self, gone: dict) -> None: ...


class RouterNode(Node):
    service = "router"

    def __init__(self, world: World) -> None:
        super().__init__(world, ROUTER)
        self.roster = Roster(
            self.incarnation, self.send, self.send_last, self.forget, lambda level, text: None
        )
        self.dispatcher = Dispatcher(self.roster, self.send, world.now)

    def on_message(self, sender: int, message: codec.Message) -> None:
        now = self.world.now
        match message:
            case Submit() | Enqueue():
                self.dispatcher.request(message, now)
            case Cancel():
                self.dispatcher.cancel(sender, message, now)
            case Beat():
                self.roster.beat(message, now)
            case Hello():
                self.roster.hello(message, now)
            case Goodbye():
                self.roster.goodbye(message.incarnation)
        self.roster.publish(self.world.now)

    def on_tick(self) -> None:
        self.roster.tick(self.world.now)
        self.dispatcher.tick(self.world.now)
        self.roster.publish(self.world.now)

    def report_death(self, node: Node) -> None:
        """What the launcher's pidfd tells the router."""
        for member in list(self.roster.members.values()):
            if member.address == node.address:
                self.roster.bury(member, "its process ended")
        self.roster.publish(self.world.now)


@dataclass
class Record:
    """What one client saw."""

    prompt: list[int]
    params: SamplingParams
    stop: int
    accepted: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    ends: dict[int, list[End]] = field(default_factory=dict)
    cancelled: bool = False
    late: int = 0
    request_id: int = 0
    frontend: FrontendNode | None = None

    @property
    def ended(self) -> bool:
        return bool(self.rejected) or len(self.ends) == self.params.n

    def on_accepted(self, prompt_tokens: int) -> None:
        self.accepted += 1
        assert prompt_tokens == len(self.prompt)

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        if self.cancelled or self.rejected or choice in self.ends:
            self.late += 1
        self.answers.setdefault(choice, Answer()).add(text, extras or RowExtras())
        self.tokens[choice] = self.tokens.get(choice, 0) + tokens
        if extras is not None and extras.end is not None:
            self.ends.setdefault(choice, []).append(extras.end)

    def on_rejected(self, rejected: Rejected) -> None:
        if self.cancelled or self.ended:
            self.late += 1
        self.rejected.append(rejected)


class FrontendNode(Node):
    service = "frontend"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.ledger = ClientLedger(self.address, self.incarnation, self.participant, self.send)

    def submit(self, prompt: list[int], params: SamplingParams, stop: int) -> Record:
        record = Record(prompt, params, stop, frontend=self)
        work = Work(
            RequestHead(tenant="tenant", prompt_kind="tokens"),
            Tokens(array("i", [stop, *prompt]).tobytes()),
            params,
            [ChoiceState(choice) for choice in range(params.n)],
        )
        record.prompt = [stop, *prompt]
        record.request_id = self.ledger.submit(work, record, self.world.now)
        return record

    def cancel(self, record: Record) -> None:
        record.cancelled = True
        self.ledger.cancel(record.request_id)

    def on_message(self, sender: int, message: codec.Message) -> None:
        self.ledger.handle(sender, message, self.world.now)

    def on_tick(self) -> None:
        self.ledger.tick(self.world.now)

    def on_gone(self, gone: dict) -> None:
        self.ledger.peers_gone(gone, self.world.now)


@dataclass
class SimulatedDelta:
    content: Content
    used: int
    stop: str | None


class SimulatedStream:
    """Each token is ``<n>``; a token divisible by 13 is held back until the next one.

    One that parses makes an event of each token, on a channel that the token and the calls before
    it name.
    """

    def __init__(self, stops: list[str], parses: bool) -> None:
        self.stops = stops
        self.stop: str | None = None
        self._parses = parses
        self._calls = 0
        self._held: list[int] = []

    def push(self, tokens: memoryview, last_is_stop: bool) -> SimulatedDelta:
        released, self._held = self._held, []
        for used, token in enumerate(tokens, 1):
            if f"<{token}>" in self.stops:
                return SimulatedDelta(self._content(released), used, f"<{token}>")
            if last_is_stop and used == len(tokens):
                break
            if token % 13 == 0 and used == len(tokens):
                self._held = [token]
            else:
                released.append(token)
        return SimulatedDelta(self._content(released), len(tokens), None)

    def finish(self) -> Content:
        held, self._held = self._held, []
        return self._content(held)

    def replay(self, tokens: memoryview) -> Content:
        return self.push(tokens, False).content

    def _content(self, tokens: list[int]) -> Content:
        if self._parses:
            return [self._event(token) for token in tokens]
        return "".join(f"<{token}>" for token in tokens)

    def _event(self, token: int) -> Event:
        text = f"<{token}>"
        match token % 5:
            case 0:
                self._calls += 1
                return ToolCallOpened(self._calls - 1, f"call-{token}", text)
            case 1 if self._calls:
                return ToolArguments(token % self._calls, text)
            case 2:
                return Reasoning(text)
            case _:
                return Text(text)


def stream_of(prompt: list[int], params: SamplingParams) -> SimulatedStream:
    """Every other prompt's output is parsed."""
    return SimulatedStream(params.stop, parses=len(prompt) % 2 == 0)


class TokenizerNode(Node):
    service = "tokenizer"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.ledger = TokenizerLedger(
            self.address,
            self.participant,
            self.send,
            self._begin,
            lambda work, params: stream_of(list(array("i", work.prompt)), params),
        )

    def load(self) -> int:
        return len(self.ledger.open)

    def _begin(self, request_id: int, attempt: int, work: Work) -> None:
        assert isinstance(work.prompt, Tokens)
        token_work = TokenWork(
            work.head, work.prompt.ids, b"", work.choices, [], work.params.max_tokens or 16
        )
        self.world.after(
            self.world.random.random() * 0.02,
            lambda: self.ledger.encoded(
                request_id, attempt, token_work, work.params, self.world.now
            ),
        )

    def on_message(self, sender: int, message: codec.Message) -> None:
        self.ledger.handle(sender, message, self.world.now)

    def on_tick(self) -> None:
        self.ledger.tick(self.world.now)

    def on_gone(self, gone: dict) -> None:
        self.ledger.peers_gone(gone, self.world.now)


class SimulatedCore:
    """Runs everything at once: a token for each open choice in each step."""

    room = 1_000_000
    """Requests that may be open."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[int, str, TokenWork, dict[int, int]]] = {}
        self.refusals = 0

    def add(
        self, request_id: int, attempt: int, owner: str, work: TokenWork, now: float
    ) -> Rejected | None:
        if request_id not in self.open and len(self.open) >= self.room:
            self.refusals += 1
            return Rejected(
                request_id, attempt, 503, "overloaded_error", "full",
                retry_after=1.0, retry_elsewhere=True,
            )  # fmt: skip
        positions = {state.choice: len(state.output) // 4 for state in work.choices}
        for state in work.choices:
            prompt = list(array("i", work.prompt))
            done = list(array("i", state.output))
            assert done == [token_at(prompt, state.choice, p) for p in range(len(done))]
        self.open[request_id] = (attempt, owner, work, positions)
        return None

    def cancel(self, request_id: int, attempt: int, owner: str, choice: int = -1) -> bool:
        held = self.open.get(request_id)
        if held is None or held[1] != owner or held[0] > attempt:
            return False
        if choice >= 0:
            held[3].pop(choice, None)
        if choice < 0 or not held[3]:
            del self.open[request_id]
        return True

    def holder(self, request_id: int) -> tuple[int, str] | None:
        held = self.open.get(request_id)
        return (held[0], held[1]) if held else None

    def holding(self, owner: str) -> list[tuple[int, int]]:
        return [(i, held[0]) for i, held in self.open.items() if held[1] == owner]

    def failures(self, request_id: int) -> int:
        return 1

    def owners(self) -> list[str]:
        return list({held[1] for held in self.open.values()})

    def step(self) -> dict[str, TokenBatch]:
        batches: dict[str, TokenBatch] = {}
        for request_id, (attempt, owner, work, positions) in list(self.open.items()):
            prompt = list(array("i", work.prompt))
            batch = batches.setdefault(owner, TokenBatch([], [], [], [], [], b"", []))
            for choice, position in list(positions.items()):
                token = token_at(prompt, choice, position)
                row = len(batch.ids)
                batch.ids.append(request_id)
                batch.choices.append(choice)
                batch.attempts.append(attempt)
                batch.indices.append(position)
                batch.counts.append(1)
                batches[owner] = batch = TokenBatch(
                    batch.ids, batch.choices, batch.attempts, batch.indices, batch.counts,
                    batch.tokens + array("i", [token]).tobytes(), batch.ends,
                )  # fmt: skip
                positions[choice] = position + 1
                end = None
                if token % 101 == prompt[0]:
                    end = End(row, EndReason.STOP, token)
                elif position + 1 >= work.max_tokens:
                    end = End(row, EndReason.LENGTH)
                if end is not None:
                    batch.ends.append(end)
                    del positions[choice]
            if not positions:
                del self.open[request_id]
        return batches


class SchedulerNode(Node):
    service = "scheduler"
    model = "sim"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.core = SimulatedCore()
        self.ledger = SchedulerLedger(self.participant, self.send, self.core)
        world.after(STEP, self._step)

    def load(self) -> int:
        return len(self.core.open)

    def go_on(self) -> None:
        super().go_on()
        self._step()

    def _step(self) -> None:
        if not self.alive:
            return
        self.world.after(STEP, self._step)
        for owner, batch in self.core.step().items():
            self.send(owner, batch)

    def on_message(self, sender: int, message: codec.Message) -> None:
        self.ledger.handle(sender, message, self.world.now)

    def on_tick(self) -> None:
        self.ledger.tick(self.world.now)

    def on_gone(self, gone: dict) -> None:
        self.ledger.peers_gone(gone)


def expected_events(record: Record, choice: int) -> tuple[list[Event], int]:
    """(events, counted tokens) of an undisturbed run."""
    tokens = expected_output(record.prompt, choice, record.params.max_tokens or 16, record.stop)
    stream = stream_of(record.prompt, record.params)
    answer, count = Answer(), 0

    def take(content: Content) -> None:
        if content:
            answer.content += [content] if isinstance(content, str) else content

    for token in tokens:
        is_stop = token % 101 == record.stop
        delta = stream.push(memoryview(array("i", [token])), is_stop)
        take(delta.content)
        count += 1
        if delta.stop is not None:
            return answer.events(), count
    take(stream.finish())
    return answer.events(), count

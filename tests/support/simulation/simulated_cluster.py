"""The other processes of the simulated cluster: the real ownership rules, roster and dispatcher."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from support.simulation.simulated_clients import (
    END_OF_TEXT,
    HELD_BACK,
    Asked,
    Channels,
    Record,
    is_parsed,
    text_of,
)
from support.simulation.simulated_engine import EngineTraits, SchedulerNode, WorkerNode
from support.simulation.simulated_keeper import KeeperNode, KeptWorkerNode
from support.simulation.simulated_network import ROUTER, Node, World

from penstock.client.ledger import ClientLedger
from penstock.protocol.ownership.choice import Delta, joined
from penstock.protocol.ownership.tokenizer import TokenizerLedger
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire import codec
from penstock.protocol.wire.messages.membership import Beat, Goodbye, Hello, Peer, Role
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    Cancel,
    Enqueue,
    Inputs,
    Submit,
    Tokens,
    TokenWork,
    Work,
    prompts_of,
    split_ids,
)
from penstock.protocol.wire.messages.tokens import Content, RowDetails, RowLogprobs
from penstock.services.router.dispatch import Dispatcher
from penstock.services.router.roster import Roster
from penstock.services.tokenizer.slot_sampling import slot_sampling
from penstock.services.tokenizer.stop_strings import StopStrings

ENCODING = 0.02
"""Seconds in which a prompt is turned into tokens, at most."""


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

    def num_open(self) -> int:
        return len(self.dispatcher.held)

    def num_remembered(self) -> int:
        return len(self.dispatcher._tombstones) + len(self.dispatcher.placement)


class FrontendNode(Node):
    service = "frontend"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.ledger = ClientLedger(self.address, self.incarnation, self.participant, self.send)

    def submit(self, asked: Asked) -> Record:
        record = Record(asked, self)
        record.request_id = self.ledger.submit(asked.work(), record, self.world.now)
        return record

    def cancel(self, record: Record) -> None:
        record.cancelled = True
        self.ledger.cancel(record.request_id)

    def on_message(self, sender: int, message: codec.Message) -> None:
        self.ledger.handle(sender, message, self.world.now)

    def on_tick(self) -> None:
        self.ledger.tick(self.world.now)

    def on_gone(self, gone: dict[int, Peer]) -> None:
        self.ledger.peers_gone(gone, self.world.now)

    def num_open(self) -> int:
        return len(self.ledger.open)


class SimulatedStream:
    """The content of one choice, with the real search for stop strings where it is plain text."""

    def __init__(self, stops: list[str], parsed: bool) -> None:
        self._channels = Channels() if parsed else None
        self._wanted = stops
        self._stops = StopStrings([] if parsed else stops)
        self._held: list[int] = []
        self.reasoning_tokens = 0

    @property
    def stop(self) -> str | None:
        return self._stops.found

    def push(self, tokens: memoryview, last_is_stop: bool = False) -> Delta:
        released: Content = ""
        for used, token in enumerate(tokens, 1):
            if last_is_stop and used == len(tokens):
                break
            self._held.append(token)
            if token % HELD_BACK:
                released = joined(released, self._release())
                if self.stop is not None:
                    return Delta(released, used, self.stop)
        return Delta(released, len(tokens), None)

    def _release(self) -> Content:
        """What the tokens bring that were held back."""
        held, self._held = self._held, []
        if self._channels is None:
            return self._stops.push("".join(map(text_of, held)))
        events = []
        for token in held:
            if text_of(token) in self._wanted:
                self._stops.found = text_of(token)
                break
            events.append(self._channels.event(token))
        return events

    def finish(self, *, complete: bool = False) -> Content:
        if self.stop is not None:
            return ""
        content = self._release()
        return content if self.stop is not None else joined(content, self._stops.flush())

    def replay(self, tokens: memoryview) -> Content:
        return self.push(tokens).content

    def details(
        self, row: int, first: bool, tokens: memoryview, found: RowLogprobs | None
    ) -> RowDetails | None:
        return None


class TokenizerNode(Node):
    service = "tokenizer"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.ledger = TokenizerLedger(
            self.address,
            self.participant,
            self.send,
            self._begin,
        )

    def load(self) -> int:
        return len(self.ledger.open)

    def _begin(self, request_id: int, attempt: int, work: Work) -> None:
        self.world.after(
            self.world.random.random() * ENCODING,
            lambda: self._encoded(request_id, attempt, work),
        )

    def _encoded(self, request_id: int, attempt: int, work: Work) -> None:
        if self.alive:
            tokens = token_work(work)
            stream = partial(make_stream, tokens, work.params)
            now = self.world.now
            self.ledger.encoded(request_id, attempt, tokens, work.params, stream, now)

    def on_message(self, sender: int, message: codec.Message) -> None:
        self.ledger.handle(sender, message, self.world.now)

    def on_tick(self) -> None:
        self.ledger.tick(self.world.now)

    def on_gone(self, gone: dict[int, Peer]) -> None:
        self.ledger.peers_gone(gone, self.world.now)

    def num_open(self) -> int:
        return len(self.ledger.open)

    def num_remembered(self) -> int:
        return len(self.ledger._tombstones)


def make_stream(work: TokenWork, params: SamplingParams, choice: int) -> SimulatedStream:
    prompts = split_ids(work.prompt, work.lengths)
    numbers = [state.choice for state in work.choices]
    prompt = prompts[numbers.index(choice)] if work.lengths else prompts[0]
    return SimulatedStream(params.stop, is_parsed(list(array("i", prompt))))


def token_work(work: Work) -> TokenWork:
    """What the tokenizer's threads make of tokens."""
    params = work.params
    prompts = [prompt.ids for prompt in prompts_of(work) if isinstance(prompt, Tokens)]
    is_batch = isinstance(work.prompt, Inputs)
    ends = [] if params.ignore_eos else [END_OF_TEXT]
    stop_ids = [*params.stop_token_ids, *ends]
    sampling = slot_sampling(params, stop_ids, [])
    asked = sampling.adjustments
    return TokenWork(
        work.head,
        b"".join(prompts),
        sampling.packed(),
        work.choices,
        stop_ids,
        params.max_tokens or 0,
        reads_output=asked is not None,
        reads_prompt=asked is not None and asked.reads_prompt,
        lengths=[len(ids) // TOKEN_BYTES for ids in prompts] if is_batch else [],
        reads_logits=asked is not None and asked.steers,
    )


class Cluster:
    """A world with its processes, and the launcher that starts them again."""

    def __init__(
        self,
        world: World,
        traits: EngineTraits | None = None,
        frontends: int = 2,
        tokenizers: int = 2,
        engines: int = 2,
        roles: Sequence[Role] = (),
    ) -> None:
        """roles: of the engines, whose blocks a keeper keeps then; they count from the first on."""
        self.world = world
        self.traits = traits or EngineTraits()
        self.router = RouterNode(world)
        for _ in range(frontends):
            FrontendNode(world)
        for _ in range(tokenizers):
            TokenizerNode(world)
        for number in range(engines):
            role = roles[number] if roles else "both"
            SchedulerNode(world, f"engine-{number}", self.traits, 0, role)
            for rank in range(self.traits.world_size):
                kind = KeptWorkerNode if self.traits.kept_bytes else WorkerNode
                kind(world, f"engine-{number}", self.traits, rank)
        if self.traits.kept_bytes:
            KeeperNode(world, "", self.traits)
        world.on_death = self.replace
        world.run(world.now + 4.0)

    def kill_one(self, kind: type[Node]) -> None:
        """One process dies at a random moment; its replacement comes a little later."""
        victims = self.world.of(kind)
        if victims:
            victim = self.world.random.choice(victims)
            self.world.kill(victim)
            self.replace(victim)

    def replace(self, victim: Node) -> None:
        """The launcher has seen a process end, and mostly the router hears of it."""
        world = self.world
        if victim.is_replaced:
            return
        victim.is_replaced = True
        if isinstance(victim, RouterNode):
            world.after(world.random.random(), self._new_router)
            return
        if isinstance(victim, SchedulerNode | WorkerNode):
            world.failures += 1
        if world.random.random() < 0.7:  # the others fall silent without an obituary
            world.after(0.01, lambda: self.router.alive and self.router.report_death(victim))
        world.after(0.5 + world.random.random(), lambda: victim.replacement() and None)

    def _new_router(self) -> None:
        self.router = RouterNode(self.world)

    def open_anywhere(self) -> dict[str, int]:
        """Processes that still hold something, and how much."""
        found = {node.address: node.num_open() for node in self.world.nodes.values()}
        return {address: count for address, count in found.items() if count}

    def remembered_anywhere(self) -> dict[str, int]:
        found = {node.address: node.num_remembered() for node in self.world.nodes.values()}
        return {address: count for address, count in found.items() if count}

"""The library's place in the pipeline: a mailbox, a membership, the ledger of open requests."""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Callable

import msgspec

from penstock.client.answers import Answer, AnswerSink, RequestProgress
from penstock.client.gateway_interface import ServedModel
from penstock.client.ledger import ClientLedger
from penstock.client.meters import Meters
from penstock.client.open_request import OpenRequest
from penstock.client.sink import RowExtras
from penstock.client.tasks import repeat_refusal, task_refusal
from penstock.protocol.config import ClusterConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.process.service import open_mailbox
from penstock.protocol.shown_values import show
from penstock.protocol.tasks import GENERATE, OF_TOKENIZERS
from penstock.protocol.wire.messages.membership import Capacity, Identity, Phase
from penstock.protocol.wire.messages.requests import Rejected, RequestHead, Work, prompts_of
from penstock.services.library.outputs import Logprob

JOIN_SECONDS = 10.0
MAX_OPEN = 1000
"""Requests of one program in the pipeline at once; further ones follow as these end."""
RETRY_SECONDS = 0.05
"""Until a request is sent again for which the server had no room, the first time."""
MAX_RETRY_SECONDS = 1.0


def retry_seconds(attempt: int) -> float:
    """Seconds until a request that found no room is sent for the ``attempt``-th time again, from 0
    on: longer each time, and not the same for all that were refused together."""
    longest = min(MAX_RETRY_SECONDS, RETRY_SECONDS * (1 << min(attempt, 10)))
    return longest * random.uniform(0.5, 1.0)


def adapted_head(head: RequestHead, capacity: Capacity) -> RequestHead | Rejected:
    """The head with the digest of its adapter instead of the name, or why there is none."""
    name = head.adapter
    if not name:
        return head
    if head.task != GENERATE and head.task not in OF_TOKENIZERS:
        reason = f"adapter is {show(name)}, which only generates; leave it out to {head.task}"
        return Rejected(0, 0, 400, "invalid_request_error", reason, param="adapter")
    loaded = {one.name: one for one in capacity.adapters if one.name}
    if one := loaded.get(name):
        rows = one.virtual_tokens
        return msgspec.structs.replace(head, adapter=one.digest, virtual_tokens=rows)
    if not capacity.max_model_len:
        reason = "no engine has said yet which adapters it has; try again"
        return Rejected(0, 0, 503, "overloaded_error", reason, param="adapter")
    known = ", ".join(map(show, sorted(loaded))) or "none"
    reason = f"the adapter {show(name)} does not exist; loaded are: {known}"
    return Rejected(0, 0, 404, "not_found_error", reason, param="adapter")


def refusal_of(head: RequestHead, capacity: Capacity) -> Rejected | None:
    """Of a request for what the engine does not do, or not as it is wanted, once that is known."""
    if not capacity.max_model_len:
        return None
    does = head.task == GENERATE and capacity.generates
    if does and not head.deterministic:
        return None
    sizes = capacity.max_model_len, capacity.vocab_size
    served = ServedModel(
        head.model, [], *sizes, capacity.tasks, capacity.generates, repeats=capacity.repeats
    )
    return repeat_refusal(head, served) if does else task_refusal(head, [served])


class Submission:
    """One prompt in the pipeline, or a batch, and what has come of it."""

    def __init__(self, work: Work, meters: Meters, name: str) -> None:
        self.id = 0
        self.name = name
        """Given by the caller; the id is the pipeline's."""
        self.request: OpenRequest | None = None
        """``None``: it was refused at once."""
        self.prompts = len(prompts_of(work))
        self.progress = RequestProgress(
            self.prompts, len(work.choices), meters, time.monotonic(), task=work.head.task
        )
        self.answers = [Answer() for _ in work.choices]
        self.taken = [0] * len(work.choices)
        """Tokens of each choice that were handed out, where they are as they come."""
        self.opened: list[dict[int, tuple[str, str]]] = [{} for _ in work.choices]
        """(id, name) of the tool calls that were handed out, likewise."""
        self.prompt_ids: list[int] = []
        self.wants_prompt_logprobs = work.params.prompt_logprobs is not None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.logprobs: list[list[dict[int, Logprob]]] = [[] for _ in work.choices]
        """Of the tokens of each choice, as far as its details were read."""
        self.read_details = [0] * len(work.choices)

    @property
    def at_fault(self) -> int:
        """Of a batch that ended with an error: the place of the prompt that caused it."""
        if (rejected := self.progress.rejected) is not None:
            return rejected.choice
        failed = (n for n, one in enumerate(self.answers) if one.has_ended and one.end is None)
        return next(failed, 0) if self.prompts > 1 else 0

    @property
    def done(self) -> bool:
        progress = self.progress
        return not progress.open_choices or bool(progress.rejected or progress.failed)


class WakingSink(AnswerSink):
    """Says that something has come."""

    __slots__ = ("_wake",)

    def __init__(self, submission: Submission, wake: Callable[[], None]) -> None:
        super().__init__(submission.progress, submission.answers)
        self._wake = wake

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        super().on_row(choice, text, tokens, extras)
        self._wake()

    def on_rejected(self, rejected: Rejected) -> None:
        super().on_rejected(rejected)
        self._wake()


class Member:
    """Joins the pipeline as a frontend; whoever derives from it brings the messages."""

    def __init__(self, router: str) -> None:
        self._meters = Meters(Registry())
        self._mailbox = open_mailbox(ClusterConfig(router=router), "frontend")
        identity = Identity(os.getpid(), socket.gethostname())
        self._participant = Participant("frontend", self._mailbox, router, identity)
        self._participant.status.phase = Phase.READY
        self.ledger = ClientLedger(
            self._mailbox.address, self._mailbox.incarnation, self._participant, self._mailbox.send
        )
        self._participant.on_change = lambda gone: self.ledger.peers_gone(gone, time.monotonic())
        self._beats = BeatThread(self._participant, self._mailbox)
        self._beats.start()
        self._model = ""
        self._capacity = Capacity()
        self._router = router
        self._join_by = time.monotonic() + JOIN_SECONDS

    def has_joined(self) -> bool:
        """Raises ``TimeoutError`` when the router does not answer."""
        if self._participant.joined and self._participant.of("scheduler", True):
            return True
        if time.monotonic() > self._join_by:
            self.leave()
            raise TimeoutError(f"no answer from the router at {self._router}")
        return False

    @property
    def model(self) -> str:
        """What the engine serves, by its first name; while it is away, what it last served."""
        for peer in self._participant.of("scheduler"):
            self._model = peer.identity.model
        return self._model

    @property
    def capacity(self) -> Capacity:
        """The engine's limits; while it is away, the last known ones."""
        for peer in self._participant.of("scheduler"):
            if peer.capacity.max_model_len:
                self._capacity = peer.capacity
        return self._capacity

    def submit(
        self,
        work: Work,
        name: str = "",
        wake: Callable[[], None] | None = None,
        *,
        called: float | None = None,
    ) -> Submission:
        """Send a request on its way. wake: called whenever something of it has come. called: when
        its time began to run, monotonic; ``None``: now."""
        now, left = time.monotonic(), work.head.time_left
        if left is not None and called is not None:
            left = max(0.0, called + left - now)
        capacity = self.capacity
        head = msgspec.structs.replace(work.head, model=self.model, request_id=name, time_left=left)
        adapted = refusal_of(head, capacity) or adapted_head(head, capacity)
        params = work.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        sent = head if isinstance(adapted, Rejected) else adapted
        work = msgspec.structs.replace(work, head=sent, params=params)
        submission = Submission(work, self._meters, name)
        if wake is None:
            sink = AnswerSink(submission.progress, submission.answers, prompts=submission.prompts)
        else:
            sink = WakingSink(submission, wake)
        if isinstance(adapted, Rejected):
            sink.on_rejected(adapted)
            return submission
        submission.id = self.ledger.submit(work, sink, now)
        submission.request = self.ledger.open.get(submission.id)
        return submission

    def take_messages(self) -> None:
        """Handle all that is in the inbox. Raises ``Ended`` when fenced."""
        now = time.monotonic()
        for sender, message in self._mailbox.drain():
            if not self._participant.handle(sender, message, now):
                self.ledger.handle(sender, message, now)

    def tick(self, now: float) -> None:
        """Call it a few times a second."""
        self._participant.tick(now)
        self.ledger.tick(now)

    def leave(self) -> None:
        """Leave the pipeline; open requests are cancelled."""
        for request_id in list(self.ledger.open):
            self.ledger.cancel(request_id)
        self._participant.goodbye()
        self._beats.stop()
        self._mailbox.close(linger_ms=100)

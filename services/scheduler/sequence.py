"""Requests and their sequences (one for each choice): all state that the scheduler keeps of them.

A sequence is in one of these places:

    waiting    in the waiting queue; holds neither slot nor blocks. Put off for a moment where its
               grammar was not compiled yet
    running    has a slot: either computes its known tokens in chunks (prefill) or decodes
    draining   planned up to its length limit: slot and blocks are gone, results are not yet back
    finished   its end is on the way to the owner

A token counts as *in flight* from the plan that samples it until its result is applied. A
sequence that is preempted keeps what is in flight and waits for it before it is planned again.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.protocol.logprobs import PackedLogprobs, entry_bytes
from penstock.protocol.wire.messages.cache_hints import RetainedSpan
from penstock.protocol.wire.messages.requests import RequestHead
from penstock.services.scheduler.kv_holder import SequenceHolder

QueueKey = tuple[float, ...]


class QueuePlace(NamedTuple):
    """Where a sequence waits."""

    rank: int
    lane: str
    key: QueueKey


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of a client's request."""

    id: int
    attempt: int
    head: RequestHead
    owner: str
    """Address of the tokenizer that gets the tokens."""
    arrival: float
    """When the client's request arrived, in the scheduler's monotonic seconds."""
    deadline: float | None
    stop_ids: frozenset[int]
    root: bytes
    """Start of the hash chain of its blocks: requests share blocks only under the same root."""
    prefix: bytes
    """As in ``TokenWork``; may be empty."""
    prompt_len: int
    """Tokens of its prompt, virtual ones included; of a batch those of all prompts."""
    max_output: int
    """Tokens that one choice may generate: max_tokens, or what the engine's limits leave; with 0 it
    ends when its prompt is computed, and the token drawn then is dropped."""
    sampling: bytes
    """What its choices ask of the sampler, for the worker."""
    reads_output: bool = False
    """What is drawn depends on the output so far."""
    reads_prompt: bool = False
    """And on the whole prompt."""
    reads_logits: bool = False
    """And on how probable the output was to the model."""
    corpus: bytes = b""
    """As in ``NewSlot``, where its engine drafts; empty: it wants no drafts."""
    has_task: bool = False
    """It brings what its task makes of the prompt, and no tokens."""
    num_prompts: int = 1
    """More than one: a batch, of which each choice has its own prompt."""
    num_cached: int = 0
    """Prompt tokens that the prefix cache held when the request came, as far as the policy asks
    for it; they may be gone when it starts."""
    open: dict[int, Sequence] = field(default_factory=dict)
    """Sequences that have not ended, by choice."""
    retain: list[RetainedSpan] = field(default_factory=list)
    """As in ``TokenWork``, and so is …"""
    release: bool = False
    retained: bool = False
    """What it asks to retain is, in the KV memory of this epoch."""
    num_waiting: int = 0
    queued_at: float = 0.0
    """When it came to this scheduler, in its monotonic seconds."""
    trace: str = ""
    """``head.trace``, where spans are recorded and it is sampled."""
    deadline_key: QueueKey | None = None


class PromptLogprobs:
    """Logprobs of a prompt's tokens from the second one on, collected chunk by chunk.

    A result that comes late, of a chunk planned before its sequence lost its slot, holds what the
    later result for these positions will: entries are laid where they belong, never left out.
    """

    __slots__ = ("_entries", "most")

    def __init__(self, most: int | None) -> None:
        """Without ``most`` nobody asks for them."""
        self.most = most
        self._entries = bytearray()

    def add(self, start: int, found: PackedLogprobs) -> None:
        """Add the logprobs of a chunk whose first position is ``start``."""
        first = start * entry_bytes(found.most)
        if first <= len(self._entries):
            self._entries[first:] = found.entries

    def packed(self) -> PackedLogprobs | None:
        """All of them; they are kept no longer."""
        if self.most is None:
            return None
        entries, self._entries = self._entries, bytearray()
        return PackedLogprobs(self.most, bytes(entries))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One choice of a request."""

    request: Request
    choice: int
    number: int
    """Unique in this scheduler, ascending with arrival."""
    tokens: array[int]
    """Prompt and the output known so far; first the virtual tokens of its request's adapter, if
    there are any. ``array('i')`` is int32 wherever torch runs."""
    prompt_len: int
    max_len: int
    """Tokens at which it ends: max_tokens, max_model_len or KV memory."""
    wanted_len: int
    """Tokens at which it would end where the engine holds so many."""
    prompt_logprobs: PromptLogprobs = field(default_factory=lambda: PromptLogprobs(None))
    second: int = 0
    """Where the second text of a pair begins in the prompt; 0: there is none."""
    own_sampling: bytes = b""
    """What it asks of the sampler, where that is not what its request's choices do."""
    start_index: int = 0
    """Index of the first token of the row that says how it came to run here."""
    pooled: bytes | None = None
    """What its task has made of its prompt."""

    # Where it is.
    slot: int = -1
    """-1: not running."""
    num_noted: int = 0
    """Prefixes that were looked for since it began to run: see ``CachedPrefixes``."""
    queue_place: QueuePlace | None = None
    """``None``: not waiting."""
    finished: bool = False
    resumed: bool = False
    """Preempted, rolled back or continued from elsewhere: goes before new sequences."""

    # While it runs.
    decoding: bool = False
    num_computed: int = 0
    """Positions whose K and V are written by the plans made so far. While it decodes, and a row may
    bring several tokens: so many at most."""
    kv: SequenceHolder = field(init=False)
    """What it holds of KV memory, and what its blocks are called. The core sets it."""
    due: int = 0
    """While it decodes: computed positions at which it needs blocks or has come to its limit."""
    num_served: int = 0
    """Positions planned at any time; fewer are computed now after it lost its slot."""
    in_flight: int = 0
    """Rows planned whose results are not applied yet."""

    num_hits: int = 0
    """Positions taken from the prefix cache when it last got its slot."""
    cached_tokens: int = -1
    """Prompt tokens found in the cache when it first ran, virtual ones aside; -1: never ran."""
    started_at: float = 0.0
    """When it first ran, in the scheduler's monotonic seconds; 0: never ran."""
    first_token_at: float = 0.0
    """When it had its first token here; 0: has none."""
    queued_s: float = 0.0
    """Seconds from the request's arrival until it first ran."""
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    """Tokens drafted for it here, as in ``End``."""
    preemptions: int = 0
    """How often it lost its slot and its blocks to others."""

    fetched: bool = False
    """What the keeper had of it was asked for since it lost its slot, or arrived."""

    times_put_off: int = 0
    """How often its grammar was not compiled yet when its next token was due."""

    # After failures.
    trusted: bool = False
    """Has produced a token since its last failure."""
    proven: bool = False
    """Has produced a token here at all."""
    suspect: bool = False
    """May have killed a step: runs alone until it has produced a token."""
    strikes: int = 0
    """Failed steps without a new token in between."""

    @property
    def sampling(self) -> bytes:
        """What it asks of the sampler, for the worker."""
        return self.own_sampling or self.request.sampling

    @property
    def shown_prompt_len(self) -> int:
        """Tokens of the prompt that its client knows of."""
        return self.prompt_len - self.request.head.virtual_tokens

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_cut(self) -> bool:
        """It may have more tokens than this engine holds: a larger one had taken it."""
        return self.max_len < self.wanted_len

    @property
    def owes_prompt(self) -> bool:
        """Its prompt is to be computed, whatever is generated behind it."""
        retains = bool(self.request.retain) and not self.num_output
        return self.request.has_task or self.wants_prompt or retains

    @property
    def wants_prompt(self) -> bool:
        """Logprobs of the prompt are owed with the first row: all of it must be computed."""
        return self.prompt_logprobs.most is not None and not self.num_output

    @property
    def has_begun(self) -> bool:
        """Whether it ever ran here, or was at the head of the queue and waits for its blocks."""
        return self.cached_tokens >= 0 or self.fetched

    @property
    def running(self) -> bool:
        return self.slot >= 0

    def trust(self) -> None:
        """It has produced a token: whatever failed before was not its doing."""
        self.trusted = self.proven = True
        self.suspect = False
        self.strikes = 0
        self.times_put_off = 0

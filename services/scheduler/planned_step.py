"""A step as the planner makes it, and as its result is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.protocol.wire.messages.steps import Chunk, NewSlot
from penstock.services.scheduler.sequence import Request, Sequence


@dataclass(slots=True)
class Step:
    """A planned step: what its plan says, and what is kept to read its result."""

    number: int
    now: float = 0.0
    """When it is planned, in the scheduler's monotonic seconds."""
    micro_batch: int = 0
    """The one that decodes."""
    budget: int = 0
    """Positions that may still be added."""
    added: list[NewSlot] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    rows: list[Sequence | None] = field(default_factory=list)
    """In the order of ``StepResult.tokens``; ``None`` where nobody waits for the token."""
    num_decoding: int = 0
    """Rows that decode."""
    least_seconds: float = 0.0
    """Seconds that the step takes at least."""
    members: list[Sequence] = field(default_factory=list)
    """Prefilling sequences that compute in this step and have no row."""
    prompts: dict[int, Sequence] = field(default_factory=dict)
    """Slot → sequence, of those whose chunk brings logprobs of their prompt."""
    added_bytes: int = 0
    """Bytes that ``added`` and ``shared_prompts`` take in the plan, at most."""
    shared_prompts: list[bytes] = field(default_factory=list)
    """Prompts that entries of ``added`` point into."""
    _shared: dict[int, int] = field(default_factory=dict)
    """Places in ``shared_prompts`` by request."""

    @property
    def num_prefilled(self) -> int:
        """Positions of prefill."""
        return sum(chunk.count for chunk in self.chunks)

    def sequences(self) -> list[Sequence]:
        """All that compute in this step."""
        return [*(s for s in self.rows if s is not None), *self.members]

    def holds_prompt(self, request: Request) -> bool:
        """Whether the plan brings the prompt in ``shared_prompts``."""
        return request.id in self._shared

    def share_prompt(self, sequence: Sequence) -> int:
        """The place of a sequence's prompt in ``shared_prompts``."""
        place = self._shared.setdefault(sequence.request.id, len(self.shared_prompts))
        if place == len(self.shared_prompts):
            self.shared_prompts.append(sequence.tokens[: sequence.prompt_len].tobytes())
        return place

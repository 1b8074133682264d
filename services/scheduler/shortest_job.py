"""The policy ``sjf``: the least expected work first, with ageing."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.sequence import QueueKey, Request, Sequence

AGEING_TOKENS_PER_SECOND = 10.0
"""What a second of waiting is worth: a request with 1000 tokens of work more than another one
goes before it when it has come 100 s earlier. With ten times as much, a queue of a minute is nearly
first come, first served."""
LONGEST_LEAD_SECONDS = 600.0
"""Nothing overtakes a request that has come so much earlier, whatever its work."""
MEMORY = 64
"""Outputs that a mean is taken over; older ones fade."""
FEWEST = 8
"""Outputs below which a mean says nothing yet."""
MAX_TENANTS = 10_000
"""Tenants whose own mean is kept; past it the one not heard of for longest is forgotten."""


class RunningMean:
    """The mean of the first ``MEMORY`` values, then an exponential one with that memory."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, MEMORY)


class ShortestJobFirst(SchedulingPolicy):
    """Orders by expected work minus ``ageing`` tokens for each second of waiting.

    The work of a request, in tokens, is what its prompt leaves to compute and its expected
    output, for each choice: ``max_tokens``, but no more than the mean of the tenant's finished
    outputs (of all outputs, while the tenant has too few).

    Nothing starves. Waiting lowers all scores alike, so the order of two requests never changes,
    and the score can be written without a clock, in seconds: ``arrival + lead``, with a lead of
    ``work / ageing`` or ``longest_lead``, whichever is less. Whoever comes later than that has a
    greater score, however short it is, so a request waits for no more than what came before its
    lead was over.

    Shortest job first is optimal for the mean wait on one server (Smith, *Various optimizers for
    single-stage production*, 1956).
    """

    name = "sjf"
    uses_prefix_cache = True

    def __init__(
        self,
        ageing: float = AGEING_TOKENS_PER_SECOND,
        longest_lead: float = LONGEST_LEAD_SECONDS,
    ) -> None:
        if not (ageing > 0 and longest_lead >= 0):
            raise ValueError(
                "ageing must be above 0 tokens a second and longest_lead 0 s or more, "
                f"got {ageing} and {longest_lead}"
            )
        self.ageing = ageing
        self.longest_lead = longest_lead
        self._all = RunningMean()
        self._tenants: dict[str, RunningMean] = {}
        """Tenants in the order of their last finished output, oldest first."""

    def key(self, request: Request) -> QueueKey:
        return (self._score(request, self.work(request)),)

    def _score(self, request: Request, work: float) -> float:
        return request.arrival + min(work / self.ageing, self.longest_lead)

    def work(self, request: Request) -> float:
        """Tokens to compute for a request that waits; of a batch for one of its prompts."""
        prompt = (request.prompt_len - request.num_cached) / request.num_prompts
        return prompt + len(request.open) * self.expected_output(request)

    def expected_output(self, request: Request) -> float:
        """Output tokens of one choice."""
        for mean in (self._tenants.get(request.head.tenant), self._all):
            if mean is not None and mean.count >= FEWEST:
                return min(request.max_output, mean.value)
        return request.max_output

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The one with the most work left, ageing counted."""
        return max(running, key=lambda sequence: (self._left(sequence), sequence.number))

    def _left(self, sequence: Sequence) -> float:
        request = sequence.request
        known = max(len(sequence.tokens) - sequence.num_computed, 0)
        output = max(self.expected_output(request) - sequence.num_output, 0)
        return self._score(request, known + output)

    def on_finished(self, sequence: Sequence) -> None:
        tenant = sequence.request.head.tenant
        own = self._tenants.pop(tenant, None) or RunningMean()
        self._tenants[tenant] = own
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        own.add(sequence.num_output)
        self._all.add(sequence.num_output)

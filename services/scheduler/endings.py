"""How a sequence ends, other than by its newest token, and what its client is told."""

from __future__ import annotations

from typing import NamedTuple

from penstock.protocol.wire.messages.steps import RowFailure
from penstock.protocol.wire.messages.tokens import EndReason
from penstock.services.scheduler.sequence import Sequence

FIRST_SECONDS, LONGEST_SECONDS = 0.005, 0.25
MOST_PUT_OFF = 25
"""Times that a sequence is put off for its grammar: five seconds together."""


def put_off_seconds(times: int) -> float:
    """How long a sequence is put off that was put off so often before: most grammars take
    milliseconds, and each try costs a slot and the last tokens of its prompt."""
    return float(min(FIRST_SECONDS * 2**times, LONGEST_SECONDS))


class Ending(NamedTuple):
    """What the row of an end says; ``status`` is an HTTP status, 0 where there is no error."""

    reason: EndReason
    stop: int | None = None
    """The stop token that was found."""
    message: str = ""
    status: int = 0

    @property
    def is_fault(self) -> bool:
        """Whether the server is at fault: not the client, nor a deadline that has passed."""
        return self.status in (500, 503)


LENGTH = Ending(EndReason.LENGTH)
NOT_A_NUMBER = Ending(
    EndReason.ERROR,
    message="no token can be drawn for this request: the model's output is not a number (NaN or "
    "infinity); other requests are not affected",
    status=500,
)
ALL_BANNED = Ending(
    EndReason.ERROR,
    message="no token can be drawn for this request: its own parameters (allowed_token_ids, "
    "logit_bias, bad_words, min_tokens, penalties, structured outputs) leave none that may come "
    "next; relax them",
    status=400,
)

NOT_POOLED = Ending(
    EndReason.ERROR,
    message="the engine has computed the prompt, but made nothing of it for the request's task; "
    "the worker's log says whether it does this task",
    status=500,
)

NEVER_COMPILED = Ending(
    EndReason.ERROR,
    message="structured output: the grammar was not compiled within "
    f"{sum(map(put_off_seconds, range(MOST_PUT_OFF))):.0f} s; try again",
    status=503,
)


def row_failed(failure: RowFailure) -> Ending:
    """The worker can draw nothing for it, and says why."""
    return Ending(EndReason.ERROR, message=failure.reason, status=failure.status)


def not_brought(reason: str) -> Ending:
    """Its adapter could not be brought into a place of the device."""
    return Ending(
        EndReason.ERROR,
        message=f"the request's adapter could not be brought to the device: {reason}",
        status=500,
    )


def by_output(sequence: Sequence) -> Ending | None:
    """How the known output ends a sequence, if it does. One that may generate nothing has ended,
    unless something of its prompt is to be computed."""
    if sequence.num_output and sequence.tokens[-1] in sequence.request.stop_ids:
        return Ending(EndReason.STOP, sequence.tokens[-1])
    if len(sequence.tokens) < sequence.max_len or sequence.owes_prompt:
        return None
    return LENGTH if len(sequence.tokens) >= sequence.wanted_len else outgrown(sequence)


def struck_out(sequence: Sequence, reason: str) -> Ending:
    """Too many steps with it failed; ``reason`` is the last failure's."""
    return Ending(
        EndReason.ERROR,
        message=f"{sequence.strikes} steps with this request failed without a new token in "
        f"between; it is given up. The last failure: {reason}",
        status=500,
    )


def too_small(tokens: int, wanted: int, max_sequence_len: int) -> str:
    """What is said of an engine that cannot go on with what a larger one has begun."""
    return (
        f"the request was begun by a larger engine: it has {tokens} tokens of {wanted} at most, "
        f"but the engine that went on with it holds {max_sequence_len} for one request "
        "(--max-model-len, --num-kv-blocks)"
    )


def outgrown(sequence: Sequence) -> Ending:
    """It has as many tokens as the engine holds, and may have more."""
    message = too_small(len(sequence.tokens), sequence.wanted_len, sequence.max_len)
    return Ending(EndReason.ERROR, message=message, status=503)


def overdue(sequence: Sequence) -> Ending:
    """Its deadline has passed."""
    doing = "running" if sequence.running else "waiting for a place in the batch"
    return Ending(
        EndReason.ERROR,
        message=f"the request did not finish in time: {sequence.request.head.time_left:.3g} s were "
        f"left when it came to this engine; it was {doing} with {sequence.num_output} tokens of "
        "output",
        status=504,
    )

"""From a request's bytes to its sequences, or to a clear reason why it cannot be served."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator
from hashlib import blake2b
from typing import NamedTuple

from penstock.protocol.config.derive import waiting_tokens_limit
from penstock.protocol.prefix_digest import chain_root
from penstock.protocol.process.spans import SPANS
from penstock.protocol.tasks import GENERATE
from penstock.protocol.wire.messages.cache_hints import (
    MAX_BREAKPOINTS,
    RETENTION_SECONDS,
    RetainedSpan,
)
from penstock.protocol.wire.messages.requests import (
    REPEATING,
    TOKEN_BYTES,
    Rejected,
    RequestHead,
    TokenWork,
    split_ids,
)
from penstock.services.scheduler.endings import too_small
from penstock.services.scheduler.limits import (
    MAX_SAMPLING_BYTES,
    MAX_SEQUENCE_TOKENS,
    Limits,
)
from penstock.services.scheduler.sequence import PromptLogprobs, Request, Sequence

FULL_SECONDS = 60.0
"""KV memory that ran out within this time will run out again under the same load."""
SMOOTHING = 0.2
RETRY_AFTER_SECONDS = 1.0
"""A full queue moves every step: a client that comes back after a second meets another one."""


class Unservable(ValueError):
    """The request cannot be served here. ``status`` is the HTTP status it stands for."""

    status = 400

    def rejected(self, request_id: int, attempt: int) -> Rejected:
        return Rejected(request_id, attempt, self.status, "invalid_request_error", str(self))


class TooLarge(Unservable):
    """A larger engine had taken the request; there may be one again."""

    status = 503

    def rejected(self, request_id: int, attempt: int) -> Rejected:
        return Rejected(
            request_id,
            attempt,
            self.status,
            "overloaded_error",
            str(self),
            retry_after=RETRY_AFTER_SECONDS,
            retry_elsewhere=True,
        )


class WaitingRoom:
    """How much may wait in an engine's queue. Frontends keep new requests out before it is full;
    what comes here all the same (they know of each other with a delay) is refused by it."""

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        """Without ``max_tokens`` the size of KV memory decides."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens

    def lacks(self, requests: int, tokens: int, more: int, kv_tokens: int, prompts: int = 1) -> str:
        """Why a request of ``more`` prompt tokens finds no room; empty when it does. A batch, whose
        prompts count as a request each, is let in whole, and where nothing waits always."""
        if requests and requests + prompts > self._max_requests:
            said = "which is" if prompts == 1 else f"and {prompts} more inputs would pass"
            return (
                f"{requests} requests are waiting already, {said} the limit of "
                f"{self._max_requests} (--max-waiting-requests)"
            )
        limit = waiting_tokens_limit(self._max_tokens, kv_tokens)
        if requests and tokens + more > limit:
            return (
                f"{tokens} prompt tokens are waiting already, and with {more} more they would "
                f"pass the limit of {limit} (--max-waiting-tokens)"
            )
        return ""


class UsableSlots:
    """How many sequences an engine runs at once: its slots, or what KV memory has room for.

    The frontends reckon with it. While KV memory is what newcomers wait for, it is the mean number
    of those that run.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._full_at = -math.inf

    def observe(self, now: float, full_with: int, slots: int) -> int:
        """``full_with``: those that ran when somebody had to wait for blocks though a slot was
        free; 0: since the last call nobody had to."""
        if full_with:
            fresh = now - self._full_at > FULL_SECONDS
            self._mean = full_with if fresh else self._mean + SMOOTHING * (full_with - self._mean)
            self._full_at = now
        return round(self._mean) if now - self._full_at <= FULL_SECONDS else slots


def overloaded(request_id: int, attempt: int, reason: str) -> Rejected:
    """The answer when the queue is full."""
    return Rejected(
        request_id,
        attempt,
        503,
        "overloaded_error",
        f"{reason}; try again later",
        retry_after=RETRY_AFTER_SECONDS,
        retry_elsewhere=True,
    )


class Offers(NamedTuple):
    """What an engine can do for requests; ``None``: anything."""

    tasks: Collection[str] | None = None
    """To generate included."""
    adapters: Collection[str] | None = None
    """Digests of those that are loaded."""
    places: int | None = None
    """Adapters that may be on the device at once."""
    resident: Collection[str] = ()
    """Digests of those that were when the worker attached."""
    repeats: bool = True
    """The answer of a seed has the same bits whatever else it computes."""

    def lacks(self, head: RequestHead) -> str:
        """Why a request should have gone to another engine, in words; empty: it should not. The
        router looks to it, but a worker may have come back with other tasks since."""
        if self.tasks is not None and head.task not in self.tasks:
            done = ", ".join(self.tasks)
            return f"this engine does not do the task {head.task!r}; it does: {done}"
        if head.adapter and self.adapters is not None and head.adapter not in self.adapters:
            return "this engine has not loaded the adapter, or has another one of that name"
        if head.deterministic and not self.repeats:
            return f"deterministic: this engine does not repeat its answers; {REPEATING}"
        return ""


def make_request(
    request_id: int,
    attempt: int,
    owner: str,
    work: TokenWork,
    now: float,
    limits: Limits,
) -> Request:
    """Read a request without its sequences. Raises ``Unservable``."""
    head = work.head
    prompt_len = len(_token_ids(work.prompt, "the prompt", limits))
    lengths, virtual = work.lengths or [prompt_len], head.virtual_tokens
    max_output = work.max_tokens
    if not head.accepted:
        for length in lengths:
            _check_length(length, limits, virtual, whole=head.task != GENERATE)
        max_output = min(limits.max_sequence_len - max(lengths) - virtual, max_output)
    _check_sampling(work.sampling)
    drafts = limits.max_row_tokens > 1 and head.task == GENERATE and not work.lengths
    return Request(
        id=request_id,
        attempt=attempt,
        head=head,
        owner=owner,
        arrival=now - head.age,
        queued_at=now,
        deadline=None if head.time_left is None else now + head.time_left,
        stop_ids=frozenset(work.stop_ids if max_output else ()),
        root=chain_root(head),
        prefix=work.prefix,
        prompt_len=virtual * len(lengths) + prompt_len,
        max_output=max_output,
        sampling=work.sampling,
        reads_output=work.reads_output,
        reads_prompt=work.reads_prompt,
        reads_logits=work.reads_logits,
        corpus=_corpus(head) if drafts else b"",
        has_task=head.task != GENERATE,
        num_prompts=len(lengths),
        retain=_spans(work),
        release=work.release,
        trace=SPANS.wanted(head.trace),
    )


def _spans(work: TokenWork) -> list[RetainedSpan]:
    """What is to be retained of the prompt. Raises ``Unservable``."""
    if len(work.retain) > MAX_BREAKPOINTS:
        raise Unservable(
            f"{len(work.retain)} prefixes are to be retained; at most {MAX_BREAKPOINTS} can be"
        )
    for span in work.retain:
        if span.seconds not in RETENTION_SECONDS.values():
            allowed = " or ".join(map(str, RETENTION_SECONDS.values()))
            raise Unservable(
                f"a prefix is to be retained for {span.seconds} seconds; {allowed} are possible"
            )
    virtual = work.head.virtual_tokens
    return [RetainedSpan(virtual + span.tokens, span.seconds) for span in work.retain]


def _corpus(head: RequestHead) -> bytes:
    """What the texts of a request are known by to other requests: those of the same tenant that
    also share cached prefixes. Empty where it wants no drafts."""
    if not head.speculation:
        return b""
    return blake2b(chain_root(head) + head.tenant.encode(), digest_size=16).digest()


def make_sequences(
    request: Request, work: TokenWork, limits: Limits, numbers: Iterator[int]
) -> list[Sequence]:
    """One sequence for each open choice. Raises ``Unservable``."""
    wanted = [state.choice for state in work.choices]
    if not wanted or len(dict.fromkeys(wanted)) != len(wanted):
        raise Unservable(f"a request needs one or more distinct choices, got {wanted}")
    prompts, seconds = _prompts(work)
    most, sequences = limits.max_sequence_len, []
    virtual = _virtual_ids(request.head.virtual_tokens, limits)
    for state, prompt, second in zip(work.choices, prompts, seconds, strict=True):
        _check_sampling(state.sampling)
        output = _token_ids(state.output, f"the output of choice {state.choice}", limits)
        tokens = virtual + array("i", prompt)
        prompt_len = len(tokens)
        tokens.extend(output)
        wanted_len = prompt_len + request.max_output
        is_whole = request.has_task or (output and len(tokens) >= wanted_len)
        if len(tokens) + (not is_whole) > most and request.head.accepted:
            raise TooLarge(too_small(len(tokens), wanted_len, most))
        sequences.append(
            Sequence(
                request=request,
                choice=state.choice,
                number=next(numbers),
                tokens=tokens,
                prompt_len=prompt_len,
                max_len=min(wanted_len, most),
                wanted_len=wanted_len,
                prompt_logprobs=PromptLogprobs(work.prompt_logprobs),
                second=second,
                own_sampling=state.sampling,
                start_index=len(output) if request.head.hand_overs else 0,
            )
        )
    return sequences


def _prompts(work: TokenWork) -> tuple[list[bytes], list[int]]:
    """Of each choice the prompt, and where a pair's second text begins in it. Raises
    ``Unservable``."""
    count = len(work.choices)
    try:
        prompts = split_ids(work.prompt, work.lengths)
    except ValueError as error:
        raise Unservable(str(error)) from None
    seconds = work.seconds or [0] * len(prompts)
    if not work.lengths:
        prompts, seconds = prompts * count, seconds * count
    if not len(prompts) == len(seconds) == count:
        raise Unservable(f"{len(prompts)} prompts came for {count} choices")
    return prompts, seconds


def _token_ids(data: bytes, what: str, limits: Limits) -> array[int]:
    if len(data) % TOKEN_BYTES:
        raise Unservable(f"{what} is {len(data)} bytes long, which is no whole count of int32 ids")
    tokens = array("i", data)
    if tokens and max(array("I", data)) >= limits.vocab_size:  # negative ids are the highest there
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        raise Unservable(
            f"token id {wrong} in {what} is outside the vocabulary: "
            f"ids go from 0 to {limits.vocab_size - 1}"
        )
    return tokens


def _virtual_ids(count: int, limits: Limits) -> array[int]:
    """What stands for the rows of a soft prompt, see ``NewSlot.virtual_tokens``."""
    return array("i", range(limits.vocab_size, limits.vocab_size + count))


def _check_length(prompt_len: int, limits: Limits, virtual: int = 0, *, whole: bool) -> None:
    """virtual: tokens of a soft prompt, which stand ahead of it; whole: nothing is generated behind
    it."""
    if prompt_len == 0:
        raise Unservable("the prompt is empty: it must hold at least one token")
    if virtual:
        most = limits.max_sequence_len - virtual - 1
        if prompt_len > most:
            raise Unservable(
                f"the prompt has {prompt_len} tokens; with the {virtual} virtual tokens of its "
                "adapter and one token of output it is longer than the "
                f"{limits.max_sequence_len} tokens that this engine holds: shorten it to "
                f"{max(most, 0)} tokens or less"
            )
        return
    if whole and limits.task_prompts == "whole":
        if prompt_len > limits.longest_task_prompt:
            raise Unservable(
                f"the prompt has {prompt_len} tokens; the model's limit is "
                f"{limits.longest_task_prompt} (--max-model-len): shorten it"
            )
        return
    if prompt_len + 1 > limits.max_model_len:
        raise Unservable(
            f"the prompt has {prompt_len} tokens; with one token of output it is longer than the "
            f"model's limit of {limits.max_model_len} tokens (--max-model-len): "
            f"shorten it to {limits.max_model_len - 1} tokens or less"
        )
    if prompt_len + 1 > limits.kv_tokens:
        raise Unservable(
            f"the prompt has {prompt_len} tokens; with one token of output it is longer than the "
            f"{limits.kv_tokens} tokens that KV memory holds ({limits.num_blocks} blocks of "
            f"{limits.block_size}): shorten it to {limits.kv_tokens - 1} tokens or less, or give "
            "the server more KV memory (--num-kv-blocks)"
        )
    if prompt_len + 1 > MAX_SEQUENCE_TOKENS:
        raise Unservable(
            f"the prompt has {prompt_len} tokens; with one token of output it is longer than the "
            f"{MAX_SEQUENCE_TOKENS} tokens that the message of one step carries: shorten it to "
            f"{MAX_SEQUENCE_TOKENS - 1} tokens or less"
        )


def _check_sampling(sampling: bytes) -> None:
    if len(sampling) > MAX_SAMPLING_BYTES:
        raise Unservable(
            f"the request's sampling parameters have {len(sampling)} bytes; at most "
            f"{MAX_SAMPLING_BYTES} can be sent to a worker: shorten allowed_token_ids, bad_words, "
            "logit_bias or the grammar"
        )

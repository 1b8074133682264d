"""What a step's result does to its sequences: tokens, stops, lengths, and rows that failed."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.wire.messages.requests import TOKEN_BYTES
from penstock.protocol.wire.messages.steps import StepResult
from penstock.protocol.wire.messages.tokens import EndReason
from penstock.services.scheduler.endings import ALL_BANNED, NOT_POOLED, outgrown
from penstock.services.scheduler.failures import FailureHandler
from penstock.services.scheduler.open_sequences import OpenSequences
from penstock.services.scheduler.planned_step import Step
from penstock.services.scheduler.sequence import Sequence


class ResultReader:
    """Reads results against the rows that were kept for their plans."""

    def __init__(self, sequences: OpenSequences, failures: FailureHandler) -> None:
        self._sequences = sequences
        self._failures = failures
        self._rows = sequences.rows
        self.max_row_tokens = 1
        self._now = 0.0
        """When the result that is being read came."""

    def is_whole(self, step: Step, result: StepResult) -> bool:
        """Whether a result brings tokens for the rows of its step, as many as they can have."""
        counts, num_tokens = result.counts, len(step.rows)
        if counts:
            if len(counts) != num_tokens or not 1 < self.max_row_tokens >= max(counts):
                return False
            num_tokens = sum(counts)
        if result.drafted and len(result.drafted) != len(counts):
            return False
        return len(result.tokens) == TOKEN_BYTES * num_tokens

    def take(self, step: Step, result: StepResult, now: float) -> int:
        """Take the rows of a whole result. Returns how many tokens belong to answers."""
        self._now = now
        for chunk in result.prompt_logprobs:
            if (prefilled := step.prompts.get(chunk.slot)) is not None:
                prefilled.prompt_logprobs.add(chunk.start, chunk.tokens)
        for one in result.pooled:
            if one.row < len(step.rows) and (pooling := step.rows[one.row]) is not None:
                pooling.pooled = one.values
        tokens = array("i", result.tokens)
        if (
            result.counts or result.logprobs or result.bad_rows or result.failures
            or result.banned_rows
        ):  # fmt: skip
            return self._take_rows(step, result, tokens, now)
        generated, append, not_brought = 0, self._append, self.max_row_tokens - 1
        for sequence, token in zip(step.rows, tokens, strict=True):
            if sequence is not None and not sequence.finished:
                sequence.in_flight -= 1
                if not_brought and sequence.decoding:
                    sequence.num_computed -= not_brought
                generated += append(sequence, token, None)
        return generated

    def _take_rows(self, step: Step, result: StepResult, tokens: array[int], now: float) -> int:
        """Take a result's rows where more is to be said of them than one token each. Returns how
        many tokens belong to answers."""
        bad = frozenset(result.bad_rows)
        logprobs = {one.row: one.token for one in result.logprobs} if result.logprobs else None
        failures = {one.row: one for one in result.failures} if result.failures else None
        banned = frozenset(result.banned_rows) if result.banned_rows else None
        several = self.max_row_tokens > 1  # and as many positions are reserved for each row
        take: Callable[..., int] = self._extend if several else self._append
        drawn = _split(tokens, result.counts or bytes([1]) * len(step.rows)) if several else tokens
        generated = 0
        for row, sequence in enumerate(step.rows):
            if sequence is None or sequence.finished:
                continue
            sequence.in_flight -= 1
            if result.drafted and (drafted := result.drafted[row]):
                accepted = max(0, result.counts[row] - 1)
                sequence.accepted_drafts += accepted
                sequence.rejected_drafts += max(0, drafted - accepted)
            if bad and row in bad:
                self._failures.bad_row(sequence)
                continue
            if failures and row in failures:
                self._failures.failed_row(sequence, failures[row], now)
                continue
            if banned and row in banned:
                self._sequences.end(sequence, ALL_BANNED)
                continue
            found = logprobs.get(row) if logprobs else None
            generated += take(sequence, drawn[row], found)
        return generated

    def _append(self, sequence: Sequence, token: int, logprobs: PackedLogprobs | None) -> bool:
        """Take one sampled token; the body of the loop over a result's rows. Returns whether it
        belongs to the answer."""
        tokens = sequence.tokens
        tokens.append(token)
        known = len(tokens)
        if not sequence.trusted:
            self._trust(sequence, has_token=known <= sequence.max_len)
        if token in sequence.request.stop_ids:
            self._rows.token(sequence, token, EndReason.STOP, token, logprobs)
            self._sequences.finish(sequence)
        elif known >= sequence.max_len:
            if known > sequence.max_len:  # only its prompt was wanted
                tokens.pop()
                self._end_of_prompt(sequence)
                return False
            if sequence.is_cut:
                self._rows.token(sequence, token, None, None, logprobs)
                self._sequences.end(sequence, outgrown(sequence))
                return True
            self._rows.token(sequence, token, EndReason.LENGTH, None, logprobs)
            self._sequences.finish(sequence)
        else:
            self._rows.token(sequence, token, None, None, logprobs)
        return True

    def _trust(self, sequence: Sequence, has_token: bool = True) -> None:
        sequence.trust()
        if has_token and not sequence.first_token_at:
            sequence.first_token_at = self._now
            self._sequences.on_first_token(sequence)

    def _extend(
        self,
        sequence: Sequence,
        tokens: array[int],
        logprobs: PackedLogprobs | None,
    ) -> int:
        """``_append`` for a row of any number of tokens. The first end in their order wins; what
        comes after it is dropped. Returns how many belong to the answer."""
        if sequence.decoding:
            sequence.num_computed -= self.max_row_tokens - len(tokens)
        room = sequence.max_len - len(sequence.tokens)
        if room <= 0:  # only its prompt was wanted
            self._end_of_prompt(sequence)
            return 0
        if not tokens:
            self._sequences.planner.kv.compute_again(sequence.kv)
            return 0
        kept, stop = tokens[:room], None
        for at, token in enumerate(kept):
            if token in sequence.request.stop_ids:
                kept, stop = kept[: at + 1], token
                break
        sequence.tokens.extend(kept)
        if not sequence.trusted:
            self._trust(sequence)
        reason = EndReason.STOP if stop is not None else None
        is_full = reason is None and len(kept) == room
        if is_full and not sequence.is_cut:
            reason = EndReason.LENGTH
        found = logprobs.first(len(kept)) if logprobs is not None else None
        self._rows.tokens(sequence, kept, reason, stop, found)
        if reason is not None:
            self._sequences.finish(sequence)
        elif is_full:
            self._sequences.end(sequence, outgrown(sequence))
        return len(kept)

    def _end_of_prompt(self, sequence: Sequence) -> None:
        """All that was wanted of a sequence has been computed."""
        if sequence.request.has_task and sequence.pooled is None:
            self._sequences.end(sequence, NOT_POOLED)
            return
        self._rows.end_of_prompt(sequence)
        self._sequences.close(sequence)


def _split(tokens: array[int], counts: bytes) -> list[array[int]]:
    """The tokens of each row."""
    rows: list[array[int]] = []
    start = 0
    for count in counts:
        rows.append(tokens[start : start + count])
        start += count
    return rows

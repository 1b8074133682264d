"""Token rows on their way to their owners: one ``TokenBatch`` for each."""

from __future__ import annotations

from array import array

from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    RowLogprobs,
    RowPooled,
    RowStart,
    TokenBatch,
)
from penstock.services.scheduler.sequence import Sequence


class _OwnerColumns:
    """The columns of one owner's batch."""

    __slots__ = (
        "attempts",
        "choices",
        "counts",
        "ends",
        "ids",
        "indices",
        "logprobs",
        "pooled",
        "starts",
        "tokens",
    )

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.choices: list[int] = []
        self.attempts: list[int] = []
        self.indices: list[int] = []
        self.counts: list[int] = []
        self.tokens = array("i")
        self.ends: list[End] = []
        self.starts: list[RowStart] = []
        self.logprobs: list[RowLogprobs] = []
        self.pooled: list[RowPooled] = []

    def batch(self) -> TokenBatch:
        return TokenBatch(
            ids=self.ids,
            choices=self.choices,
            attempts=self.attempts,
            indices=self.indices,
            counts=self.counts,
            tokens=self.tokens.tobytes(),
            ends=self.ends,
            starts=self.starts,
            logprobs=self.logprobs,
            pooled=self.pooled,
        )


class TokenRows:
    """Collects rows until ``drain``."""

    def __init__(self) -> None:
        self._owners: dict[str, _OwnerColumns] = {}
        self.engine = ""
        """Name of the engine, which stands in each start."""

    def token(
        self,
        sequence: Sequence,
        token: int,
        reason: EndReason | None = None,
        stop: int | None = None,
        logprobs: PackedLogprobs | None = None,
    ) -> None:
        """Add a row with the newest token of a sequence, already in ``sequence.tokens``."""
        index = len(sequence.tokens) - sequence.prompt_len - 1
        columns = self._row(sequence, index, 1)
        columns.tokens.append(token)
        if reason is not None or logprobs is not None or not index:
            self._add_extras(columns, sequence, index, reason, stop, logprobs)

    def tokens(
        self,
        sequence: Sequence,
        tokens: array[int],
        reason: EndReason | None = None,
        stop: int | None = None,
        logprobs: PackedLogprobs | None = None,
    ) -> None:
        """The same with the newest tokens of a sequence, one or more."""
        index = len(sequence.tokens) - sequence.prompt_len - len(tokens)
        columns = self._row(sequence, index, len(tokens))
        columns.tokens.extend(tokens)
        self._add_extras(columns, sequence, index, reason, stop, logprobs)

    @staticmethod
    def _add_extras(
        columns: _OwnerColumns,
        sequence: Sequence,
        index: int,
        reason: EndReason | None,
        stop: int | None,
        logprobs: PackedLogprobs | None,
    ) -> None:
        prompt = sequence.prompt_logprobs.packed() if index == 0 else None
        if logprobs is not None or prompt is not None:
            columns.logprobs.append(RowLogprobs(len(columns.ids) - 1, logprobs, prompt))
        if reason is not None:
            row = len(columns.ids) - 1
            columns.ends.append(
                End(
                    row, reason, stop, preemptions=sequence.preemptions,
                    accepted_drafts=sequence.accepted_drafts,
                    rejected_drafts=sequence.rejected_drafts,
                )
            )  # fmt: skip

    def end_of_prompt(self, sequence: Sequence) -> None:
        """Add a row that ends a sequence with what its computed prompt brings, and no token."""
        columns = self._row(sequence, 0, 0)
        row = len(columns.ids) - 1
        if (prompt := sequence.prompt_logprobs.packed()) is not None:
            columns.logprobs.append(RowLogprobs(row, None, prompt))
        if sequence.pooled is not None:
            columns.pooled.append(RowPooled(row, sequence.pooled))
        columns.ends.append(End(row, EndReason.LENGTH, preemptions=sequence.preemptions))

    def end(
        self,
        sequence: Sequence,
        reason: EndReason,
        stop: int | None = None,
        message: str = "",
        status: int = 0,
    ) -> None:
        """Add a row that only ends."""
        columns = self._row(sequence, sequence.num_output, 0)
        row, preemptions = len(columns.ids) - 1, sequence.preemptions
        columns.ends.append(End(row, reason, stop, message, status, preemptions=preemptions))

    def _row(self, sequence: Sequence, index: int, count: int) -> _OwnerColumns:
        request = sequence.request
        columns = self._owners.get(request.owner)
        if columns is None:
            columns = self._owners[request.owner] = _OwnerColumns()
        columns.ids.append(request.id)
        columns.choices.append(sequence.choice)
        columns.attempts.append(request.attempt)
        columns.indices.append(index)
        columns.counts.append(count)
        if index == sequence.start_index and sequence.cached_tokens >= 0:
            row = len(columns.ids) - 1
            columns.starts.append(
                RowStart(
                    *(row, sequence.cached_tokens, sequence.queued_s, self.engine),
                    *(request.max_output, 0.0 if request.head.hand_overs else -1.0),
                )
            )
        return columns

    def drain(self) -> list[tuple[str, TokenBatch]]:
        """All rows so far as (owner, batch); the rows is empty afterwards."""
        if not self._owners:
            return []
        batches = [(owner, columns.batch()) for owner, columns in self._owners.items()]
        self._owners = {}
        return batches

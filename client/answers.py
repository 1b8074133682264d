"""What has come of a client's request: the one sink that gathers answers and meters them.

A request is one gateway request for each of its prompts, with a ``AnswerSink`` each; what they
have in common is its ``RequestProgress``. An ``Answer`` gathers what has come of one choice. A
stream renders what was gathered and empties it, row by row; an unstreamed answer is the same,
rendered once at the end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, cast

import msgspec

from penstock.client.meters import Meters, Usage
from penstock.client.sink import RowExtras
from penstock.protocol.tasks import GENERATE
from penstock.protocol.wire.messages.requests import Rejected
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Event,
    Reasoning,
    RowDetails,
    RowStart,
    Text,
    ToolArguments,
    ToolCallOpened,
)

FinishReason = Literal["stop", "length"]
FINISH_REASONS: dict[EndReason, FinishReason] = {EndReason.STOP: "stop", EndReason.LENGTH: "length"}
"""The ends that are no errors."""


class Answer:
    """What has come of one choice and was not taken yet."""

    __slots__ = (
        "_places", "content", "details", "end", "has_ended", "held", "ids", "last", "prompt",
        "thinking", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.content: list[str | Event] = []
        """In order; a string is plain text."""
        self.details: list[RowDetails] = []
        """Logprobs of its tokens, in order, whatever the tokens became."""
        self._places: list[int] = []
        """Of each of the details: the part of the content that came next."""
        self.end: End | None = None
        self.ids: list[bytes] = []
        """Ids of its tokens as int32, row by row; where its request wants them."""
        self.prompt: bytes | None = None
        """Ids of its prompt's tokens, likewise; they come with the first of its own."""
        self.has_ended = False
        self.tokens = 0
        """Of the choice, those that were taken as well."""
        self.thinking = 0
        """Tokens of rows that brought thinking, and of those between them that brought nothing:
        about what its end says exactly."""
        self.held = 0
        """Tokens of rows that have brought nothing since the last thinking."""
        self.last = 0.0
        """Time of the newest token; 0 before the first."""

    def add_text(self, text: str) -> None:
        """Add a row that is plain text and nothing else."""
        self.content.append(text)

    def add(self, text: str, extras: RowExtras) -> None:
        """Add a row that brings more than plain text."""
        details = extras.details
        if details is not None:
            self._detail(details)
            text = details.echo + text
        if text:
            self.content.append(text)
        self.content += extras.events or ()
        if extras.end is not None:
            self.end = extras.end
        if extras.ids:
            self.ids.append(extras.ids)
        if extras.prompt is not None:
            self.prompt = extras.prompt

    def _detail(self, details: RowDetails) -> None:
        self.details.append(details)
        self._places.append(len(self.content))

    @property
    def finish(self) -> tuple[FinishReason, int | str | None]:
        """(reason, the stop token or string that was found), once it has ended without an error."""
        if self.end is None:
            raise ValueError("the answer has not ended")
        return FINISH_REASONS[self.end.reason], self.end.stop

    @property
    def text(self) -> str:
        """All plain text."""
        found = (part if isinstance(part, str) else _text_of(part) for part in self.content)
        return "".join(found)

    @property
    def reasoning(self) -> str:
        """All that was thought."""
        return "".join(part.text for part in self.content if isinstance(part, Reasoning))

    def calls(self, opened: dict[int, tuple[str, str]] | None = None) -> list[tuple[str, str, str]]:
        """(id, name, arguments as JSON) of each tool that is called. opened: (id, name) of calls
        that were taken already, of which more arguments may have come; new ones are added."""
        opened = {} if opened is None else opened
        found: dict[int, str] = {}
        for part in self.content:
            if isinstance(part, ToolCallOpened):
                opened[part.index] = (part.id, part.name)
                found[part.index] = ""
            elif isinstance(part, ToolArguments):
                found[part.index] = found.get(part.index, "") + part.text
        return [(*opened[index], arguments) for index, arguments in found.items()]

    def events(self) -> list[Event]:
        """The content, parts of one channel that follow each other joined."""
        if len(self.content) == 1:  # as nearly every row of a stream
            (part,) = self.content
            return [Text(part) if isinstance(part, str) else part]
        return _joined(self.content)

    def rows(self) -> Iterator[tuple[RowDetails | None, list[Event]]]:
        """The content as ``events`` has it, but cut where details came: they are those of the
        tokens that brought the events beside them. Before ``join`` only."""
        places = [*self._places, len(self.content)]
        if places[0]:
            yield None, _joined(self.content[: places[0]])
        for details, (begin, end) in zip(self.details, itertools.pairwise(places), strict=True):
            yield details, _joined(self.content[begin:end])

    def join(self) -> None:
        """Hold what has come in as few parts as it needs."""
        if len(self.content) < 2:
            return
        if set(map(type, self.content)) == {str}:  # as of nearly every answer: thousands of them
            self.content = ["".join(cast(list[str], self.content))]
        else:
            self.content = list(self.events())

    def clear(self) -> None:
        """Everything in it was taken."""
        self.content.clear()
        self.details.clear()
        self._places.clear()
        self.end = None
        self.ids.clear()
        self.prompt = None


def _joined(content: Sequence[str | Event]) -> list[Event]:
    """Parts of one channel that follow each other become one."""
    found: list[Event] = []
    for _, group in itertools.groupby(_parts(content), _channel):
        event = next(group)
        if isinstance(event, Text | Reasoning | ToolArguments):
            text = "".join((event.text, *(one.text for one in group)))  # type: ignore[union-attr]
            event = msgspec.structs.replace(event, text=text)
        found.append(event)
    return found


def _parts(content: Sequence[str | Event]) -> Iterator[Event]:
    """Strings that follow each other become one text: a long answer is thousands of them."""
    for kind, run in itertools.groupby(content, type):
        if kind is str:
            yield Text("".join(cast(Iterator[str], run)))
        else:
            yield from cast(Iterator[Event], run)


def _text_of(event: Event) -> str:
    return event.text if isinstance(event, Text) else ""


def _channel(event: Event) -> object:
    """The same for events whose texts belong together."""
    if isinstance(event, ToolArguments):
        return event.index
    return type(event) if isinstance(event, Text | Reasoning) else id(event)


def _without_hidden(extras: RowExtras) -> RowExtras:
    """Without thinking that is hidden: it was counted, and says nothing."""
    events = extras.events or []
    if not any(isinstance(event, Reasoning) and not event.text for event in events):
        return extras
    shown = [event for event in events if not isinstance(event, Reasoning) or event.text]
    return msgspec.structs.replace(extras, events=shown or None)


class RequestProgress:
    """How far a client's request is, over all its prompts."""

    def __init__(
        self,
        prompts: int,
        choices: int,
        meters: Meters,
        arrival: float,
        now: Callable[[], float] = time.monotonic,
        task: str = GENERATE,
    ) -> None:
        """choices: of all prompts."""
        self.usage = Usage()
        self.task = task
        self.meters = meters
        self.arrival = arrival
        self.now = now
        self.first_at = self.ended_at = 0.0
        """When the first token came, and when all choices had ended; 0 before."""
        self.queued_s = 0.0
        """Seconds that the last of its choices waited until an engine began with it."""
        self.exemplar_id = ""
        """The trace that its latencies may be examples of; empty: none."""
        self.reasons: dict[str, None] = {}
        """Why its choices ended, each reason once."""
        self.engines: dict[str, None] = {}
        """Names of the engines in which its choices first ran, or ran behind a hand-over, each
        once."""
        self.handed_over_s = -1.0
        """Seconds without an engine between the prefill engine and the one that decodes, of the
        prompt that waited longest; -1: nothing was handed over."""
        self.preemptions: int | None = None
        """How often its choices lost their KV blocks; ``None``: no engine has said."""
        self.continuations = 0
        """How often one of its prompts was started again after the loss of a process that had
        it."""
        self.rejected: Rejected | None = None
        self.failed: End | None = None
        """The error that ended it: as a whole, or one of its choices."""
        self.unaccepted = prompts
        self.open_choices = choices
        self._choices = choices

    def on_accepted(self, prompt_tokens: int, prompts: int = 1) -> None:
        """One or several of the prompts, with so many tokens together, wait or run in an engine."""
        self.usage.prompt += prompt_tokens
        self.unaccepted -= prompts

    def on_rejected(self, rejected: Rejected) -> None:
        """An error ends the whole request."""
        self.rejected = self.rejected or rejected

    def on_start(self, choice: int, start: RowStart) -> None:
        """A choice of one of the prompts has run; the first one computed its prompt. Or another
        engine goes on with it behind a hand-over."""
        if start.handed_over_s >= 0.0:
            self.handed_over_s = max(self.handed_over_s, start.handed_over_s)
            self.engines[start.engine] = None
            return
        if choice == 0:
            self.usage.cached += start.cached
        self.queued_s = max(self.queued_s, start.queued_s)
        if start.engine:
            self.engines[start.engine] = None

    def on_first_token(self, now: float) -> None:
        """The first token of one of the prompts came."""
        if not self.first_at:
            self.first_at = now
            self.usage.first_token_s = now - self.arrival
        self.meters.first_token(now - self.arrival, self.exemplar_id)

    def on_end(self, end: End) -> None:
        """A choice ended without an error."""
        reason = FINISH_REASONS[end.reason]
        self.usage.reasoning += end.reasoning_tokens
        self.usage.accepted_drafts += end.accepted_drafts
        self.usage.rejected_drafts += end.rejected_drafts
        if end.preemptions >= 0:
            self.preemptions = (self.preemptions or 0) + end.preemptions
        self.open_choices -= 1
        self.reasons[reason] = None
        self.meters.finished(reason)
        if self.open_choices == 0:
            self.on_all_ended()

    def on_failed(self, end: End) -> None:
        """A choice ended with an error, which ends the whole request."""
        self.failed = self.failed or end

    def on_all_ended(self) -> None:
        """Every choice has ended without an error."""
        self.ended_at = self.now()
        self.usage.total_s = self.ended_at - self.arrival
        self.meters.whole(self.usage, self._choices, self.exemplar_id, self.task)


class AnswerSink:
    """Takes the rows of one prompt's choices, or of a batch: meters them, and gives them to their
    answers."""

    __slots__ = (
        "_between_tokens", "_has_first", "_now", "_progress", "_prompts", "_usage", "answers",
        "wants_ids",
    )  # fmt: skip

    def __init__(
        self,
        progress: RequestProgress,
        answers: Sequence[Answer],
        *,
        wants_ids: bool = False,
        prompts: int = 1,
    ) -> None:
        """answers: one for each choice of the prompt. wants_ids: of their tokens. prompts: of a
        batch, one for each choice."""
        self._prompts = prompts
        self.answers = answers
        self.wants_ids = wants_ids
        self._progress = progress
        self._usage = progress.usage
        self._between_tokens = progress.meters.between_tokens
        self._now = progress.now
        self._has_first = False

    def on_accepted(self, prompt_tokens: int) -> None:
        self._progress.on_accepted(prompt_tokens, self._prompts)

    def on_continued(self) -> None:
        self._progress.continuations += 1

    def on_rejected(self, rejected: Rejected) -> None:
        self._progress.on_rejected(rejected)

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        answer = self.answers[choice]
        if tokens:
            now, last = self._now(), answer.last
            if last:
                self._between_tokens((now - last) / tokens, tokens)
            elif not self._has_first:
                self._has_first = True
                self._progress.on_first_token(now)
            answer.last = now
            answer.tokens += tokens
            self._usage.completion += tokens
        if extras is not None:
            self._on_extras(choice, answer, text, tokens, extras)
        elif text:
            answer.add_text(text)
        else:
            answer.held += tokens

    def _on_extras(
        self, choice: int, answer: Answer, text: str, tokens: int, extras: RowExtras
    ) -> None:
        if extras.start is not None:
            self._progress.on_start(choice if self._prompts == 1 else 0, extras.start)
        if answer.has_ended:
            return
        end = extras.end
        if end is not None:
            answer.has_ended = True
            if end.reason not in FINISH_REASONS:
                self._progress.on_failed(end)
                return
        self._count_thinking(answer, text, tokens, extras.events)
        # What this raises ends the request: it must still be open.
        answer.add(text, _without_hidden(extras) if extras.events else extras)
        if end is not None:
            self._usage.reasoning -= answer.thinking
            self._progress.on_end(end)

    def _count_thinking(
        self, answer: Answer, text: str, tokens: int, events: Sequence[Event] | None
    ) -> None:
        """An answer that is ended from outside gets no other count."""
        if not events and not text:
            answer.held += tokens
            return
        if events and any(type(event) is Reasoning for event in events):
            thought = tokens + (answer.held if answer.thinking else 0)
            answer.thinking += thought
            self._usage.reasoning += thought
        answer.held = 0

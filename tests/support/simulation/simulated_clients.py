"""Clients of the simulated cluster: what each asks for, what it saw, and what it ought to see."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
from support.scheduler.simulated_worker import output_alone
from support.simulation.simulated_engine import EngineTraits

from penstock.client.answers import Answer, AnswerSink, RequestProgress
from penstock.client.meters import Meters
from penstock.client.sink import RowExtras
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.process.metrics import Registry
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Inputs,
    Rejected,
    RequestHead,
    Tokens,
    Work,
)
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Event,
    Reasoning,
    RowStart,
    Text,
    ToolArguments,
    ToolCallOpened,
)

if TYPE_CHECKING:
    from support.simulation.simulated_cluster import FrontendNode

END_OF_TEXT = 5
"""The model's end token."""
HELD_BACK = 13
"""The text of a token that this number divides comes with the next one's, as that of an unfinished
character does."""


def text_of(token: int) -> str:
    return f"<{token}>"


def is_parsed(prompt: list[int]) -> bool:
    """Whether the output becomes events of several channels: that of every other prompt does."""
    return len(prompt) % 2 == 0


class Channels:
    """Makes an event of each token, on a channel that the token and the calls before it name."""

    def __init__(self) -> None:
        self._calls = 0

    def event(self, token: int) -> Event:
        text = text_of(token)
        match token % 5:
            case 0:
                self._calls += 1
                return ToolCallOpened(self._calls - 1, f"call-{token}", text)
            case 1 if self._calls:
                return ToolArguments(token % self._calls, text)
            case 2:
                return Reasoning(text)
            case _:
                return Text(text)


@dataclass(frozen=True)
class Asked:
    """One client's request."""

    prompt: list[int]
    params: SamplingParams
    tenant: str = ""
    time_left: float | None = None
    priority: int = 0
    cache_salt: str = ""
    streamed: bool = True
    inputs: tuple[list[int], ...] = ()
    """Of a batch: the prompt of each choice, in the place of ``prompt``."""

    @property
    def prompts(self) -> list[list[int]]:
        return list(self.inputs) or [self.prompt]

    @property
    def num_choices(self) -> int:
        return len(self.inputs) or self.params.n

    def of(self, choice: int) -> Asked:
        """What the choice answers."""
        return replace(self, prompt=self.inputs[choice], inputs=()) if self.inputs else self

    def work(self) -> Work:
        head = RequestHead(
            prompt_kind="tokens",
            tenant=self.tenant,
            priority=self.priority,
            cache_salt=self.cache_salt,
            time_left=self.time_left,
            streamed=self.streamed,
        )
        prompts = [Tokens(array("i", prompt).tobytes()) for prompt in self.prompts]
        choices = [ChoiceState(choice) for choice in range(self.num_choices)]
        asked = Inputs([*prompts]) if self.inputs else prompts[0]
        return Work(head, asked, self.params, choices)

    @property
    def stop_ids(self) -> list[int]:
        ends = [] if self.params.ignore_eos else [END_OF_TEXT]
        return [*self.params.stop_token_ids, *ends]


@dataclass(frozen=True)
class Undisturbed:
    """What a choice brings when nothing goes wrong."""

    events: list[Event]
    tokens: int
    reason: EndReason
    stop: int | str | None
    computed: list[int]
    """All tokens that are computed for it, its prompt included."""
    output: list[int]
    """Ids of its tokens, the end's included."""

    def begins_with(self, seen: list[Event]) -> bool:
        """Whether ``seen`` is a beginning of the events."""
        if not seen:
            return True
        *whole, last = seen
        rest = self.events[len(whole) :]
        if whole != self.events[: len(whole)] or not rest:
            return False
        if isinstance(last, Text | Reasoning | ToolArguments) and type(last) is type(rest[0]):
            begun = msgspec.structs.replace(rest[0], text=rest[0].text[: len(last.text)])
            return last == begun
        return last == rest[0]


def undisturbed(asked: Asked, choice: int, traits: EngineTraits) -> Undisturbed:
    asked = asked.of(choice)
    params, limits = asked.params, traits.limits
    longest = min(limits.max_sequence_len, len(asked.prompt) + (params.max_tokens or 0))
    sampling = SlotSampling(0.0, 0, 1.0, params.seed or 0)
    output = output_alone(
        asked.prompt, sampling, choice, asked.stop_ids, longest, limits.vocab_size
    )
    shown: list[int] = []
    known = 0
    """Tokens of ``shown`` whose text is known."""
    for count, token in enumerate(output, 1):
        is_end = token in asked.stop_ids
        if not is_end:
            shown.append(token)
        if is_end or count == len(output) or token % HELD_BACK:
            known = len(shown)
        found = first_stop(asked, shown[:known])
        if found is not None:
            stop, events = found
            computed = asked.prompt + output[: count - 1]
            return Undisturbed(events, count, EndReason.STOP, stop, computed, output[:count])
    computed, events = asked.prompt + output[:-1], all_events(asked, shown)
    if output and output[-1] in asked.stop_ids:
        named = output[-1] if output[-1] in params.stop_token_ids else None
        return Undisturbed(events, len(output), EndReason.STOP, named, computed, output)
    return Undisturbed(events, len(output), EndReason.LENGTH, None, computed, output)


def all_events(asked: Asked, tokens: list[int], text: str | None = None) -> list[Event]:
    """The events of tokens, or of another text in their place; parts of one channel are joined."""
    answer = Answer()
    if is_parsed(asked.prompt):
        channels = Channels()
        answer.content += map(channels.event, tokens)
    elif text := "".join(map(text_of, tokens)) if text is None else text:
        answer.content.append(text)
    return answer.events()


def first_stop(asked: Asked, tokens: list[int]) -> tuple[str, list[Event]] | None:
    """The stop string that is completed first, the longest of several, and what comes before it.
    Where the output is parsed, a stop string is a whole token."""
    stops = asked.params.stop
    if is_parsed(asked.prompt):
        for place, token in enumerate(tokens):
            if text_of(token) in stops:
                return text_of(token), all_events(asked, tokens[:place])
        return None
    text = "".join(map(text_of, tokens))
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    stop = min(found)[2]
    return stop, all_events(asked, [], text[: text.index(stop)])


@dataclass(repr=False)
class Record:
    """What one client saw."""

    asked: Asked
    frontend: FrontendNode
    request_id: int = 0
    accepted: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    starts: dict[int, RowStart] = field(default_factory=dict)
    ends: dict[int, list[End]] = field(default_factory=dict)
    hand_overs: int = 0
    """Seen by its choices."""
    cancelled: bool = False
    wants_ids: bool = True
    late: int = 0
    """Rows before the beginning or behind the end."""

    def __post_init__(self) -> None:
        n, prompts = self.asked.num_choices, len(self.asked.prompts)
        now = self.frontend.world.now
        self.answers += [Answer() for _ in range(n)]
        self.progress = RequestProgress(
            prompts, n, Meters(Registry()), now, lambda: self.frontend.world.now
        )
        self._sink = AnswerSink(
            self.progress, self.answers, wants_ids=self.wants_ids, prompts=prompts
        )

    @property
    def ended(self) -> bool:
        return bool(self.rejected) or len(self.ends) == self.asked.num_choices

    def __repr__(self) -> str:
        wanted = {
            name: value
            for name, value in msgspec.structs.asdict(self.asked.params).items()
            if value != getattr(SamplingParams(), name)
        }
        return (
            f"request {self.request_id} of {list(map(len, self.asked.prompts))} tokens, {wanted}, "
            f"{self.asked.time_left=}: {self.accepted=}, {self.cancelled=}, {self.late=}, "
            f"{self.rejected=}, {self.ends=}, {self.tokens=}, "
            f"{[answer.events() for answer in self.answers]}"
        )

    def on_accepted(self, prompt_tokens: int) -> None:
        self.accepted += 1
        self._sink.on_accepted(prompt_tokens)
        assert prompt_tokens == sum(map(len, self.asked.prompts))
        assert self.progress.unaccepted == 0

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        if self.cancelled or self.rejected or choice in self.ends or not self.accepted:
            self.late += 1
        if extras is not None and extras.start is not None:
            self._on_start(choice, extras.start)
        self.tokens[choice] = self.tokens.get(choice, 0) + tokens
        if extras is not None and extras.end is not None:
            self.ends.setdefault(choice, []).append(extras.end)
        self._sink.on_row(choice, text, tokens, extras)

    def _on_start(self, choice: int, start: RowStart) -> None:
        if start.handed_over_s >= 0.0:
            self.hand_overs += 1  # its first row may be lost
            return
        assert choice not in self.starts
        assert choice not in self.tokens
        assert 0 <= start.cached < len(self.asked.of(choice).prompt)
        assert start.queued_s >= 0
        self.starts[choice] = start

    def on_continued(self) -> None:
        self._sink.on_continued()

    def on_rejected(self, rejected: Rejected) -> None:
        if self.cancelled or self.ended:
            self.late += 1
        self.rejected.append(rejected)

    def check(self, traits: EngineTraits, failures: int, *, may_reject: bool) -> None:
        """failures: steps, workers and schedulers that failed, of which each request survives
        three without a new token in between."""
        assert self.late == 0, self
        assert self.accepted <= 1, self
        assert all("the frontend failed" not in one.message for one in self.rejected), self
        expected = {c: undisturbed(self.asked, c, traits) for c in range(self.asked.num_choices)}
        for choice, answer in enumerate(self.answers):
            assert expected[choice].begins_with(answer.events()), (self, expected[choice])
            ids = array("i", b"".join(answer.ids)).tolist()
            assert ids == expected[choice].output[: len(ids)], (self, ids, expected[choice])
            asked = None if answer.prompt is None else array("i", answer.prompt).tolist()
            assert asked == (self.asked.of(choice).prompt if ids else None), (self, asked)
        if self.cancelled or not self.frontend.alive:
            return
        if self.rejected:
            overdue = self.asked.time_left is not None and self.rejected[0].status == 504
            assert may_reject or overdue, self.rejected
            assert len(self.rejected) == 1, self
            return
        assert self.accepted, self
        assert sorted(self.ends) == list(expected), self
        for choice, ends in self.ends.items():
            assert len(ends) == 1, self
            self._check_end(choice, ends[0], expected[choice], traits, failures)
        usage = self.progress.usage
        assert usage.prompt == sum(map(len, self.asked.prompts)), self
        assert usage.completion == sum(self.tokens.values()), self

    def _check_end(
        self, choice: int, end: End, expected: Undisturbed, traits: EngineTraits, failures: int
    ) -> None:
        bad = traits.not_a_number >= 0 and traits.not_a_number in expected.computed
        if end.reason is EndReason.ERROR:
            poisonous = traits.poison >= 0 and traits.poison in expected.computed
            overdue = self.asked.time_left is not None and end.status == 504
            assert end.message, self
            assert bad or poisonous or overdue or failures >= 3, self
            return
        assert not bad, "a token was drawn from what is not a number"
        assert self.answers[choice].events() == expected.events, (self, expected)
        assert self.tokens[choice] == expected.tokens, (self, expected)
        assert len(b"".join(self.answers[choice].ids)) == 4 * expected.tokens, (self, expected)
        assert (end.reason, end.stop) == (expected.reason, expected.stop), (self, expected)


class Crowd:
    """Draws requests; many begin with the same words."""

    def __init__(self, rng: random.Random, traits: EngineTraits) -> None:
        self.rng = rng
        self.traits = traits
        longest = traits.limits.max_sequence_len // 2
        self._words = [t for t in range(traits.limits.vocab_size) if t not in self._special()]
        self._prefixes = [self._some(rng.randint(1, longest)) for _ in range(3)]

    def _special(self) -> tuple[int, int]:
        return (self.traits.poison, self.traits.not_a_number)

    def _some(self, count: int) -> list[int]:
        return [self.rng.choice(self._words) for _ in range(count)]

    def ask(self) -> Asked:
        rng = self.rng
        prompt, inputs = self._prompt(), tuple[list[int], ...]()
        params = self._params(is_parsed(prompt))
        if rng.random() < 0.15:
            inputs = tuple(self._prompt() for _ in range(rng.choice([1, 2, 9])))
            asked = self._params(parsed=True)
            params = msgspec.structs.replace(
                asked, n=1, max_tokens=rng.choice([1, 8]), repetition_penalty=1.0
            )
        return Asked(
            prompt,
            params,
            inputs=inputs,
            tenant=rng.choice(["", "ann", "bob"]),
            time_left=rng.choice([None] * 7 + [rng.choice([0.05, 3.0])]),
            priority=rng.randrange(3),
            cache_salt=rng.choice(["", "", "", "salt"]),
            streamed=rng.random() < 0.8,
        )

    def _prompt(self) -> list[int]:
        rng = self.rng
        prefix = rng.choice(self._prefixes)
        prompt = prefix[: rng.randint(0, len(prefix))] + self._some(rng.randint(0, 12))
        prompt = prompt or self._some(1)
        special = [token for token in self._special() if token >= 0]
        if special and rng.random() < 0.08:
            prompt[rng.randrange(len(prompt))] = rng.choice(special)
        return prompt

    def _params(self, parsed: bool) -> SamplingParams:
        rng = self.rng
        vocab = self.traits.limits.vocab_size
        first, second = text_of(rng.randrange(vocab)), text_of(rng.randrange(vocab))
        across = [[first[1:-1] + "><", second], [first + second]]
        return SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=rng.randrange(4),
            n=rng.choice([1, 1, 1, 1, 3]),
            max_tokens=rng.choice([1, 2, 8, 30, 30, 60]),
            stop=rng.choice([[], [], [first], *([] if parsed else across)]),
            stop_token_ids=self._some(rng.choice([0, 0, 1, 4])),
            ignore_eos=rng.random() < 0.3,
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
            structured_outputs=Grammar("regex", ".*") if rng.random() < 0.15 else None,
        )

"""Conversations: requests that follow each other, each with all that was said before.

A turn's prompt is what the session opens with, then what each earlier turn added together with its
answer, then what this turn adds, and last what only this turn holds (a coding agent's reminder of
the time or of open files): so the next prompt repeats all but that, and a prefix cache has it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.loadtest.client.prompts import WORDS, Prompt, RandomShape

Form = Literal["ids", "text", "chat"]
FIRST_SHARE = 1 / 3
"""An agent's first prompt, as a share of the mean one."""
Parts = list[Any]
"""Token ids or words."""


class Answer(NamedTuple):
    """What the server said in an earlier turn."""

    text: str
    ids: list[int]
    """Empty where the server does not tell them."""


class Turn(msgspec.Struct, frozen=True):
    """What one request adds to its conversation."""

    added: Parts
    passing: Parts
    """At the end of this turn's prompt, and of no later one's."""
    output_len: int


class Session(msgspec.Struct, frozen=True):
    opening: Parts
    """What several sessions may have in common, such as a system prompt."""
    turns: list[Turn]


class AgentShape(msgspec.Struct, frozen=True):
    """Sessions of a coding agent, by what is known of such: how often the prompt was seen before,
    and how much more is read than written."""

    output_len: int
    turns: int = 33
    hit_share: float = 0.94
    """Of all prompt tokens, those that a prompt of the same session had at the same place."""
    input_ratio: float = 131.0
    """Prompt tokens for each token of an answer."""
    prefix_len: int = 0
    """Tokens of the first prompt that all sessions share."""

    def lengths(self) -> tuple[float, float, float]:
        """Tokens of the first prompt, that a turn adds behind the answer before, and that it holds
        for itself alone. Raises ``ValueError`` where no such session exists.

        All prompts of T turns have T M tokens, M = ``input_ratio`` · ``output_len`` of them on
        average, so a prompt grows by g = 2 (M - first) / (T - 1). Anew are computed the first
        prompt and, in each turn, what it added, what it holds alone, and the answer before: that
        was computed behind what is not there any more. Without anything of its own a turn keeps
        the answer too.
        """
        rounds, mean = self.turns - 1, self.input_ratio * self.output_len
        anew = (1 - self.hit_share) * self.turns * mean
        first = FIRST_SHARE * mean
        growth = 2 * (mean - first) / rounds
        passing = (anew - first) / rounds - growth
        if passing <= 0:
            passing = 0.0
            first = 2 * mean - rounds * self.output_len - anew
            growth = 2 * (mean - first) / rounds
        added = growth - self.output_len
        if added < 1 or first < passing + self.prefix_len + 1:
            raise ValueError(
                f"there are no sessions of {self.turns} turns with {self.hit_share:.1%} prefix "
                f"hits, {self.input_ratio:g} tokens read for one that is written, answers of "
                f"{self.output_len} and a shared prefix of {self.prefix_len}"
            )
        return first, added, passing


def conversations(
    count: int, turns: tuple[int, int], shape: RandomShape, seed: int | str, pool: Sequence[Any]
) -> list[Session]:
    """``count`` conversations; the same for the same arguments. Their turns are drawn evenly, the
    lengths of questions and answers as ``shape`` says."""
    draw = random.Random(f"conversations {seed}")
    openings = [draw.choices(pool, k=shape.prefix_len) for _ in range(shape.prefix_count)]
    made = []
    for number in range(count):
        asked = [
            Turn(
                draw.choices(pool, k=shape.length(draw, shape.input_len)),
                [],
                shape.length(draw, shape.output_len),
            )
            for _ in range(draw.randint(*turns))
        ]
        made.append(Session(openings[number % len(openings)], asked))
    return made


def agent_sessions(
    count: int, shape: AgentShape, seed: int | str, pool: Sequence[Any]
) -> list[Session]:
    """``count`` sessions of one shape. Raises ``ValueError``, see ``AgentShape.lengths``."""
    first, added, passing = shape.lengths()
    own = round(passing)
    # Rounded where they end, so that no prompt is off by more than one.
    ends = [round(first - shape.prefix_len - passing + added * turn) for turn in range(shape.turns)]
    sizes = [ends[0], *(after - before for before, after in itertools.pairwise(ends))]
    draw = random.Random(f"agents {seed}")
    opening = draw.choices(pool, k=shape.prefix_len)
    return [
        Session(
            opening,
            [
                Turn(draw.choices(pool, k=size), draw.choices(pool, k=own), shape.output_len)
                for size in sizes
            ],
        )
        for _ in range(count)
    ]


class Conversations:
    """The prompts of sessions, see ``workload.Source``."""

    arrivals: Sequence[float] | None = None

    def __init__(self, sessions: Sequence[Session], form: Form, *, counted: bool = True) -> None:
        """counted: parts are tokens or words; otherwise texts of any length."""
        self._sessions = sessions
        self.form = form
        self._places = [
            (number, turn)
            for number, session in enumerate(sessions)
            for turn in range(len(session.turns))
        ]
        self.turns = [len(session.turns) for session in sessions]
        self.output_lens = [sessions[s].turns[t].output_len for s, t in self._places]
        self.input_lens: list[int | None] = [
            _planned(sessions[s], t) if counted else None for s, t in self._places
        ]

    def exact_lens(self) -> list[tuple[int, int]]:
        """Tokens in and out of each prompt, where they are token ids."""
        if self.form != "ids":
            return []
        known = (_planned(self._sessions[s], t) for s, t in self._places)
        return [*zip(known, self.output_lens, strict=True)]

    def prompt(self, index: int, answers: Sequence[Answer]) -> Prompt:
        number, turn = self._places[index]
        session = self._sessions[number]
        content = {"ids": _ids, "text": _text, "chat": _messages}[self.form](session, turn, answers)
        return Prompt(
            msgspec.Raw(msgspec.json.encode(content)),
            session.turns[turn].output_len,
            len(content) if self.form == "ids" else self.input_lens[index],
            is_messages=self.form == "chat",
            is_ids=self.form == "ids",
        )


def _planned(session: Session, turn: int) -> int:
    """Tokens of a prompt, where each answer has as many as were asked for."""
    said = sum(len(one.added) + one.output_len for one in session.turns[:turn])
    now = session.turns[turn]
    return len(session.opening) + said + len(now.added) + len(now.passing)


def _ids(session: Session, turn: int, answers: Sequence[Answer]) -> list[int]:
    found = list(session.opening)
    for asked, answer in zip(session.turns[:turn], answers, strict=True):
        found += asked.added
        # A server that does not tell its tokens gets others, as many.
        found += answer.ids or list(
            itertools.islice(itertools.cycle(asked.added), asked.output_len)
        )
    return found + session.turns[turn].added + session.turns[turn].passing


def _text(session: Session, turn: int, answers: Sequence[Answer]) -> str:
    found = [" ".join(session.opening)] if session.opening else []
    for asked, answer in zip(session.turns[:turn], answers, strict=True):
        found += [" ".join(asked.added), answer.text.strip()]
    now = session.turns[turn]
    return " ".join(filter(None, [*found, " ".join(now.added + now.passing)]))


def _messages(session: Session, turn: int, answers: Sequence[Answer]) -> list[dict[str, str]]:
    found = []
    if session.opening:
        found.append({"role": "system", "content": " ".join(session.opening)})
    for asked, answer in zip(session.turns[:turn], answers, strict=True):
        found.append({"role": "user", "content": " ".join(asked.added)})
        found.append({"role": "assistant", "content": answer.text})
    now = session.turns[turn]
    found.append({"role": "user", "content": " ".join(now.added + now.passing)})
    return found


def pool_of(form: Form, vocab_size: int) -> Sequence[Any]:
    """What prompts are drawn from."""
    return range(vocab_size) if form == "ids" else WORDS

"""Is no held-out question in the training text? Makes the text again and looks.

``python -m penstock.demo.training.check_split``: the conversations of some steps of the training
against the questions of an evaluation, word by word: anywhere in a conversation, and as a whole
where tools or earlier turns belong to the question. (A tool's request also occurs without that
tool, with the answer that none fits.)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from penstock.demo.chat import prompt_text
from penstock.demo.exchange import Random
from penstock.demo.grading import ALL_SKILLS, questions
from penstock.demo.mixture import Conversation, conversation

CONVERSATIONS_A_STEP = 1200
"""A few more than the 131,072 tokens of a step hold."""


def _trained(seed: int, steps: Sequence[int]) -> Iterator[Conversation]:
    for step in steps:
        source = Random(f"training {seed} {step}")
        for _ in range(CONVERSATIONS_A_STEP):
            yield conversation(source)


def overlap(count: int, seed: int, training_seed: int, steps: Sequence[int]) -> list[str]:
    """The questions of the evaluation that the training text asks too."""
    evaluated = [
        made for free in (False, True) for _, made in questions(ALL_SKILLS, count, seed, free=free)
    ]
    whole = {prompt_text(made) for made in evaluated}
    single = {
        made.exchanges[0].question
        for made in evaluated
        if len(made.exchanges) == 1 and not made.tools
    }
    found = set()
    for made in _trained(training_seed, steps):
        if not made.tools:
            found |= single.intersection(exchange.question for exchange in made.exchanges)
        prompt = prompt_text(made)
        found |= {prompt} if prompt in whole else set()
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a question is in the text."""
    parser = argparse.ArgumentParser(
        "python -m penstock.demo.training.check_split", description=__doc__
    )
    parser.add_argument("--num-questions", type=int, default=200, help="of each skill")
    parser.add_argument("--eval-seed", type=int, default=1)
    parser.add_argument("--training-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    found = overlap(
        options.num_questions, options.eval_seed, options.training_seed, range(options.steps)
    )
    for question in found[:20]:
        print(f"in the training text: {question!r}")
    print(f"{len(found)} held-out questions in the text of {options.steps} steps")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())

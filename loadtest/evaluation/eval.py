"""``penstock eval``: held-out questions to a server, and the accuracy of each skill.

Exit codes: 0 asked and good enough, 1 the server cannot be used or did not answer every question,
2 wrong flags, 3 a skill is below ``--require`` or an answer is not the reference's,
130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.demo.grading import ADAPTER_SKILLS, ALL_SKILLS, questions
from penstock.loadtest.client.api_key import KEY_HELP, key_for
from penstock.loadtest.client.target import READY_HELP, Target, TargetError
from penstock.loadtest.environment import environment
from penstock.loadtest.evaluation import eval_cloze
from penstock.loadtest.evaluation.eval_facts import facts
from penstock.loadtest.evaluation.eval_questions import ENDPOINT, Outcome, ask_all
from penstock.loadtest.evaluation.eval_reference import Reference, ReferenceFailed, reference
from penstock.loadtest.own_server import own_server
from penstock.protocol.config.flags import URL_FLAGS, FlagParser
from penstock.services.library.server_process import ServerFailed

FAILED, WRONG_FLAGS, BELOW, INTERRUPTED = 1, 2, 3, 130
NUM_QUESTIONS = 20
CONCURRENCY = 64
PERPLEXITY_SHARE = 0.001
"""How far the perplexity of a text may be from the reference's."""


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        "penstock eval",
        usage="penstock eval [flags] [flags of serve]",
        description="Ask held-out questions over the API and report the accuracy of each skill. "
        "Without --base-url it starts `penstock serve` itself, with every flag that is not listed "
        "here (for instance MODEL or --dtype float32).",
        allow_abbrev=False,
    )
    parser.add_argument("--base-url", metavar="URL", help="a running server")
    parser.add_argument("--api-key", metavar="KEY", help=f"its key {KEY_HELP}")
    parser.add_argument("--served-model", metavar="NAME", help="default: the first that it lists")
    parser.add_argument("--set", choices=("skills", "facts"), default="skills", dest="question_set",
                        help="facts: plain facts in English, for any language model: the likeliest "
                        "of four ends of a sentence [%(default)s]")  # fmt: skip
    parser.add_argument("--text", metavar="FILE", type=Path,
                        help="with --set facts: the perplexity of this text too")  # fmt: skip
    parser.add_argument("--reference", metavar="FOLDER",
                        help="with --set facts: transformers answers the same in float32 from this "
                        "folder; exit with 3 if an answer differs, or the perplexity by more than "
                        f"{100 * PERPLEXITY_SHARE:g} %%")  # fmt: skip
    parser.add_argument("--skills", nargs="+", metavar="SKILL", default=list(ALL_SKILLS),
                        choices=(*ALL_SKILLS, *ADAPTER_SKILLS),
                        help="default: all but those of adapters, "
                        f"{', '.join(ADAPTER_SKILLS)}")  # fmt: skip
    parser.add_argument("--num-questions", type=_count, metavar="N",
                        help=f"of a skill [{NUM_QUESTIONS}], a table of facts [all]")  # fmt: skip
    parser.add_argument("--wording", choices=("known", "free"), default="known",
                        help="free: asked as visitors type [%(default)s]")  # fmt: skip
    parser.add_argument("--eval-seed", type=int, default=1, metavar="N",
                        help="other questions [%(default)s]")  # fmt: skip
    parser.add_argument("--max-concurrency", type=_count, default=CONCURRENCY, metavar="N",
                        help="questions under way at once [%(default)s]")  # fmt: skip
    parser.add_argument("--require", type=_fraction, metavar="SHARE",
                        help="exit with 3 if a skill answers a smaller share")  # fmt: skip
    parser.add_argument("--show", type=int, default=0, metavar="N",
                        help="print this many wrong answers of each skill")  # fmt: skip
    parser.add_argument("--output-json", metavar="FILE", help="write the figures there")
    parser.add_argument("--ready-timeout", type=float, metavar="SECONDS",
                        help=READY_HELP)  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")
    return parser


def _progress(total: int, *, quiet: bool) -> Callable[[int], None]:
    if quiet or not sys.stderr.isatty():
        return lambda done: None
    return lambda done: print(
        f"\r{done}/{total} answered", end="\n" if done == total else "", file=sys.stderr
    )


class _Asked(NamedTuple):
    model: str
    outcomes: list[Outcome]
    seconds: float
    perplexity: float | None = None


async def _ask(parsed: argparse.Namespace, url: str, text: str) -> _Asked:
    key = key_for(url, parsed.api_key, os.environ)
    is_facts = parsed.question_set == "facts"
    endpoint = eval_cloze.COMPLETIONS if is_facts else ENDPOINT
    target = Target(url, endpoint, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        models = await target.wait_ready(parsed.ready_timeout)
        model = parsed.served_model or (models[0].id if models else "")
        if is_facts:
            return await _ask_facts(parsed, target, model, text)
        free = parsed.wording == "free"
        count = parsed.num_questions or NUM_QUESTIONS
        asked = list(questions(parsed.skills, count, parsed.eval_seed, free=free))
        progress = _progress(len(asked), quiet=parsed.quiet)
        began = time.monotonic()
        outcomes = await ask_all(target, model, asked, parsed.max_concurrency, progress)
        return _Asked(model, outcomes, time.monotonic() - began)
    finally:
        target.pool.close()


async def _ask_facts(parsed: argparse.Namespace, target: Target, model: str, text: str) -> _Asked:
    asked = list(facts(parsed.num_questions))
    progress = _progress(len(asked), quiet=parsed.quiet)
    began = time.monotonic()
    outcomes = await eval_cloze.ask_all(target, model, asked, parsed.max_concurrency, progress)
    perplexity = None
    if text:
        perplexity = (await eval_cloze.score(target, model, text)).perplexity
    return _Asked(model, outcomes, time.monotonic() - began, perplexity)


def differences(
    asked: Sequence[Outcome], perplexity: float | None, expected: Reference
) -> list[str]:
    """What is not as transformers has it, in words."""
    found = [
        f"{outcome.question!r}: {outcome.said!r}, and transformers says {answer!r}"
        for outcome, answer in zip(asked, expected.answers, strict=True)
        if outcome.said != answer
    ]
    if perplexity is not None and expected.perplexity is not None:
        share = abs(perplexity / expected.perplexity - 1)
        if not share <= PERPLEXITY_SHARE:
            found.append(
                f"perplexity {perplexity:.4f}, and transformers says {expected.perplexity:.4f}: "
                f"{100 * share:.2f} % apart; {100 * PERPLEXITY_SHARE:g} % is allowed"
            )
    return found


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Right answers and their share, of each skill in the order asked, and of all."""
    skills: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        row = skills.setdefault(outcome.skill, {"asked": 0, "right": 0, "failed": 0})
        row["asked"] += 1
        row["right"] += outcome.right
        row["failed"] += bool(outcome.error)
    for row in skills.values():
        row["accuracy"] = row["right"] / row["asked"]
    right = sum(outcome.right for outcome in outcomes)
    return {
        "asked": len(outcomes),
        "right": right,
        "failed": sum(bool(outcome.error) for outcome in outcomes),
        "accuracy": right / len(outcomes) if outcomes else 0.0,
        "output_tokens": sum(outcome.tokens for outcome in outcomes),
        "skills": skills,
    }


def table(result: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [f"{'skill':18}{'asked':>7}{'right':>7}{'accuracy':>10}"]
    rows = [*result["skills"].items(), ("all", result)]
    lines += [
        f"{name:18}{row['asked']:7}{row['right']:7}{100 * row['accuracy']:9.1f}%"
        for name, row in rows
    ]
    if result.get("perplexity") is not None:
        lines.append(f"perplexity of the text: {result['perplexity']:.4f}")
    lines.append(f"{result['output_tokens']} tokens in {result['seconds']:.1f} s")
    return "\n".join(lines)


def _show_wrong(outcomes: Sequence[Outcome], count: int) -> None:
    shown: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.right or shown.get(outcome.skill, 0) >= count:
            continue
        shown[outcome.skill] = shown.get(outcome.skill, 0) + 1
        print(f"{outcome.skill}: {outcome.question!r}")
        print(f"    expected {outcome.expected!r}")
        print(f"    got      {outcome.error or outcome.said!r}")


def _write(path: Path, result: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The result with all wrong answers, as JSON."""
    wrong = [msgspec.to_builtins(each) for each in outcomes if not each.right]
    text = json.dumps({**result, "wrong": wrong}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _verdict(result: dict[str, Any], outcomes: Sequence[Outcome], require: float | None) -> int:
    if result["failed"]:
        error = next(outcome.error for outcome in outcomes if outcome.error)
        print(f"penstock: {result['failed']} questions got no answer: {error}", file=sys.stderr)
        return FAILED
    if result["differences"]:
        for line in result["differences"]:
            print(f"penstock: {line}", file=sys.stderr)
        return BELOW
    low = [name for name, row in result["skills"].items() if row["accuracy"] < (require or 0.0)]
    if low:
        print(f"penstock: below --require {require}: {', '.join(low)}", file=sys.stderr)
        return BELOW
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    reader = parser()
    parsed, rest = reader.parse_known_args(arguments)
    if names := {flag.partition("=")[0] for flag in rest} & {*URL_FLAGS}:
        reader.error(f"unknown flag {', '.join(sorted(names))}: use --base-url")
    if parsed.base_url and rest:
        reader.error(f"unrecognized arguments: {' '.join(rest)} (a running server is asked)")
    if parsed.question_set == "skills" and (parsed.text or parsed.reference):
        reader.error("--text and --reference go with --set facts")
    path = Path(parsed.output_json) if parsed.output_json else None
    try:
        text = parsed.text.read_text(encoding="utf-8") if parsed.text else ""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        with contextlib.ExitStack() as stack:
            url = parsed.base_url or stack.enter_context(own_server(rest))
            asked = asyncio.run(_ask(parsed, url, text))
        expected = None
        if parsed.reference:
            expected = reference(parsed.reference, text, parsed.num_questions)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        print(f"penstock: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG_FLAGS
    except UnicodeDecodeError as error:
        print(f"penstock: {parsed.text}: not text in UTF-8: {error}", file=sys.stderr)
        return WRONG_FLAGS
    except (TargetError, ServerFailed, eval_cloze.NoScore, ReferenceFailed) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    outcomes = asked.outcomes
    settings = {"model": asked.model, "seed": parsed.eval_seed, "wording": parsed.wording}
    result = {
        **settings,
        "set": parsed.question_set,
        "seconds": asked.seconds,
        **summary(outcomes),
        "perplexity": asked.perplexity,
        "differences": differences(outcomes, asked.perplexity, expected) if expected else [],
    }
    print(table(result))
    _show_wrong(outcomes, parsed.show)
    if path is not None:
        _write(path, {**result, "environment": environment("penstock eval", arguments)}, outcomes)
    return _verdict(result, outcomes, parsed.require)

"""From measured steps to sizes: how many sequences and how many tokens of prompts a step may have.

While ``n`` sequences run, each waits for a step of ``n`` rows and, on average, for its share of the
prompts that are computed meanwhile: ``n`` times ``prompt / answer`` tokens a step, so that

    TPOT(n) = decode(n) + n * prompt / answer * token

The load that follows says whether that holds.
"""

from __future__ import annotations

import msgspec

from penstock.loadtest.tune.objective import Objective, Workload, refuse, shown_ms
from penstock.loadtest.tune.step_points import Steps

NEAR = 1.1
"""Chunks whose tokens take up to so many times as long as those of the best are as good."""


class Given(msgspec.Struct, frozen=True):
    """What stands before anything is measured."""

    max_num_seqs: int
    max_num_batched_tokens: int
    fixed: frozenset[str] = frozenset()
    """Settings that were given: they are not changed."""


class Sizes(msgspec.Struct, frozen=True):
    """What to try, with the reasons in sentences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    others: list[int]
    """Other numbers of tokens a step that are worth a try, the likeliest first."""
    request_seconds: float
    """A request that waits for nobody, while as many run as may."""
    why_seqs: str
    why_tokens: str


def estimate(steps: Steps, objective: Objective, workload: Workload, given: Given) -> Sizes:
    """Raises ``Impossible`` where one sequence alone cannot keep the objective."""
    alone = steps.decode_ms(1)
    if objective.tpot is not None and alone > objective.tpot:
        raise refuse(
            objective,
            f"TPOT {shown_ms(alone)}, which a step of a single sequence takes ({steps.executor})",
        )
    tokens, why_tokens, others = _tokens(steps, objective, workload, given)
    chunk = _chunk(steps, tokens)
    seqs, why_seqs = _sequences(steps, objective, workload, given, chunk)
    seqs = min(seqs, tokens)  # every running sequence decodes a token a step
    step = _tpot(steps, workload, seqs, chunk)
    prompt = steps.prompt_ms(workload.prompt, chunk) if chunk else steps.decode_ms(1)
    seconds = (prompt + workload.answer * step) / 1e3
    return Sizes(seqs, tokens, others, seconds, why_seqs, why_tokens)


def without_steps(given: Given, workload: Workload, objective: Objective, why: str) -> Sizes:
    """What to try where no step could be measured."""
    seconds = workload.answer * (objective.tpot or 50.0) / 1e3 + (objective.ttft or 0.0) / 1e3
    standing = f"as it stood: {why}"
    tokens = given.max_num_batched_tokens
    others = [] if "max_num_batched_tokens" in given.fixed else [tokens // 2, 2 * tokens]
    return Sizes(given.max_num_seqs, tokens, others, seconds, standing, standing)


def _tokens(
    steps: Steps, objective: Objective, workload: Workload, given: Given
) -> tuple[int, str, list[int]]:
    """Tokens a step: the default, if no other is better by much; else the fewest of those that
    are as good as the best: short steps are what streams wait for."""
    standing = given.max_num_batched_tokens
    chunks = [one[0] for one in steps.prefill]
    if "max_num_batched_tokens" in given.fixed or not chunks:
        return standing, "given" if chunks else "as it stood: no other was measured", []
    prompts = {chunk: steps.prompt_ms(workload.prompt, chunk) for chunk in chunks}
    within = [chunk for chunk in chunks if prompts[chunk] <= (objective.ttft or float("inf"))]
    if not within:
        best = min(chunks, key=lambda chunk: prompts[chunk])
        raise refuse(
            objective,
            f"TTFT {shown_ms(prompts[best])}, which the steps of a prompt of {workload.prompt} "
            f"tokens take that waits for nobody ({steps.executor})",
        )
    costs = {chunk: steps.token_ms(chunk) for chunk in within}
    least = min(costs.values())
    good = [chunk for chunk in within if costs[chunk] <= NEAR * least]
    tokens = standing if standing in good else good[0]
    told = ", ".join(f"{costs[chunk] * 1e3:.3g} µs at {chunk}" for chunk in within)
    why = f"a token of a prompt takes {told}; a prompt's steps take {shown_ms(prompts[tokens])}"
    if tokens == standing:
        why += "; no other number is better by a tenth, so it stays at its default"
    others = [one for one in (*reversed(good), *within) if one != tokens]
    return tokens, why, list(dict.fromkeys(others))


def _chunk(steps: Steps, tokens: int) -> int:
    """The measured chunk that is nearest to a step of so many tokens; 0: none was measured."""
    return min((one[0] for one in steps.prefill), key=lambda chunk: abs(chunk - tokens), default=0)


def _tpot(steps: Steps, workload: Workload, rows: int, chunk: int) -> float:
    share = workload.prompt / workload.answer * (steps.token_ms(chunk) if chunk else 0.0)
    return steps.decode_ms(rows) + rows * share


def _sequences(
    steps: Steps, objective: Objective, workload: Workload, given: Given, chunk: int
) -> tuple[int, str]:
    if "max_num_seqs" in given.fixed:
        return given.max_num_seqs, "given"
    most = steps.decode[-1][0]
    if objective.tpot is None:
        seqs = min(most, given.max_num_seqs)
        return (
            seqs,
            f"as it stood, up to {most}, the most rows that were measured: no TPOT is asked",
        )
    seqs = 1
    while seqs < most and _tpot(steps, workload, seqs + 1, chunk) <= objective.tpot:
        seqs += 1
    told = ", ".join(f"{shown_ms(ms)} at {rows}" for rows, ms in steps.decode)
    why = f"a decode step takes {told}; with the prompts beside it a token takes about "
    why += f"{shown_ms(_tpot(steps, workload, seqs, chunk))} with {seqs} sequences"
    if seqs < most:
        beyond = _tpot(steps, workload, seqs + 1, chunk)
        why += f" and {shown_ms(beyond)} with {seqs + 1}, which is too long"
    else:
        why += ", the most that were measured"
    return seqs, why

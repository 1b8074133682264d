"""The sampler's rules for one row, token by token in float64, and random requests to try."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.kernels import sampling
from penstock.kernels.draw_keys import draw_keys

Array = np.ndarray


@dataclass
class Request:
    """What one row asks for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    biases: dict[int, float] = field(default_factory=dict)
    bans: list[int] = field(default_factory=list)
    allowed: list[int] | None = None
    bad_words: list[list[int]] = field(default_factory=list)

    @property
    def penalised(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


def adjusted(logits: Array, request: Request) -> Array:
    """Bans, biases and penalties. logits: [V]."""
    z = logits.astype(np.float64)
    for token, bias in request.biases.items():
        z[token] += bias
    for token in {*request.prompt, *request.output}:
        z[token] = z[token] / request.repetition if z[token] > 0 else z[token] * request.repetition
    for token in set(request.output):
        z[token] -= request.frequency * request.output.count(token) + request.presence
    banned = {*request.bans}
    for word in request.bad_words:
        before = word[:-1]
        if not before or request.output[-len(before) :] == before:
            banned.add(word[-1])
    if request.allowed is not None:
        banned |= {*range(len(z))} - {*request.allowed}
    z[list(banned)] = -math.inf
    return z


def probabilities(logits: Array, request: Request, slack: float = 0.0) -> Array:
    """The exact distribution of a drawn row.

    slack: move min_p's bound and the probability that top_p has to reach by this, down and up, so
    that more is kept; negative: less.
    """
    z = adjusted(logits, request) / request.temperature
    kept = z > -math.inf
    if request.min_p > 0:
        kept &= (z >= z.max() + math.log(request.min_p) - slack) | (z == z.max())
    if request.top_k > 0:
        last = np.sort(z[kept])[::-1][: request.top_k][-1]
        kept &= z >= last
    p = np.where(kept, np.exp(z - z.max()), 0.0)
    p /= p.sum()
    if request.top_p < 1:
        ordered = np.sort(p[kept])[::-1]
        reached = np.cumsum(ordered) >= request.top_p + slack
        number = int(reached.argmax()) if reached.any() else len(ordered) - 1
        p[p < ordered[number]] = 0.0
    return p / p.sum()


def random_request(rng: np.random.Generator, vocab: int) -> Request:
    """Every part is asked for in about half of the requests."""

    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.5 else otherwise

    def tokens(most: int) -> list[int]:
        return rng.integers(0, vocab, rng.integers(0, most)).tolist()

    output = [*tokens(40), *rng.integers(0, min(8, vocab), 6).tolist()]
    words = [[*output[-n:], int(rng.integers(vocab))] for n in (1, 2, 6)]
    words += [[int(rng.integers(vocab))], [output[-1] ^ 1, int(rng.integers(vocab))]]
    return Request(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.6])),
        top_k=int(maybe(rng.integers(1, vocab + 5), 0)),  # type: ignore[call-overload]
        top_p=float(maybe(rng.uniform(0.05, 0.99), 1.0)),  # type: ignore[arg-type]
        min_p=float(maybe(10 ** rng.uniform(-4, -0.1), 0.0)),  # type: ignore[arg-type]
        repetition=float(maybe(rng.uniform(0.6, 1.9), 1.0)),  # type: ignore[arg-type]
        frequency=float(maybe(rng.uniform(-1, 1), 0.0)),  # type: ignore[arg-type]
        presence=float(maybe(rng.uniform(-1, 1), 0.0)),  # type: ignore[arg-type]
        prompt=tokens(30),
        output=output,
        biases=maybe(
            {int(t): float(rng.uniform(-3, 3)) for t in rng.integers(0, vocab, 5)}, {}
        ),  # type: ignore[arg-type]
        bans=maybe(tokens(4), []),  # type: ignore[arg-type]
        allowed=maybe(
            sorted({int(t) for t in rng.integers(0, vocab, vocab)}), None
        ),  # type: ignore[arg-type]
        bad_words=maybe(words, []),  # type: ignore[arg-type]
    )  # fmt: skip


def sampling_rows(requests: list[Request], seed: int = 1) -> sampling.SamplingRows:
    """Row i draws with the key of output position i."""
    count = len(requests)
    zeros = np.zeros(count, np.uint64)
    return sampling.SamplingRows(
        np.array([r.temperature for r in requests], np.float32),
        np.array([r.top_k for r in requests], np.int64),
        np.array([r.top_p for r in requests], np.float32),
        draw_keys(zeros + np.uint64(seed), zeros, np.arange(count, dtype=np.uint64)),
        np.array([r.min_p for r in requests], np.float32),
    )


def adjustments(requests: list[Request], vocab: int) -> list[sampling.Adjustment]:
    """The reference's steps for these rows; rows of one request share its slot."""
    unique = list({id(request): request for request in requests}.values())
    slot_of = {id(request): slot for slot, request in enumerate(unique)}
    slots = np.array([slot_of[id(request)] for request in requests])

    def asking(asks: list[bool]) -> Array:
        return np.flatnonzero(np.array(asks)[slots])

    found: list[sampling.Adjustment] = []
    entries = [
        (row, token, value)
        for row, request in enumerate(requests)
        for token, value in [*request.biases.items(), *((t, -math.inf) for t in request.bans)]
    ]
    if entries:
        row, token, value = zip(*entries, strict=True)
        found.append(
            sampling.TokenBiases(np.array(row), np.array(token), np.array(value, np.float32))
        )
    words = sampling.WordTable(len(unique))
    for slot, request in enumerate(unique):
        words.begin(slot, request.bad_words, request.output)
    warned = asking([bool(request.bad_words) for request in unique])
    if len(warned):
        lengths = np.array([len(request.output) for request in unique])
        found.append(words.bans(warned, slots[warned], lengths[slots[warned]]))
    limited = asking([request.allowed is not None for request in unique])
    if len(limited):
        masks = np.stack(
            [sampling.allowed_mask(request.allowed or [], vocab) for request in unique]
        )
        found.append(sampling.AllowedTokens(limited, torch.from_numpy(masks[slots[limited]])))
    penalised = asking([request.penalised for request in unique])
    if len(penalised):
        asked = [requests[row] for row in penalised]
        found.append(
            sampling.Penalties(
                penalised,
                np.array([request.repetition for request in asked], np.float32),
                np.array([request.frequency for request in asked], np.float32),
                np.array([request.presence for request in asked], np.float32),
                slots[penalised],
                count_table(unique, vocab),
            )
        )
    return found


def count_table(requests: list[Request], vocab: int) -> torch.Tensor:
    """Row i is that of request i."""
    counts = torch.zeros(len(requests), vocab, dtype=torch.int16)
    for slot, request in enumerate(requests):
        prompt, output = (np.array(part, np.int32) for part in (request.prompt, request.output))
        sampling.begin_counts(counts, slot, prompt, output)
    return counts

"""Banned strings: where one is complete, its choice goes back to the token that began it.

That token is banned at its place, and the choice is drawn again from there: from the model's own
distribution without that token, and with other random numbers from then on. For the ones that were
used have already brought the string; used once more they would favour the same tokens again. Which
numbers follow from the seed and from how often the choice has gone back, so a seed still means a
text.

A token is held back, with all that comes beside it, while what follows may make it a part of a
banned string. Behind a redraw something else may follow, and a string may then begin with tokens
that have gone on: the choice goes back to the first that has not. Which have is decided token by
token, so it does not depend on how many a row brings.

Strings are looked for in the text of the output, whatever their case; what was in the prompt is no
part of one. The automaton is that of stop strings: the cost is linear in the text.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right

import msgspec

from penstock.protocol.logprobs import PackedLogprobs, entry_bytes
from penstock.protocol.ownership.guard import NO_EXTRAS, Passed, TokenExtras
from penstock.protocol.sampler_parameters import MAX_REDRAWS
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling
from penstock.protocol.wire.messages.tokens import End, EndReason, RowLogprobs, RowStart
from penstock.services.tokenizer.detokenizer import new_detokenizer
from penstock.services.tokenizer.stop_strings import StopStrings, stop_automaton
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.token_table import CleanedTable

_NOTHING = memoryview(b"").cast("i")


def folded(text: str) -> str:
    """The text in lower case, character by character: its length stays."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(low if len(low := one.lower()) == 1 else one for one in text)


def folded_strings(params: SamplingParams) -> tuple[str, ...]:
    """What is looked for."""
    return tuple(dict.fromkeys(map(folded, params.banned_strings)))


def redraw_seed(seed: int, redraws: int) -> int:
    """The unsigned 64-bit seed of draws after so many redraws."""
    if not redraws:
        return seed
    data = seed.to_bytes(8, "little") + redraws.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class _Rows:
    """What came beside tokens that are held back."""

    __slots__ = ("entries", "most", "prompt", "start")

    def __init__(self) -> None:
        self.most = -1
        """Likeliest tokens in each entry; -1: no logprobs have come."""
        self.entries = bytearray()
        self.prompt: PackedLogprobs | None = None
        self.start: RowStart | None = None

    def add(self, more: TokenExtras) -> None:
        self.start = more.start or self.start
        if (found := more.logprobs) is not None:
            self.prompt = found.prompt or self.prompt
            if found.tokens is not None:
                self.most = found.tokens.most
                self.entries += found.tokens.entries

    def take(self, count: int, end: End | None) -> TokenExtras:
        """What belongs to the first ``count`` tokens, and the end."""
        tokens = logprobs = None
        if self.most >= 0:
            size = count * entry_bytes(self.most)
            tokens = PackedLogprobs(self.most, bytes(self.entries[:size]))
            del self.entries[:size]
        if tokens is not None or self.prompt is not None:
            logprobs = RowLogprobs(0, tokens, self.prompt)
        found = TokenExtras(self.start, end, logprobs)
        self.start = self.prompt = None
        return found

    def cut(self, count: int, *, whole: bool) -> None:
        """Only the first ``count`` tokens stand; whole: the choice begins anew."""
        if self.most >= 0:
            del self.entries[count * entry_bytes(self.most) :]
        if whole:
            self.start = self.prompt = None


class BannedStrings:
    """The guard of one choice."""

    __slots__ = (
        "_automaton", "_bans", "_begins", "_chars", "_count", "_epoch", "_epochs", "_flush",
        "_free", "_is_over", "_lags", "_params", "_push", "_rows", "_sampling", "_state", "_stops",
        "_table", "_tokens", "_with_stops", "redraws",
    )  # fmt: skip

    def __init__(
        self, text_model: TextModel, params: SamplingParams, sampling: bytes, *, with_stops: bool
    ) -> None:
        """sampling: what the request asks of the sampler, encoded. with_stops: a stop string ends
        the choice wherever it stands, so that nothing behind it is looked at."""
        self._table = text_model.table(params.skip_special_tokens)
        self._lags = isinstance(self._table, CleanedTable)
        """Characters of a token may come with later ones, although it has brought some."""
        self._params, self._sampling = params, sampling
        self._automaton = stop_automaton(folded_strings(params))
        self._with_stops = with_stops and bool(params.stop)
        self._is_over = False
        """Nothing that comes can be part of a banned string."""
        self._tokens = array("i")
        """All that stand; the first ``_count`` of them have gone on."""
        self._count = 0
        self._free = 0
        """Of the held tokens, the first so many are to go on with their row."""
        self._bans: dict[int, list[int]] = {}
        """Position → the tokens that are not to come there."""
        self._epoch = self.redraws = 0
        self._state = self._chars = 0
        self._epochs: list[int] = []
        """Of each held token: the redraws before it was drawn."""
        self._rows = _Rows()
        self._read_anew()

    @property
    def held(self) -> int:
        """Tokens that are held back."""
        return len(self._tokens) - self._count

    def drawn(self) -> bytes:
        """All tokens that stand, int32."""
        return self._tokens.tobytes()

    def sampling(self) -> bytes:
        """How the next token is drawn: an encoded ``SlotSampling``; empty: as the request says."""
        if not self._epoch:
            return b""
        base = msgspec.msgpack.decode(self._sampling, type=SlotSampling)
        adjustments, position = base.adjustments, len(self._tokens)
        if bans := self._bans.get(position):
            adjustments = msgspec.structs.replace(
                adjustments or SlotAdjustments(),
                banned=array("i", bans).tobytes(),
                banned_until=position + 1,
            )
        seed = redraw_seed(base.seed, self._epoch)
        return msgspec.structs.replace(base, seed=seed, adjustments=adjustments).packed()

    def replay(self, tokens: memoryview, redraws: int) -> None:
        """Go on behind int32 tokens that went on before, the last of them drawn after so many
        redraws."""
        self._tokens.frombytes(tokens.tobytes())
        self._count = len(self._tokens)
        self._epoch = self.redraws = redraws
        self._read_anew()

    def take(self, tokens: memoryview, more: TokenExtras) -> Passed:
        """See ``Guard``."""
        end = more.end
        self._rows.add(more)
        names_token = end is not None and end.reason == EndReason.STOP and isinstance(end.stop, int)
        unread = len(tokens) - (names_token and not self._params.include_stop_str_in_output)
        for place, token in enumerate(tokens):
            self._tokens.append(token)
            self._epochs.append(self._epoch)
            self._begins.append(self._chars)
            if place < unread and (found := self._read(self._push(token), len(self._tokens))):
                return self._go_back(found)
            self._free = max(self._free, self._certain())
        if end is not None and end.reason in (EndReason.STOP, EndReason.LENGTH):
            found = self._read(self._flush(), len(self._tokens))
            if found and self._free < self.held:
                return self._go_back(found)
        return self._pass(self._free if end is None else self.held, end)

    def _read(self, text: str, count: int) -> str:
        """Look through the next text, with which there are that of ``count`` tokens. Returns the
        banned string that it has completed."""
        if self._is_over:
            return ""
        if self._stops is not None and count > self._params.min_tokens:
            text = self._up_to_stop(self._stops, text)
        automaton, state, position = self._automaton, self._state, 0
        text = folded(text)
        while position < len(text):
            if not state:
                start = automaton.first(text, position)
                if start is None:
                    break
                position = start.start()
            state = automaton.step(state, text[position])
            position += 1
            if (found := automaton.found[state]) is not None:
                self._state = 0
                self._chars += position
                return found
        self._state = state
        self._chars += len(text)
        return ""

    def _up_to_stop(self, stops: StopStrings, text: str) -> str:
        """What of a text can complete a banned string: a stop string that ends before it, or with
        it, keeps it out of the answer, unless stop strings are a part of that."""
        before = stops.held
        released = stops.push(text)
        if stops.found is None:
            return text
        self._is_over = True
        end = len(released) - before
        return text[:end] if self._params.include_stop_str_in_output else text[: max(0, end - 1)]

    def _certain(self) -> int:
        """How many of the held tokens are part of no banned string, whatever comes. Those whose
        characters are not complete may still become one."""
        if self._is_over:
            return self.held
        possible = self._chars - self._automaton.depth[self._state]
        begins, chars = self._begins, self._chars
        # Each but the last token ends where the next one begins.
        certain = max(0, bisect_right(begins, possible) - 1) + (chars <= possible)
        return min(certain, bisect_left(begins, chars), self.held - self._lags)

    def _go_back(self, found: str) -> Passed:
        """A banned string is complete: take back its first token, and all behind it."""
        begin = bisect_right(self._begins, self._chars - len(found)) - 1
        kept = max(self._free, bisect_left(self._begins, self._begins[max(begin, 0)]))
        position = self._count + kept
        self._rows.cut(kept, whole=position == 0)
        if self._epoch == MAX_REDRAWS:
            self._cut(kept)
            self._is_over = True
            banned = next(one for one in self._params.banned_strings if folded(one) == found)
            return self._pass(kept, End(0, EndReason.LENGTH, banned))
        bans = {at: tokens for at, tokens in self._bans.items() if self._count <= at <= position}
        bans.setdefault(position, []).append(self._tokens[position])
        self._bans = bans
        self._epoch += 1
        self._cut(kept)
        self._read_anew()
        return Passed(_NOTHING, NO_EXTRAS, again=True)

    def _cut(self, kept: int) -> None:
        """Only so many of the held tokens stand."""
        del self._tokens[self._count + kept :], self._epochs[kept:], self._begins[kept:]

    def _read_anew(self) -> None:
        """Come to where the tokens that stand end."""
        detokenizer = new_detokenizer(self._table)
        self._push, self._flush = detokenizer.push, detokenizer.flush
        self._stops = StopStrings(self._params.stop, include=True) if self._with_stops else None
        self._is_over = False
        self._state = self._chars = 0
        self._begins: list[int] = []
        """Of each held token: the characters before its text."""
        sure = min(self._count, self._params.min_tokens)
        for begin, end in ((0, sure), (sure, self._count)):
            self._read("".join(map(self._push, self._tokens[begin:end])), end)
        for place in range(self._count, len(self._tokens)):
            self._begins.append(self._chars)
            self._read(self._push(self._tokens[place]), place + 1)

    def _pass(self, count: int, end: End | None) -> Passed:
        """The first held tokens go on, and with the end all that has come beside them."""
        if not count and end is None:
            return Passed(_NOTHING, NO_EXTRAS)
        tokens = memoryview(self._tokens[self._count : self._count + count].tobytes()).cast("i")
        if count:
            self.redraws = self._epochs[count - 1]
        del self._epochs[:count], self._begins[:count]
        self._count += count
        self._free = max(0, self._free - count)
        return Passed(tokens, self._rows.take(count, end))

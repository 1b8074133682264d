"""The way of one choice from token ids to the text that its client sees."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from penstock.protocol.ownership.choice import Delta
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import (
    Content,
    Event,
    RowDetails,
    RowLogprobs,
)
from penstock.services.tokenizer.detokenizer import new_detokenizer
from penstock.services.tokenizer.stop_strings import StopStrings
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.token_details import TokenDetails

TokenRow: TypeAlias = "memoryview[int] | array[int] | list[int]"
"""int32 token ids."""


class ChoiceStream:
    """Detokenizer and stop strings of one choice. Calls must not follow a found stop string."""

    __slots__ = (
        "_details",
        "_flush_tokens",
        "_include",
        "_push_token",
        "_stops",
        "_untouched",
        "reasoning_tokens",
    )  # fmt: skip

    def __init__(
        self,
        text_model: TextModel,
        params: SamplingParams,
        prompt: bytes = b"",
        *,
        skip_special: bool | None = None,
    ) -> None:
        """prompt: its int32 ids, which ``details`` may be asked about. skip_special: special tokens
        stand for nothing; by default as the parameters say."""
        self.reasoning_tokens = 0
        """Tokens that were thinking."""
        skips = params.skip_special_tokens if skip_special is None else skip_special
        detokenizer = new_detokenizer(text_model.table(skips))
        self._push_token = detokenizer.push
        self._details = TokenDetails(text_model, params, prompt, detokenizer.push)
        if params.logprobs is not None:
            self._push_token = self._details.push
        self._flush_tokens = detokenizer.flush
        self._include = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, self._include) if params.stop else None
        self._untouched = params.min_tokens if params.stop else 0
        """Tokens whose text cannot begin or complete a stop string: the next so many."""

    @property
    def stop(self) -> str | None:
        """The stop string that ended the choice; ``finish`` and ``replay`` may find one too."""
        return self._stops.found if self._stops else None

    def push(self, tokens: TokenRow, last_is_stop: bool = False) -> Delta:
        """Take the next tokens.

        With ``last_is_stop`` the last one is the token that ended the choice: it counts
        as used but its own text is no part of the answer, unless stop strings are to be. After a
        found stop string the choice is over and every further token is dropped.
        """
        stops = self._stops
        count = len(tokens)
        rendered = count - 1 if last_is_stop and not self._include else count
        if stops is None:
            if count == 1 and rendered:
                text = self._push_token(tokens[0])
            else:
                text = "".join(map(self._push_token, tokens[:rendered]))
            return Delta(text, count, None)
        earlier = stops.found
        if earlier is not None:
            return Delta("", 0, earlier)
        released = []
        for position in range(rendered):
            text = self._push_token(tokens[position])
            if self._untouched:
                self._untouched -= 1
                released.append(text)
                continue
            released.append(stops.push(text))
            if stops.found is not None:
                count = position + 1
                break
        text = released[0] if len(released) == 1 else "".join(released)
        return Delta(text, count, stops.found)

    def finish(self, *, complete: bool = False) -> Content:
        """The choice ended by length or end token: release what was held back.

        Bytes of an unfinished character become U+FFFD. The held text may itself complete a stop
        string: then ``stop`` is set. complete: the model has ended it.
        """
        if self.stop is not None:
            return ""
        text = self._flush_tokens()
        if self._stops is not None:
            text = self._stops.push(text)
            if self._stops.found is None:
                text += self._stops.flush()
        return text

    def pooled(self, values: bytes) -> Event:
        """Raises ``TypeError``: it generates, and no task makes anything of its prompt."""
        raise TypeError("a request that generates got what a task makes of its prompt")

    def details(
        self, row: int, first: bool, tokens: TokenRow, found: RowLogprobs | None
    ) -> RowDetails | None:
        """What a row of these tokens, which were pushed last, brings beside its text."""
        return self._details.of_row(row, first, len(tokens), found)

    def replay(self, tokens: TokenRow) -> Content:
        """Rebuild the state of a choice that another tokenizer began, from the int32 ids that it
        has produced so far. Returns all the text of them that is released."""
        text = self.push(tokens).content
        self._details.replayed()
        return text

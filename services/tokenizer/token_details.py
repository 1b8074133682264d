"""What rows of tokens bring beside their text: logprobs with the tokens' bytes, and the echo."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from penstock.protocol.logprobs import NamedLogprobs, PackedLogprobs, entry_bytes
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import RowDetails, RowLogprobs
from penstock.services.tokenizer.detokenizer import Detokenizer, new_detokenizer
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.token_table import piece_bytes


class _Offsets:
    """Where in a text each token begins: the characters that the tokens before it completed."""

    __slots__ = ("_chars", "_push", "_starts")

    def __init__(self, push: Callable[[int], str]) -> None:
        self._push = push
        self._chars = 0
        self._starts: list[int] = []

    def push(self, token: int) -> str:
        self._starts.append(self._chars)
        text = self._push(token)
        self._chars += len(text)
        return text

    def forget(self) -> None:
        """What was pushed so far needs no offsets any more."""
        self._starts = []

    def take(self, count: int) -> list[int]:
        """Offsets of the newest ``count`` tokens; those not pushed begin where the text ends."""
        starts, self._starts = self._starts[:count], []
        return starts + [self._chars] * (count - len(starts))


class TokenDetails:
    """Details of one choice's rows. If logprobs are wanted, every token goes through ``push``."""

    __slots__ = ("_offsets", "_params", "_prompt", "_text_model", "push")

    def __init__(
        self,
        text_model: TextModel,
        params: SamplingParams,
        prompt: bytes,
        push: Callable[[int], str],
    ) -> None:
        """prompt: int32 ids; push: the detokenizer's."""
        self._text_model, self._params, self._prompt = text_model, params, prompt
        self._offsets = _Offsets(push)
        self.push = self._offsets.push

    def replayed(self) -> None:
        """The tokens that were pushed have had their rows from another tokenizer."""
        self._offsets.forget()

    def of_row(
        self, row: int, first: bool, count: int, found: RowLogprobs | None
    ) -> RowDetails | None:
        """The details of a row of the ``count`` tokens that were pushed last.

        first: nothing came of the choice before; then the prompt's part is due.
        """
        tokens = prompt = None
        if self._params.logprobs is not None:
            offsets = self._offsets.take(count)
            if found is not None and found.tokens is not None:
                entries = found.tokens.first(count)
                tokens = NamedLogprobs(
                    entries.most, entries.entries, self._pieces(entries), offsets
                )
        if first and found is not None and found.prompt is not None:
            prompt = self._of_prompt(found.prompt)
        echo = self._echo() if first and self._params.echo else ""
        if tokens is None and prompt is None and not echo:
            return None
        return RowDetails(row, tokens, prompt, echo)

    def _pieces(self, packed: PackedLogprobs) -> list[bytes]:
        """The bytes of the ids in every entry: its own token, then the likeliest ones."""
        table = self._text_model.table(skip_special=False)
        words = memoryview(packed.entries).cast("i")
        size, most = entry_bytes(packed.most) // words.itemsize, packed.most
        pieces = []
        for first in range(0, len(words), size):
            pieces.append(piece_bytes(table, words[first]))
            pieces += [piece_bytes(table, token) for token in words[first + 3 : first + 3 + most]]
        return pieces

    def _of_prompt(self, packed: PackedLogprobs) -> NamedLogprobs:
        ids = array("i", self._prompt)
        offsets = _Offsets(self._new_detokenizer().push)
        for token in ids:
            offsets.push(token)
        first = piece_bytes(self._text_model.table(skip_special=False), ids[0])
        return NamedLogprobs(
            packed.most,
            packed.entries,
            [first, *self._pieces(packed)],
            offsets.take(len(ids)),
        )

    def _echo(self) -> str:
        detokenizer = self._new_detokenizer()
        text = "".join(map(detokenizer.push, array("i", self._prompt)))
        return text + detokenizer.flush()

    def _new_detokenizer(self) -> Detokenizer:
        return new_detokenizer(self._text_model.table(self._params.skip_special_tokens))

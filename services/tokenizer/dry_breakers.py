"""The tokens that DRY's breakers stand for.

A breaker breaks every sequence that its text is in, so each token that holds it is one. A text that
no token holds whole breaks at the last token that it is encoded as.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.token_table import piece_bytes

_GAP = b"\xff"
"""Between tokens; in no text that is UTF-8."""
_KEPT = 256
"""Breakers whose tokens are kept; clients send the same ones again and again."""
_Ids = npt.NDArray[np.int32]


def breaker_tokens(text_model: TextModel, breakers: Sequence[str]) -> bytes:
    """Ids of all of them, ascending, int32."""
    vocabulary = _VOCABULARIES.get(text_model)
    if vocabulary is None:
        vocabulary = _VOCABULARIES[text_model] = _Pieces(text_model)
    found = [np.zeros(0, np.int32)]
    for breaker in dict.fromkeys(breakers):
        holding = vocabulary.holding(breaker)
        if not len(holding):
            ids = text_model.encode(breaker, add_special_tokens=False)
            holding = np.frombuffer(ids, "<i4")[-1:]
        found.append(holding)
    return np.unique(np.concatenate(found)).astype("<i4").tobytes()


class _Pieces:
    """The text of every token of a model, searched without a loop over tokens."""

    def __init__(self, text_model: TextModel) -> None:
        table = text_model.token_table
        pieces = [piece_bytes(table, token) for token in range(text_model.vocab_size)]
        self._text = np.frombuffer(_GAP.join(pieces) + _GAP, np.uint8)
        self._ends = np.cumsum([len(piece) + len(_GAP) for piece in pieces])
        self._kept: dict[str, _Ids] = {}

    def holding(self, breaker: str) -> _Ids:
        """Tokens whose text holds the breaker, ascending."""
        known = self._kept.get(breaker)
        if known is not None:
            return known
        wanted = breaker.encode()
        at = np.flatnonzero(self._text[: max(0, len(self._text) - len(wanted))] == wanted[0])
        for offset in range(1, len(wanted)):
            at = at[self._text[at + offset] == wanted[offset]]
        found = np.unique(np.searchsorted(self._ends, at, side="right")).astype(np.int32)
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        self._kept[breaker] = found
        return found


_VOCABULARIES: WeakKeyDictionary[TextModel, _Pieces] = WeakKeyDictionary()

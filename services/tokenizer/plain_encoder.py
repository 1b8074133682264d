"""Text to ids: as it is, or with control tokens at places that the caller points out."""

from __future__ import annotations

import secrets

from tokenizers import AddedToken, Tokenizer

from penstock.services.tokenizer.prompt_error import PromptError


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of a text. Other threads run on meanwhile: ``encode``, unlike this, keeps Python's
    lock for seconds where a text has megabytes, and takes five times as long for offsets."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def special_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    added = tokenizer.get_added_tokens_decoder()
    return {number: token for number, token in added.items() if token.special}


class PlainEncoder:
    """Encodes text whose control tokens are only those that the caller points out.

    A second tokenizer that takes control tokens in the text for plain text. The true ones are
    replaced by stand-ins that nobody can type (a random text, new in each process), so that all
    else (what begins the text, what surrounds a token) stays as in an ordinary encoding; then
    each stand-in's id is replaced by the id it stands for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._added = {added.content: added for added in special_tokens(tokenizer).values()}
        self._id_of = {added.content: number for number, added in special_tokens(tokenizer).items()}
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._control_ids = {n for text, n in self._id_of.items() if text != unknown}
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        nonce = secrets.token_hex(8)
        self._stand_ins = {
            (lstrip, rstrip): f"\U000f0000{nonce}{int(lstrip)}{int(rstrip)}\U000f0001"
            for lstrip in (False, True)
            for rstrip in (False, True)
        }
        self._tokenizer.add_tokens(
            [
                AddedToken(text, lstrip=lstrip, rstrip=rstrip, normalized=False, special=False)
                for (lstrip, rstrip), text in self._stand_ins.items()
            ]
        )
        self._stand_in_ids = {self._tokenizer.token_to_id(t) for t in self._stand_ins.values()}

    def encode(self, text: str, own: list[tuple[int, int]]) -> list[int]:
        """Ids of a text whose true control tokens are at ``own``. Raises ``PromptError``."""
        pieces: list[str] = []
        true_ids: list[int] = []
        done = 0
        for begin, end in own:
            token = text[begin:end]
            added = self._added[token]
            true_ids.append(self._id_of[token])
            pieces += (text[done:begin], self._stand_ins[added.lstrip, added.rstrip])
            done = end
        pieces.append(text[done:])
        ids = encode(self._tokenizer, "".join(pieces), add_special_tokens=False)
        following = iter(true_ids)
        out = []
        for number in ids:
            if number in self._stand_in_ids:
                out.append(next(following))
            elif number in self._control_ids:
                raise PromptError(
                    f"the messages contain {self._tokenizer.id_to_token(number)!r}, a control "
                    "token that this model's tokenizer cannot read as plain text; remove it",
                    "messages",
                )
            else:
                out.append(number)
        return out

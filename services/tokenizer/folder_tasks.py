"""The tasks that a model's folder decides on, as a tokenizer does them: ``embed``, ``score`` and
``classify``. Ahead of the engine the folder's prompts and the truncation of texts, behind it
normalization and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.protocol.model_info import ModelInfo
from penstock.protocol.pooling import Activation, Pooling
from penstock.protocol.tasks import EMBED, SCORE, Task
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    Pair,
    PoolingParams,
    Prompt,
    PromptText,
    Tokens,
    Work,
)
from penstock.protocol.wire.messages.tokens import Scores, Vector
from penstock.services.tokenizer.judged_pair import judged_prompt, templated_pair
from penstock.services.tokenizer.prompt_error import PromptError, window_exceeded
from penstock.services.tokenizer.text_model import LONG_TOKEN, TextModel

Floats: TypeAlias = npt.NDArray[np.float32]
TRUNCATED_LENGTHS = 8
"""A text that is to be truncated may be so many times as long as what the model takes."""
ANY_LENGTH = 2**31
NOTHING_ASKED = PoolingParams()
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""What a folder may call its prompt for each type of input; as sentence-transformers looks for
them."""


class EncodedPrompt(NamedTuple):
    ids: bytes
    """int32, little endian."""
    second: int = 0
    """Where the second text of a pair begins; 0: there is none, or the model makes no difference
    between them."""


class FolderTask:
    """A ``Task`` of a model's folder, as one request asks for it."""

    def __init__(self, name: str, pooling: Pooling, asked: PoolingParams) -> None:
        self.name = name
        self._asked = asked
        self._normalizes = pooling.normalizes if asked.normalize is None else asked.normalize
        self._activation: Activation = pooling.activations.get(name, "none")
        if asked.activation is False:
            self._activation = "none"
        self._is_judge = pooling.is_judge

    def pool(self, hidden: Floats) -> bytes:
        raise TypeError("a tokenizer pools nothing")

    def event(self, values: bytes) -> Vector | Scores:
        found = np.frombuffer(values, "<f4")
        if self.name == EMBED:
            return Vector(self._vector(found).astype("<f4").tobytes())
        scores = _activated(found.astype(np.float64), self._activation)
        if self.name == SCORE and self._is_judge:
            scores = _judged(found.astype(np.float64), self._activation)
        return Scores(scores.astype("<f4").tobytes())

    def _vector(self, found: Floats) -> Floats:
        if self._asked.dimensions is not None:
            found = found[: self._asked.dimensions]
        if not self._normalizes:
            return found
        exact = found.astype(np.float64)
        length = math.sqrt(exact @ exact)
        return found / np.float32(max(length, 1e-12))


def _activated(logits: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.float64]:
    if activation == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -700, 700))))
    if activation == "softmax":
        shares = np.exp(logits - logits.max())
        return np.asarray(shares / shares.sum())
    return logits


def _judged(logits: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.float64]:
    """Of the logits of "no" and "yes": the share of "yes", or by how much it is ahead."""
    if activation == "softmax":
        return _activated(logits, "softmax")[1:]
    return logits[1:] - logits[:1]


def _check_within(ids: bytes, longest: int) -> None:
    length = len(ids) // TOKEN_BYTES
    if length > longest:
        raise window_exceeded(
            f"the input is too long: it has {length} tokens; this model takes at most "
            f"{longest}: shorten it, or send truncate_prompt_tokens",
            "input",
        )


class FolderTasks:
    """What a tokenizer knows of its model's tasks."""

    def __init__(self, pooling: Pooling, info: ModelInfo) -> None:
        self.pooling = pooling
        self._size = _vector_size(pooling, info)

    def task(self, name: str, asked: PoolingParams | None) -> Task:
        return FolderTask(name, self.pooling, asked or NOTHING_ASKED)

    def longest(self, max_model_len: int) -> int:
        """Tokens of a prompt, at most: behind one that is computed in chunks, a token is drawn."""
        return max_model_len if self.pooling.encoder else max_model_len - 1

    def encode_all(
        self, prompts: Sequence[Prompt], work: Work, text_model: TextModel, max_model_len: int
    ) -> Iterator[EncodedPrompt]:
        """What ``encode`` makes of each, in their order. Texts that are neither long nor cut are
        encoded together, by several threads."""
        texts = [prompt for prompt in prompts if isinstance(prompt, PromptText)]
        kinds, longest = {text.add_special_tokens for text in texts}, self.longest(max_model_len)
        cut = work.params.truncate_prompt_tokens is not None
        if not 1 < len(texts) == len(prompts) or len(kinds) > 1 or cut or work.head.accepted:
            yield from (self.encode(one, work, text_model, max_model_len) for one in prompts)
            return
        asked = work.pooling or NOTHING_ASKED
        self._check_dimensions(asked, work.head.task)
        ahead = self._lower(self._prompt(asked))
        whole = [ahead + self._lower(text.text) for text in texts]
        if max(map(len, whole)) > LONG_TOKEN * max_model_len:
            yield from (self.encode(one, work, text_model, max_model_len) for one in prompts)
            return
        tokenizer, around = text_model.tokenizer, kinds.pop()
        for encoding in tokenizer.encode_batch_fast(whole, add_special_tokens=around):
            ids = np.asarray(encoding.ids, "<i4").tobytes()
            _check_within(ids, longest)
            yield EncodedPrompt(ids)

    def encode(
        self, prompt: Prompt, work: Work, text_model: TextModel, max_model_len: int
    ) -> EncodedPrompt:
        """The ids of ``prompt``, one of those of ``work``. Raises ``PromptError``, but for nothing
        that an engine had taken: which one can go on with that is the router's to know."""
        asked, task, accepted = work.pooling or NOTHING_ASKED, work.head.task, work.head.accepted
        if accepted and isinstance(prompt, Tokens):  # as they were encoded and cut then
            return EncodedPrompt(prompt.ids)
        keep, longest = work.params.truncate_prompt_tokens, self.longest(max_model_len)
        most = longest if keep is None else TRUNCATED_LENGTHS * max_model_len
        if accepted:
            most = ANY_LENGTH
        else:
            self._check_dimensions(asked, task)
        keep = None if keep is None else min(keep, longest)
        prompt = self._lowered(prompt)
        match prompt:
            case PromptText(text, add_special_tokens):
                text = self._lower(self._prompt(asked)) + text
                encoded = text_model.encode_cut(text, keep, most, add_special_tokens)
                found = EncodedPrompt(encoded)
            case Pair() if task == EMBED:
                raise PromptError("input: a vector is made of one text, not of a pair", "input")
            case Pair():
                longest_text = most
                if asked.document_tokens is not None:
                    longest_text = max(most, TRUNCATED_LENGTHS * max_model_len)
                found = self._pair(text_model, prompt, asked, keep, most, longest_text)
            case Tokens(ids):
                for name, value in (
                    ("prompt_name", asked.prompt_name),
                    ("input_type", asked.input_type),
                ):
                    if value:
                        raise PromptError(
                            f"{name} is {value!r}, but the input is token ids, ahead of which no "
                            "text can stand; send texts",
                            name,
                        )
                found = EncodedPrompt(ids if keep is None else ids[: TOKEN_BYTES * keep])
            case _:
                raise PromptError(f"the task {task!r} takes no chats", "messages")
        if not accepted:
            _check_within(found.ids, longest)
        return found

    def _pair(
        self,
        text_model: TextModel,
        pair: Pair,
        asked: PoolingParams,
        keep: int | None,
        most: int,
        longest_text: int,
    ) -> EncodedPrompt:
        """longest_text: tokens of the second text before it is cut, about. Raises
        ``PromptError``."""
        document = pair.other
        if self.pooling.is_judge:
            make = templated_pair if self.pooling.judge == "template" else judged_prompt
            asks = self._prompt(asked)
            if asked.document_tokens is not None:
                document = text_model.beginning(document, asked.document_tokens)
            return EncodedPrompt(make(text_model, asks, pair.text, document, keep, most))
        if asked.prompt_name:
            raise PromptError(
                f"prompt_name is {asked.prompt_name!r}, but this model takes pairs of texts "
                "without a prompt; leave it out",
                "prompt_name",
            )
        cut = asked.document_tokens
        return EncodedPrompt(
            *text_model.encode_pair(pair.text, document, keep, most, cut, longest_text)
        )

    def _lower(self, text: str) -> str:
        return text.lower() if self.pooling.lowers else text

    def _lowered(self, prompt: Prompt) -> Prompt:
        match prompt:
            case PromptText(text, add_special_tokens) if self.pooling.lowers:
                return PromptText(text.lower(), add_special_tokens)
            case Pair(text, other) if self.pooling.lowers:
                return Pair(text.lower(), other.lower())
        return prompt

    def _prompt(self, asked: PoolingParams) -> str:
        """What stands ahead of a text. Raises ``PromptError`` for a name that is none."""
        name, prompts = asked.prompt_name, self.pooling.prompts
        if name and name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise PromptError(
                f"prompt_name is {name!r}; this model's prompts are: {known}", "prompt_name"
            )
        if not name:
            likely = (one for one in _PROMPT_NAMES.get(asked.input_type, ()) if one in prompts)
            name = next(likely, self.pooling.default_prompt)
        return prompts.get(name, "")

    def _check_dimensions(self, asked: PoolingParams, task: str) -> None:
        dimensions, lengths = asked.dimensions, self.pooling.lengths
        if dimensions is None:
            return
        if self._size is not None and dimensions > self._size:
            raise PromptError(
                f"dimensions is {dimensions}; this model's vectors have {self._size}", "dimensions"
            )
        if dimensions == self._size or dimensions in lengths:
            return
        raise PromptError(
            f"dimensions is {dimensions}; "
            + (
                f"this model's vectors may be cut to {lengths}"
                if str(lengths)
                else "this model's folder does not say that its vectors may be cut; leave it out"
            )
            + ", or start the server with --allow-dimensions",
            "dimensions",
        )


def _vector_size(pooling: Pooling, info: ModelInfo) -> int | None:
    """Numbers of a vector, if the files tell."""
    if pooling.dense:
        return pooling.dense[-1].out_features
    sizes = (info.config.get(key) for key in ("hidden_size", "dim", "n_embd", "d_model"))
    return next((size for size in sizes if type(size) is int), None)

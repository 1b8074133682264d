"""From the prompts of a request to token ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    Chat,
    Inputs,
    Prompt,
    PromptText,
    Work,
    prompts_of,
)
from penstock.services.tokenizer.folder_tasks import TRUNCATED_LENGTHS, FolderTasks
from penstock.services.tokenizer.prompt_error import PromptError, window_exceeded
from penstock.services.tokenizer.text_model import TextModel

MAX_SHOWN = 40
"""Characters of a text that an error repeats."""


class EncodedPrompts(NamedTuple):
    """The prompts of a request."""

    ids: bytes
    """As in ``TokenWork.prompt``."""
    longest: int
    """Tokens."""
    shared: bytes
    """The ids that all of them begin with, where any may be cached."""
    lengths: list[int] = []
    """As in ``TokenWork``, and so are …"""
    seconds: list[int] = []


def check_vocabulary(ids: np.ndarray[Any, np.dtype[Any]], vocab_size: int, param: str) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise PromptError(
            f"token id {int(ids[outside.argmax()])} is outside the vocabulary: "
            f"this model's ids are 0 to {vocab_size - 1}",
            param,
        )


def prompt_ids(text_model: TextModel, work: Work, max_model_len: int) -> bytes:
    """The prompt's ids, without its beginning where the client wants so. Raises ``PromptError``."""
    if isinstance(work.prompt, Inputs):
        raise PromptError(f"the task {work.head.task!r} takes one prompt, not a batch", "prompt")
    keep, tools = work.params.truncate_prompt_tokens, shown_tools(work)
    if keep is None:
        return text_model.encode_prompt(work.prompt, max_model_len, tools)
    longest = TRUNCATED_LENGTHS * max_model_len
    return text_model.encode_prompt(work.prompt, longest, tools)[-TOKEN_BYTES * keep :]


def shown_tools(work: Work) -> bytes:
    """The tools that a chat template shows the model. Those that may not be called only lead into
    temptation."""
    output = work.output
    return output.tools if output is not None and output.mode != "none" else b""


def _nothing_to_compute(prompt: Prompt) -> str:
    """Why a prompt has no tokens."""
    if isinstance(prompt, PromptText) and prompt.text:
        return (
            f"prompt: this model's tokenizer knows no character of the text "
            f"{prompt.text[:MAX_SHOWN]!r}, so it has no tokens; send another text, or token ids"
        )
    if isinstance(prompt, Chat):
        return "messages: this model's chat template makes no text of them that has tokens"
    return "the prompt is empty; send at least one token"


def _check_prompt(
    prompt: Prompt,
    ids: bytes,
    vocab_size: int,
    max_model_len: int,
    param: str = "prompt",
    *,
    accepted: bool,
) -> int:
    """The length in tokens of the prompt's ``ids``. Raises ``PromptError``. What an engine had
    taken (``accepted``) is not too long: which one can go on with it, is the router's to know."""
    param = "messages" if isinstance(prompt, Chat) else param
    if len(ids) % TOKEN_BYTES:
        raise PromptError(f"the prompt's {len(ids)} bytes are no row of int32 token ids", param)
    length = len(ids) // TOKEN_BYTES
    if not length:
        raise PromptError(_nothing_to_compute(prompt), param)
    check_vocabulary(np.frombuffer(ids, dtype="<i4"), vocab_size, param)
    if length >= max_model_len and not accepted:
        raise window_exceeded(
            f"the prompt is too long: it has {length} tokens; the maximum context length is "
            f"{max_model_len} tokens for prompt and answer together, so a prompt may have at most "
            f"{max_model_len - 1} (--max-model-len)",
            param,
        )
    return length


def encode(
    work: Work, text_model: TextModel, info: ModelInfo, max_model_len: int
) -> EncodedPrompts:
    """The prompt that the choices share. Raises ``PromptError``."""
    ids, accepted = prompt_ids(text_model, work, max_model_len), work.head.accepted
    (prompt,), vocabulary = prompts_of(work), info.vocab_size
    length = _check_prompt(prompt, ids, vocabulary, max_model_len, accepted=accepted)
    return EncodedPrompts(ids, length, ids)


def encode_inputs(
    work: Work,
    text_model: TextModel,
    info: ModelInfo,
    max_model_len: int,
    folder_tasks: FolderTasks,
) -> EncodedPrompts:
    """The prompt of a task of the folder, or each choice's own. Raises ``PromptError``, of a batch
    with the choice."""
    prompts, is_batch = prompts_of(work), isinstance(work.prompt, Inputs)
    if is_batch and not len(prompts) == len(work.choices) > 0:
        raise PromptError(f"{len(prompts)} prompts came for {len(work.choices)} choices", "input")
    accepted, limit = work.head.accepted, max_model_len + 1  # it was checked exactly before
    ids, lengths, seconds = list[bytes](), list[int](), list[int]()
    encoded = folder_tasks.encode_all(prompts, work, text_model, max_model_len)
    for number, prompt in enumerate(prompts):
        try:
            found = next(encoded)
            checked = prompt, found.ids, info.vocab_size, limit, "input"
            lengths.append(_check_prompt(*checked, accepted=accepted))
        except PromptError as error:
            error.choice = work.choices[number].choice if is_batch else 0
            raise
        ids.append(found.ids)
        seconds.append(found.second)
    return EncodedPrompts(
        b"".join(ids),
        max(lengths),
        _shared_beginning(ids) if folder_tasks.pooling.is_cached else b"",
        lengths if is_batch else [],
        seconds if any(seconds) else [],
    )


def _shared_beginning(prompts: list[bytes]) -> bytes:
    """int32 ids that all of the prompts begin with."""
    first, last = min(prompts), max(prompts)  # what these share, all between them do
    length = min(len(first), len(last)) // TOKEN_BYTES
    apart = np.frombuffer(first, "<i4", length) != np.frombuffer(last, "<i4", length)
    shared = int(apart.argmax()) if apart.any() else length
    return first[: TOKEN_BYTES * shared]

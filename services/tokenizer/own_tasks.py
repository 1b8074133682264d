"""Tasks that a tokenizer does alone: a prompt becomes token ids, or token ids become text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.protocol.model_info import ModelInfo
from penstock.protocol.tasks import DETOKENIZE
from penstock.protocol.wire.messages.requests import TOKEN_BYTES, Work
from penstock.protocol.wire.messages.tokens import Event, Text, TokenIds
from penstock.services.tokenizer.detokenizer import new_detokenizer
from penstock.services.tokenizer.folder_tasks import TRUNCATED_LENGTHS
from penstock.services.tokenizer.prompt_encoding import check_vocabulary, prompt_ids
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.text_model import TextModel


class Answered(NamedTuple):
    """What has become of a request that no engine needs to hear of."""

    prompt: bytes
    """int32 token ids, little endian."""
    event: Event


def answer(work: Work, text_model: TextModel, info: ModelInfo, max_model_len: int) -> Answered:
    """Do the task of ``work``. A prompt may be longer than what the model takes: who counts wants
    to know by how much. Raises ``PromptError``."""
    prompt = prompt_ids(text_model, work, TRUNCATED_LENGTHS * max_model_len)
    if len(prompt) % TOKEN_BYTES:
        raise PromptError(f"the prompt's {len(prompt)} bytes are no row of int32 ids", "prompt")
    ids = np.frombuffer(prompt, dtype="<i4")
    check_vocabulary(ids, info.vocab_size, "prompt")
    if work.head.task != DETOKENIZE:
        return Answered(prompt, TokenIds(prompt))
    detokenizer = new_detokenizer(text_model.table(work.params.skip_special_tokens))
    pieces = [detokenizer.push(token) for token in ids.tolist()]
    return Answered(prompt, Text("".join((*pieces, detokenizer.flush()))))

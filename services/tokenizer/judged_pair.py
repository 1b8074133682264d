"""The prompt by which a language model judges whether a document answers a query, as Qwen3-Reranker
was trained with (its model card)."""

from __future__ import annotations

from penstock.protocol.wire.messages.requests import TOKEN_BYTES
from penstock.services.tokenizer.text_model import TextModel

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Unless the folder or the request has another one."""
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def judged_prompt(
    text_model: TextModel, instruction: str, query: str, document: str, keep: int | None, most: int
) -> bytes:
    """int32 ids. The three parts are encoded apart, and of the middle one the end is cut where all
    have more than ``keep`` tokens. Control tokens in query and document are plain text. Raises
    ``PromptError`` where they have far more than ``most``."""
    before, after = (text_model.encode(part, add_special_tokens=False) for part in (BEFORE, AFTER))
    middle = text_model.encode_plain(
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}", most
    )
    if keep is not None:
        middle = middle[: max(0, TOKEN_BYTES * keep - len(before) - len(after))]
    return before + middle + after

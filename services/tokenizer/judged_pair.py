"""The prompt by which a language model judges whether a document answers a query: as Qwen3-Reranker
was trained with (its model card), or as the chat template of the folder says."""

from __future__ import annotations

import msgspec

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
        f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}",
        most,
        cuts=keep is not None,
    )
    if keep is not None:
        middle = middle[: max(0, TOKEN_BYTES * keep - len(before) - len(after))]
    return before + middle + after


def templated_pair(
    text_model: TextModel, instruction: str, query: str, document: str, keep: int | None, most: int
) -> bytes:
    """int32 ids of what the chat template makes of messages of the roles ``query`` and
    ``document``, behind one of ``system`` where there is an instruction. Of the document the end is
    cut where all have more than ``keep`` tokens, then that of the query. Control tokens in any of
    them are plain text. Raises ``PromptError`` where they have far more than ``most``."""

    def rendered(asked: str, given: str) -> bytes:
        parts = (("system", instruction), ("query", asked), ("document", given))
        chat = [{"role": role, "content": text} for role, text in parts if text or role != "system"]
        return text_model.encode_chat(msgspec.json.encode(chat), b"{}", most)

    def without_end(end: int) -> bytes:
        return rendered(query, document[:end])

    def without_document(end: int) -> bytes:
        return rendered(query[:end], "")

    found = rendered(query, document)
    for cut, length in ((without_end, len(document)), (without_document, len(query))):
        if keep is None or len(found) <= TOKEN_BYTES * keep:
            break
        kept, gone = 0, length
        while gone - kept > 1:  # between them lies the place of the cut, in characters
            middle = (kept + gone) // 2
            if len(cut(middle)) <= TOKEN_BYTES * keep:
                kept = middle
            else:
                gone = middle
        found = cut(kept)
    return found

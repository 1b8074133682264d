"""The prompts of completions: text, or token ids that the model has and has room for."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.requests import Prompt, PromptText, Tokens
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.token_arrays import IdArray, check_vocabulary

MAX_PROMPTS = 128


def parse_prompts(
    value: str | list[Any] | IdArray, model: ServedModel, keep: int | None = None
) -> list[Prompt]:
    """``prompt`` of /v1/completions: text, token ids, or a list of either. keep: so many last ids
    of each (a tokenizer cuts what is text).

    Raises ``ApiError`` 400.
    """
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if isinstance(value, IdArray):
        return [_long_tokens(value, "prompt", model, keep)]
    if not value:
        raise _empty("prompt")
    if not isinstance(value[0], str | list | IdArray):
        return [_tokens(value, "prompt", model, keep)]
    if len(value) > MAX_PROMPTS:
        raise bad_request(
            f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed in one request",
            param="prompt",
        )
    prompts: list[Prompt] = []
    for index, one in enumerate(value):
        where = f"prompt[{index}]"
        if isinstance(one, str):
            prompts.append(_text(one, where))
        elif isinstance(one, list):
            prompts.append(_tokens(one, where, model, keep))
        elif isinstance(one, IdArray):
            prompts.append(_long_tokens(one, where, model, keep))
        else:
            raise bad_request(
                f"{where} is {show(one)} among prompts; text or an array of token ids is allowed",
                param="prompt",
            )
    return prompts


def _empty(where: str) -> ApiError:
    message = f"{where} is empty; there must be something to continue"
    return bad_request(message, param="prompt", code="empty_prompt")


def _text(text: str, where: str) -> PromptText:
    if not text:
        raise _empty(where)
    return PromptText(text)


def _tokens(ids: list[Any], where: str, model: ServedModel, keep: int | None) -> Tokens:
    if not ids:
        raise _empty(where)
    try:
        check_vocabulary(ids, where, model.vocab_size)
    except TypeError:
        index, wrong = next((i, one) for i, one in enumerate(ids) if type(one) is not int)
        raise bad_request(
            f"{where}[{index}] is {show(wrong)} among token ids; a whole number is allowed",
            param="prompt",
        ) from None
    if keep is not None:
        ids = ids[-keep:]
    if len(ids) > model.max_model_len:
        raise _too_long(where, str(len(ids)), model)
    return _packed(array("i", ids))


def _long_tokens(ids: IdArray, where: str, model: ServedModel, keep: int | None) -> Tokens:
    """As ``_tokens``, with the length first where all ids count."""
    if keep is None and ids.is_longer_than(model.max_model_len):
        raise _too_long(where, f"more than {model.max_model_len}", model)
    checked = ids.decode(where, model.vocab_size)
    if keep is not None and len(checked := checked[-keep:]) > model.max_model_len:
        raise _too_long(where, str(len(checked)), model)
    return _packed(checked)


def _too_long(where: str, tokens: str, model: ServedModel) -> ApiError:
    return bad_request(
        f"{where} has {tokens} tokens; prompt and output together may have "
        f"{model.max_model_len} (--max-model-len)",
        param="prompt",
        code="context_length_exceeded",
    )


def _packed(packed: array[int]) -> Tokens:
    if sys.byteorder == "big":
        packed.byteswap()
    return Tokens(packed.tobytes())

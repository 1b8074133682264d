"""The prompts of completions: text, or token ids that the model has and has room for."""

from __future__ import annotations

import sys
from array import array
from typing import Any, NamedTuple

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.requests import Prompt, PromptText, Tokens
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.token_arrays import IdArray, check_vocabulary

MAX_PROMPTS = 128
_BOTH = " for prompt and answer together"


class PromptField(NamedTuple):
    """A field that holds prompts."""

    name: str
    most: int
    """Prompts, at most."""
    longest: int
    """Tokens of one, at most."""
    why: str
    """What an error says ahead of that number."""
    add_special_tokens: bool = True
    """Around texts."""


def parse_prompts(
    value: str | list[Any] | IdArray,
    model: ServedModel,
    keep: int | None = None,
    field: PromptField | None = None,
) -> list[Prompt]:
    """``prompt`` of /v1/completions, or another field: text, token ids, or a list of either. keep:
    so many last ids of each (a tokenizer cuts what is text).

    Raises ``ApiError`` 400.
    """
    if field is None:
        field = PromptField("prompt", MAX_PROMPTS, model.max_model_len, _why(model))
    name = field.name
    if isinstance(value, str):
        return [_text(value, name, field)]
    if isinstance(value, IdArray):
        return [_long_tokens(value, name, model, keep, field)]
    if not value:
        raise _empty(name, field)
    if not isinstance(value[0], str | list | IdArray):
        return [_tokens(value, name, model, keep, field)]
    if len(value) > field.most:
        raise bad_request(
            f"{name} holds {len(value)} {name}s; at most {field.most} are allowed in one request",
            param=name,
        )
    prompts: list[Prompt] = []
    for index, one in enumerate(value):
        where = f"{name}[{index}]"
        if isinstance(one, str):
            prompts.append(_text(one, where, field))
        elif isinstance(one, list):
            prompts.append(_tokens(one, where, model, keep, field))
        elif isinstance(one, IdArray):
            prompts.append(_long_tokens(one, where, model, keep, field))
        else:
            raise bad_request(
                f"{where} is {show(one)} among {name}s; text or an array of token ids is allowed",
                param=name,
            )
    return prompts


def _why(model: ServedModel) -> str:
    """What is said ahead of the most tokens that a model takes."""
    virtual = sum(one.virtual_tokens for one in model.adapters) if model.parent else 0
    ahead = f"beside the {virtual} virtual tokens of the adapter " if virtual else ""
    return f"{ahead}the maximum context length is"


def _empty(where: str, field: PromptField) -> ApiError:
    wanted = "something to continue" if field.name == "prompt" else "at least one token"
    message = f"{where} is empty; there must be {wanted}"
    return bad_request(message, param=field.name, code="empty_prompt")


def _text(text: str, where: str, field: PromptField) -> PromptText:
    if not text:
        raise _empty(where, field)
    return PromptText(text, field.add_special_tokens)


def _tokens(
    ids: list[Any], where: str, model: ServedModel, keep: int | None, field: PromptField
) -> Tokens:
    if not ids:
        raise _empty(where, field)
    if keep is None and len(ids) > field.longest:
        raise _too_long(where, str(len(ids)), field)
    try:
        check_vocabulary(ids, where, model.vocab_size, param=field.name)
    except TypeError:
        index, wrong = next((i, one) for i, one in enumerate(ids) if type(one) is not int)
        raise bad_request(
            f"{where}[{index}] is {show(wrong)} among token ids; a whole number is allowed",
            param=field.name,
        ) from None
    if keep is not None:
        ids = ids[-keep:]
    if len(ids) > field.longest:
        raise _too_long(where, str(len(ids)), field)
    return _packed(array("i", ids))


def _long_tokens(
    ids: IdArray, where: str, model: ServedModel, keep: int | None, field: PromptField
) -> Tokens:
    """As ``_tokens``, with the length first where all ids count."""
    if keep is None and ids.is_longer_than(field.longest):
        raise _too_long(where, f"more than {field.longest}", field)
    checked = ids.decode(where, model.vocab_size, field.name)
    if keep is not None and len(checked := checked[-keep:]) > field.longest:
        raise _too_long(where, str(len(checked)), field)
    return _packed(checked)


def _too_long(where: str, tokens: str, field: PromptField) -> ApiError:
    if field.name == "prompt":
        found = f"the prompt is too long: {where} has {tokens} tokens"
        end = f"{_BOTH} (--max-model-len)"
    else:
        found = f"{where} is too long: it has {tokens} tokens"
        end = ": shorten it, or send truncate_prompt_tokens"
    return bad_request(
        f"{found}; {field.why} {field.longest} tokens{end}",
        param=field.name,
        code="context_length_exceeded",
    )


def _packed(packed: array[int]) -> Tokens:
    if sys.byteorder == "big":
        packed.byteswap()
    return Tokens(packed.tobytes())

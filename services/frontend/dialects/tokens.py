"""/tokenize and /detokenize: a tokenizer answers, and no engine hears of it."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import encode_messages
from penstock.client.meters import Usage
from penstock.client.tokens import ids_of
from penstock.client.tools import output_format
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.tasks import DETOKENIZE, TOKENIZE
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import (
    Chat,
    OutputFormat,
    Prompt,
    PromptText,
    Tokens,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.bodies.tokens import (
    DetokenizeBody,
    TokenizeBody,
    TokenList,
    TokenText,
)
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.chat_request import end_of_prompt
from penstock.services.frontend.dialects.interface import Unstreamed
from penstock.services.frontend.errors import ApiError, from_invalid
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest, find_model
from penstock.services.frontend.token_arrays import check_vocabulary


class TokensRequest(GenerateRequest, frozen=True):
    """A request for a task of the tokenizer."""

    max_model_len: int = 0


def token_request(
    model: ServedModel,
    name: str,
    task: str,
    prompt: Prompt,
    params: SamplingParams | None = None,
    output: OutputFormat | None = None,
) -> TokensRequest:
    return TokensRequest(
        model=name,
        served=model.name,
        prompts=[prompt],
        params=params or SamplingParams(),
        task=task,
        output=output,
        max_model_len=model.max_model_len,
    )


class TokenizeDialect:
    name = "tokenize"
    routes: tuple[str, ...] = ("/tokenize",)
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            TokenList,
            TokenizeBody,
            summary="The token ids of a text or a chat",
            group="Tokens",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        return tokenize_request(decode_body(raw, TokenizeBody, pause or no_pause), models)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> TokenLister:
        return TokenLister(getattr(request, "max_model_len", 0))

    def error(self, error: ApiError) -> bytes:
        return error.body()


def tokenize_request(body: TokenizeBody, models: list[ServedModel]) -> TokensRequest:
    """Raises ``ApiError``."""
    model, name = find_model(body.model, models)
    if body.prompt is not None:
        prompt = PromptText(body.prompt, body.add_special_tokens is not False)
        return token_request(model, name, TOKENIZE, prompt)
    try:
        output = output_format([tool.function for tool in body.tools or ()])
        chat = _chat(body)
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
    return token_request(model, name, TOKENIZE, chat, output=output)


def _chat(body: TokenizeBody) -> Chat:
    """Raises ``InvalidValue`` and ``ApiError``."""
    given = body.chat_template_kwargs
    variables: dict[str, Any] = {} if given is None else msgspec.to_builtins(given)
    variables |= end_of_prompt(body.add_generation_prompt, body.continue_final_message)
    return Chat(encode_messages(body.messages or []), msgspec.json.encode(variables))


class TokenLister(Unstreamed):
    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        ids = ids_of(answers[0])
        return encode(TokenList(count=len(ids), max_model_len=self._max_model_len, tokens=ids))


class DetokenizeDialect:
    name = "detokenize"
    routes: tuple[str, ...] = ("/detokenize",)
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            TokenText,
            DetokenizeBody,
            summary="The text of token ids",
            group="Tokens",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, DetokenizeBody, pause or no_pause)
        model, name = find_model(body.model, models)
        check_vocabulary(body.tokens, "tokens", model.vocab_size, param="tokens")
        ids = array("i", body.tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        params = SamplingParams(skip_special_tokens=False)
        return token_request(model, name, DETOKENIZE, Tokens(ids.tobytes()), params)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> TextOfTokens:
        return TextOfTokens()

    def error(self, error: ApiError) -> bytes:
        return error.body()


class TextOfTokens(Unstreamed):
    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return encode(TokenText(prompt=answers[0].text))

"""/api/v1/generate and its stream: plain prompts with KoboldAI's samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client.answers import FINISH_REASONS, Answer, FinishReason
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.protocol.grammar.request import of_text
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import PromptText
from penstock.services.frontend.bodies.kobold import (
    SAMPLING,
    KoboldBody,
    KoboldError,
    KoboldFault,
    KoboldResults,
    KoboldText,
    KoboldToken,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.bodies.sampling_fields import sampling_values
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.interface import KEEP_ALIVE
from penstock.services.frontend.errors import ApiError, bad_request, from_invalid
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parameters import checked, wrong
from penstock.services.frontend.parse import GenerateRequest, find_model

DEFAULT_LENGTH = 256
"""``max_length`` where it is left out, or half of the context where that is less."""
_PLACEHOLDER = "{{["


def model_of(name: str | None, models: list[ServedModel]) -> tuple[ServedModel, str]:
    """The model of that name; without one the first, since these clients know of one model."""
    return find_model(models[0].name if name is None and models else name, models)


def default_length(model: ServedModel) -> int:
    return min(DEFAULT_LENGTH, max(1, model.max_model_len // 2))


class KoboldDialect:
    """Whole answers."""

    name = "kobold"
    routes: tuple[str, ...] = ("/api/v1/generate",)
    bodies: tuple[RouteBodies, ...] = (
        RouteBodies(
            "POST",
            routes[0],
            KoboldResults,
            KoboldBody,
            fails=KoboldError,
            summary="Continue a prompt",
            group="KoboldAI",
        ),
    )
    streams = False

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, KoboldBody, pause or no_pause)
        model, name = model_of(body.model, models)
        if body.replace_instruct_placeholders and _PLACEHOLDER in body.prompt:
            raise bad_request(
                "replace_instruct_placeholders is true and the prompt has placeholders, which are "
                "not replaced here; send the prompt with the model's own tags",
                param="replace_instruct_placeholders",
            )
        params = _params(body, model)
        if self.streams and params.n != 1:
            raise wrong("n", params.n, "a stream has one answer")
        return GenerateRequest(
            model=name,
            served=model.name,
            prompts=[PromptText(body.prompt)],
            params=params,
            stream=self.streams,
            fits_window=True,
            handle=body.genkey or "",
        )

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> KoboldRenderer:
        return KoboldRenderer(request)

    def error(self, error: ApiError) -> bytes:
        return error_body(error)


class KoboldStreamDialect(KoboldDialect):
    """The same body, answered token by token."""

    name = "kobold-stream"
    routes: tuple[str, ...] = ("/api/extra/generate/stream",)
    bodies: tuple[RouteBodies, ...] = (
        RouteBodies(
            "POST",
            routes[0],
            None,
            KoboldBody,
            KoboldToken,
            KoboldError,
            summary="Continue a prompt, token by token",
            group="KoboldAI",
        ),
    )
    streams = True


def _params(body: KoboldBody, model: ServedModel) -> SamplingParams:
    """Raises ``ApiError`` 400."""
    given: dict[str, Any] = sampling_values(body, SAMPLING)
    if given.get("seed", 0) < 0:  # one is drawn
        del given["seed"]
    _add_dynamic_temperature(given, body.dynatemp_range)
    context = min(body.max_context_length or model.max_model_len, model.max_model_len)
    length = body.max_length or min(default_length(model), max(1, context // 2))
    if length >= context:
        raise wrong("max_length", length, f"less than the context, {context} tokens, is allowed")
    stop = list(body.stop_sequence or ())
    if body.singleline:
        stop.append("\n")
    if body.grammar:
        try:
            given["structured_outputs"] = of_text(body.grammar, "grammar")
        except InvalidValue as invalid:
            raise from_invalid(invalid) from None
    params = SamplingParams(
        **given,
        max_tokens=length,
        truncate_prompt_tokens=context - length,
        stop=stop,
        include_stop_str_in_output=body.trim_stop is False,
        ignore_eos=bool(body.bypass_eos),
        skip_special_tokens=not body.render_special,
    )
    return checked(params, model)


def _add_dynamic_temperature(given: dict[str, Any], range_: float | None) -> None:
    """``dynatemp_range`` as the two temperatures that it stands for. Raises ``ApiError`` 400."""
    if not range_:
        return
    if "temperature" not in given:
        raise wrong("dynatemp_range", range_, "it is allowed only together with temperature")
    middle = given["temperature"]
    given["dynatemp_min"] = max(0.0, middle - range_)
    given["dynatemp_max"] = min(100.0, middle + range_)


class KoboldRenderer:
    """The bytes of one answer. A request that was aborted ends with what there is."""

    keep_alive = KEEP_ALIVE

    def __init__(self, request: GenerateRequest) -> None:
        self.direct = not request.handle
        """A client that named its request may ask for the text so far, which is kept then."""
        self.said: list[str] = []
        """What has gone out of a stream."""
        self.reason: FinishReason = "stop"

    def choice(self, index: int, usage: Usage) -> KoboldFrames:
        return KoboldFrames(self)

    def last(self, usage: Usage) -> bytes:
        return _event(KoboldToken(token="", finish_reason=self.reason))

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %s\n\n" % error_body(error)

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        reasons = [
            None if answer.end is None else FINISH_REASONS[answer.end.reason] for answer in answers
        ]
        texts = [
            KoboldText(
                text=answer.text,
                finish_reason=reason,
                prompt_tokens=usage.prompt,
                completion_tokens=answer.tokens,
            )
            for answer, reason in zip(answers, reasons, strict=True)
        ]
        return encode(KoboldResults(results=texts))


class KoboldFrames:
    """The events of the answer, but for the last one."""

    __slots__ = ("_renderer", "later", "prefix", "suffix")

    def __init__(self, renderer: KoboldRenderer) -> None:
        self._renderer = renderer
        self.prefix = self.later = b'event: message\ndata: {"token":'
        self.suffix = b',"finish_reason":null}\n\n'

    def render(self, answer: Answer) -> bytes:
        renderer, text = self._renderer, answer.text
        if answer.end is not None:
            renderer.reason = FINISH_REASONS[answer.end.reason]
        if not text:
            return b""
        if not renderer.direct:
            renderer.said.append(text)
        return self.prefix + encode(text) + self.suffix


def _event(token: KoboldToken) -> bytes:
    return b"event: message\ndata: %s\n\n" % encode(token)


def error_body(error: ApiError) -> bytes:
    kind = "service_unavailable" if error.status == 503 else error.kind
    return encode(KoboldError(detail=KoboldFault(msg=error.message, type=kind)))

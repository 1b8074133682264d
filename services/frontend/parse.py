"""A body of one of the generating endpoints, checked whole."""

from __future__ import annotations

import hashlib

import msgspec

from penstock.client.interface import ServedModel
from penstock.client.messages import encode_messages
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.shown_values import show
from penstock.protocol.suggestions import closest
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import (
    Chat,
    ChoiceState,
    Prompt,
    RequestHead,
    Work,
    kind_of,
)
from penstock.services.frontend.bodies.requests import ChatBody, CompletionBody
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.errors import ApiError, bad_request, from_invalid, retry_after
from penstock.services.frontend.parameters import StreamOptions, sampling_of, stream_options
from penstock.services.frontend.prompts import parse_prompts
from penstock.services.frontend.token_arrays import decode_completion

MAX_CHOICES_IN_ALL = 256


class Caller(msgspec.Struct, frozen=True):
    """What is known of a request beside its body."""

    request_id: str = ""
    tenant: str = ""
    """Of the API key; empty where no keys are configured."""
    trace: str = ""
    """W3C ``traceparent``; empty where there is none."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """What a client asked for. Choice ``prompt * n + choice`` of the answer is ``choice`` of
    the gateway request for ``prompt``."""

    chat: bool
    model: str
    """The name that the client used."""
    served: str
    """The first name of the model that is served under it."""
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    options: StreamOptions
    user: str
    priority: int
    cache_salt: str
    lists_prompt: bool = False
    """``prompt_logprobs`` were asked for by name, not by ``echo``."""
    deadline_s: float | None = None
    """Seconds in which the client wants the whole answer; ``None``: the server's own limit."""

    def work(self, prompt: int, caller: Caller, *, time_left: float, age: float) -> Work:
        """The gateway request for one of the prompts."""
        head = RequestHead(
            request_id=caller.request_id,
            model=self.served,
            prompt_kind=kind_of(self.prompts[prompt]),
            tenant=caller.tenant or self.user,
            priority=self.priority,
            cache_salt=_salt(caller.tenant, self.cache_salt),
            time_left=time_left,
            age=age,
            trace=caller.trace,
            streamed=self.stream,
            siblings=len(self.prompts) * self.params.n,
        )
        choices = [ChoiceState(choice) for choice in range(self.params.n)]
        return Work(head, self.prompts[prompt], self.params, choices)


def _salt(key: str, given: str) -> str:
    """Callers with different API keys share no cached prefix: its speed would tell one of them
    what another has asked."""
    if not key:
        return given
    return hashlib.blake2b(f"{key}\0{given}".encode(), digest_size=16).hexdigest()


def find_model(name: str | None, models: list[ServedModel]) -> tuple[ServedModel, str]:
    """The model of that name and the name to answer with; None asks for the served one.

    Raises ``ApiError``: 400, 404, and 503 while no model is known.
    """
    if not models:
        raise ApiError(
            503,
            "No engine is ready yet (/ready tells what the server is doing); try again",
            kind="overloaded_error",
            headers=retry_after(1.0),
        )
    if name is None:
        return models[0], models[0].name
    for model in models:
        if name == model.name or name in model.aliases:
            return model, name
    names = [one for model in models for one in (model.name, *model.aliases)[:8]]
    likely = closest(name, names)
    meant = f"; did you mean {show(likely)}?" if likely and len(names) > 1 else ""
    served = ", ".join(map(show, names))
    raise ApiError(
        404,
        f"The model {show(name)} does not exist; served here: {served}{meant}",
        param="model",
        code="model_not_found",
    )


def parse_request(
    raw: bytes, models: list[ServedModel], *, chat: bool, pause: Pause | None = None
) -> GenerateRequest:
    """Check a body. Raises ``ApiError`` that names the parameter, its value and the limit.

    pause: for a large body, parsed in a thread; called every now and then to let others run.
    """
    body: ChatBody | CompletionBody
    if chat:
        body = decode_body(raw, ChatBody, pause or no_pause)
    elif pause is None:
        body = decode_body(raw, CompletionBody)
    else:
        body = decode_completion(raw, pause)
    model, name = find_model(body.model, models)
    params = sampling_of(body, model)
    lists_prompt = params.prompt_logprobs is not None
    if lists_prompt and body.stream:
        raise bad_request(
            "prompt_logprobs are not sent in a stream; send stream: false, or echo and logprobs to "
            "/v1/completions",
            param="prompt_logprobs",
        )
    if params.echo and params.logprobs is not None and not lists_prompt:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
    prompts: list[Prompt]
    if isinstance(body, ChatBody):
        prompts = [_chat(body)]
    else:
        prompts = parse_prompts(body.prompt, model, params.truncate_prompt_tokens)
    if len(prompts) * params.n > MAX_CHOICES_IN_ALL:
        raise bad_request(
            f"n is {params.n}, which with {len(prompts)} prompts makes {len(prompts) * params.n} "
            f"choices; at most {MAX_CHOICES_IN_ALL} are allowed in one request",
            param="n",
        )
    return GenerateRequest(
        chat=chat,
        model=name,
        served=model.name,
        prompts=prompts,
        params=params,
        stream=bool(body.stream),
        options=stream_options(body),
        user=body.user or "",
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        lists_prompt=lists_prompt,
        deadline_s=body.deadline_s,
    )


_NO_VARIABLES = b"{}"


def _chat(body: ChatBody) -> Chat:
    """The messages and the template's variables. Raises ``ApiError`` 400."""
    try:
        messages = encode_messages(body.messages)
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
    variables = body.chat_template_kwargs
    encoded = _NO_VARIABLES if variables is None else msgspec.json.encode(variables)
    adds, continues = body.add_generation_prompt, body.continue_final_message
    if adds and continues:
        raise bad_request(
            "continue_final_message and add_generation_prompt contradict each other: the answer "
            "either continues the last message or begins a new one; send one of them as false",
            param="continue_final_message",
        )
    if continues or adds is False:  # the prompt does not end with the opening of a new message
        end = {"add_generation_prompt": False}
        if continues:
            end["continue_final_message"] = True
        encoded = msgspec.json.encode({**msgspec.json.decode(encoded), **end})
    return Chat(messages, encoded)

"""A body of one of the generating endpoints, checked whole."""

from __future__ import annotations

import hashlib

import msgspec

from penstock.client.interface import ServedModel
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.suggestions import closest
from penstock.protocol.wire.messages.requests import ChoiceState, Prompt, Work
from penstock.services.frontend import parameters
from penstock.services.frontend.body import Pause, decode_object, no_pause
from penstock.services.frontend.errors import ApiError, bad_request, retry_after, show
from penstock.services.frontend.prompts import (
    GENERATION_PROMPT_FIELDS,
    parse_chat,
    parse_prompts,
)
from penstock.services.frontend.token_arrays import decode_completion

MAX_CHOICES_IN_ALL = 256

_CHAT_FIELDS = frozenset(
    {"messages", "chat_template_kwargs", "top_logprobs", *GENERATION_PROMPT_FIELDS}
)
_COMPLETION_FIELDS = frozenset({"prompt", "echo"})


class GenerateRequest(msgspec.Struct, frozen=True):
    """What a client asked for. Choice ``prompt * n + choice`` of the answer is ``choice`` of
    the gateway request for ``prompt``."""

    chat: bool
    model: str
    """The name that the client used."""
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    options: parameters.StreamOptions
    user: str
    priority: int
    cache_salt: str
    lists_prompt: bool = False
    """``prompt_logprobs`` were asked for by name, not by ``echo``."""
    deadline_s: float | None = None
    """Seconds in which the client wants the whole answer; ``None``: the server's own limit."""

    def work(self, prompt: int, *, tenant: str, time_left: float, age: float) -> Work:
        """The gateway request for one of the prompts."""
        return Work(
            prompt=self.prompts[prompt],
            params=self.params,
            choices=[ChoiceState(choice) for choice in range(self.params.n)],
            tenant=tenant or self.user,
            time_left=time_left,
            age=age,
            priority=self.priority,
            cache_salt=_salt(tenant, self.cache_salt),
            streamed=self.stream,
            siblings=len(self.prompts) * self.params.n,
        )


def _salt(key: str, given: str) -> str:
    """Callers with different API keys share no cached prefix: its speed would tell one of them
    what another has asked."""
    if not key:
        return given
    return hashlib.blake2b(f"{key}\0{given}".encode(), digest_size=16).hexdigest()


def find_model(name: object, models: list[ServedModel]) -> tuple[ServedModel, str]:
    """The model of that name and the name to answer with; None asks for the served one.

    Raises ``ApiError``: 400, 404, and 503 while no model is known.
    """
    if name is not None and not isinstance(name, str):
        raise parameters.invalid("model", "Expected a string", name)
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
    if pause is None or chat:
        body = decode_object(raw, pause or no_pause)
    else:
        body = decode_completion(raw, pause)
    parameters.check_names(
        body,
        _CHAT_FIELDS if chat else _COMPLETION_FIELDS,
        parameters.CHAT_NEUTRAL if chat else parameters.COMPLETION_NEUTRAL,
    )
    model, name = find_model(body.get("model"), models)
    stream, options = parameters.take_stream(body)
    default_tokens = None if chat else parameters.DEFAULT_COMPLETION_TOKENS
    params = parameters.take_sampling(body, model.vocab_size, default_tokens, chat=chat)
    lists_prompt = params.prompt_logprobs is not None
    if lists_prompt and stream:
        raise bad_request(
            "prompt_logprobs: Not in a stream; send stream: false, or echo and logprobs to "
            "/v1/completions",
            param="prompt_logprobs",
        )
    if params.echo and params.logprobs is not None and not lists_prompt:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
    prompts: list[Prompt]
    if chat:
        prompts = [parse_chat(body)]
    elif "prompt" in body:
        prompts = parse_prompts(body["prompt"], model, params.truncate_prompt_tokens)
    else:
        raise bad_request("prompt: Required, and missing", param="prompt")
    if len(prompts) * params.n > MAX_CHOICES_IN_ALL:
        raise bad_request(
            f"n: {len(prompts)} prompts with n = {params.n} make {len(prompts) * params.n} "
            f"choices; at most {MAX_CHOICES_IN_ALL} in one request",
            param="n",
        )
    return GenerateRequest(
        chat=chat,
        model=name,
        prompts=prompts,
        params=params,
        stream=stream,
        options=options,
        user=parameters.take_user(body),
        priority=parameters.take_priority(body),
        cache_salt=parameters.take_cache_salt(body),
        lists_prompt=lists_prompt,
        deadline_s=parameters.take_deadline(body),
    )

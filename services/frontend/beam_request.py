"""What a body asks for with ``use_beam_search``."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.client.beam_search import MAX_BEAM_WIDTH, BeamSearchParams
from penstock.client.gateway_interface import ServedModel
from penstock.protocol.sampling import PARAMETERS, SamplingParams
from penstock.protocol.shown_values import show
from penstock.services.frontend.bodies.requests import ChatBody, CompletionBody, GenerationBody
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.parameters import wrong
from penstock.services.frontend.parse import GenerateRequest, check_choices

MAX_BEAM_TOKENS = 16_384
"""Tokens that a search may ask for: prompts × width × max_tokens. Each is a request of its own."""
_TAKEN = frozenset(
    {
        "n", "max_tokens", "seed", "ignore_eos", "truncate_prompt_tokens", "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,),
}  # fmt: skip
_BY_BODY = ("tools", "thinking_token_budget")


def with_beams(
    request: GenerateRequest, body: GenerationBody, model: ServedModel
) -> GenerateRequest:
    """The request, with the search that its body asks for, if it does. Raises ``ApiError`` 400."""
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if (value := getattr(body, name)) not in (None, neutral):
                raise wrong(name, value, "it is allowed only together with use_beam_search: true")
        return request
    params = request.params
    if request.stream:
        raise bad_request(
            "use_beam_search is true, but which answers are the likeliest is known when all have "
            "ended; send stream: false",
            param="stream",
        )
    _check(params, body)
    if request.cache is not None:
        raise bad_request(
            "cache_control does not go together with use_beam_search: a search sends its beams as "
            "prompts of their own; leave cache_control out",
            param="cache_control",
        )
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    name, width = ("n", params.n) if best_of is None else ("best_of", best_of)
    if width < params.n:
        raise wrong("best_of", width, f"at least n, {params.n}, is allowed")
    if width > MAX_BEAM_WIDTH:
        raise wrong(name, width, f"at most {MAX_BEAM_WIDTH} beams are allowed")
    check_choices(len(request.prompts), width, name)
    most = params.max_tokens
    if not most:
        raise wrong("max_tokens", most, "with use_beam_search it must be at least 1")
    if (asked := len(request.prompts) * width * most) > MAX_BEAM_TOKENS:
        raise bad_request(
            f"max_tokens is {most}, which for {len(request.prompts)} prompts with {width} beams "
            f"each makes {asked} tokens; at most {MAX_BEAM_TOKENS} are allowed in one beam search",
            param="max_tokens",
        )
    beams = BeamSearchParams(
        beam_width=width,
        max_tokens=most,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
        ignore_eos=params.ignore_eos,
    )
    return msgspec.structs.replace(request, beams=beams, ends=model.ends, output=None)


def _check(params: SamplingParams, body: GenerationBody) -> None:
    """Nothing may be asked for that a search would leave undone. Raises ``ApiError`` 400."""
    for name, declared in PARAMETERS.items():
        value = getattr(params, name)
        if name in _TAKEN or value == declared.default or value in _NEUTRAL.get(name, ()):
            continue
        raise _refused(name, value)
    if not isinstance(body, ChatBody):
        return
    for name in _BY_BODY:
        if (value := getattr(body, name)) not in (None, []):
            raise _refused(name, value)
    if body.include_reasoning is False:
        raise bad_request(
            "include_reasoning is false, which does not go together with use_beam_search: an "
            "answer is then its whole text, thinking included; leave include_reasoning out",
            param="include_reasoning",
        )


def _refused(name: str, value: object) -> Exception:
    return bad_request(
        f"{name} is {show(value)}, which does not go together with use_beam_search: a search draws "
        f"nothing and ranks answers by the model's own probabilities; leave {name} out",
        param=name,
    )

"""Sampling parameters, declared once.

``SamplingParams`` is at once the message field, the library's class and the source of the API's
checks, JSON schema and documentation: ``parse_field`` reads one value of a client's JSON, and
``PARAMETERS`` lists name, type, default and description.

A field that is ``None`` was left out by the client; the tokenizer fills it from the model's
generation config, then from ``DEFAULTS`` (``resolve``).
"""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_STOP_TOKENS = 64
MAX_TOKENS = 2**31 - 1
GREEDY_TEMPERATURE = 1e-5
"""Below it the highest logit wins and no random number is drawn."""

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """How the next token is chosen and when to stop.

    Append new fields at the end only: the order is the wire layout.
    """

    temperature: (
        Annotated[
            float,
            Meta(ge=0.0, le=100.0, description="Divides the logits; 0 takes the likeliest token."),
        ]
        | None
    ) = None
    top_p: (
        Annotated[
            float,
            Meta(ge=0.0, le=1.0, description="Keep the likeliest tokens up to this probability."),
        ]
        | None
    ) = None
    top_k: (
        Annotated[
            int,
            Meta(ge=-1, le=MAX_TOKENS, description="Keep this many likeliest tokens; 0, -1: all."),
        ]
        | None
    ) = None
    seed: (
        Annotated[
            int, Meta(ge=-(2**63), le=2**63 - 1, description="The same seed draws the same tokens.")
        ]
        | None
    ) = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="How many choices to generate.")] = 1
    max_tokens: (
        Annotated[int, Meta(ge=1, le=MAX_TOKENS, description="Generate at most this many tokens.")]
        | None
    ) = None
    stop: Annotated[
        list[StopString],
        Meta(max_length=MAX_STOP_STRINGS, description="Stop before any of these strings."),
    ] = []
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(max_length=MAX_STOP_TOKENS, description="Stop at any of these tokens."),
    ] = []
    ignore_eos: Annotated[
        bool, Meta(description="Go on after the model's end token; for measurements.")
    ] = False


DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""Used where neither the client nor the model's generation config says anything."""


class Parameter(msgspec.Struct, frozen=True):
    """One field of ``SamplingParams``, for documentation and schemas."""

    name: str
    type: Any
    default: Any
    description: str


def _description(hint: Any) -> str:
    """The first description in a type, at whatever depth."""
    for part in (hint, *get_args(hint)):
        if isinstance(part, Meta) and part.description:
            return part.description
        if part is not hint and (found := _description(part)):
            return found
    return ""


def _parameters() -> dict[str, Parameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(SamplingParams):
        hint = hints[field.name]
        default = field.default if field.default_factory is msgspec.NODEFAULT else []
        found[field.name] = Parameter(field.name, hint, default, _description(hint))
    return found


PARAMETERS: dict[str, Parameter] = _parameters()


def parse_field(name: str, value: Any) -> Any:
    """Check one value of a client's JSON against its declaration.

    Raises ``msgspec.ValidationError`` that names the bound. ``stop`` may be one string.
    """
    if name == "stop" and isinstance(value, str):
        value = [value]
    elif name == "stop" and not isinstance(value, list):
        raise msgspec.ValidationError(
            f"Expected a string or an array of at most {MAX_STOP_STRINGS} strings"
        )
    if isinstance(value, bool) and name != "ignore_eos":
        raise msgspec.ValidationError(f"Expected a number, got `{str(value).lower()}`")
    return msgspec.convert(value, PARAMETERS[name].type)


def resolve(params: SamplingParams, model_defaults: dict[str, Any], seed: int) -> SamplingParams:
    """Fill what the client left out. ``seed`` is used when the client gave none."""
    filled: dict[str, Any] = {}
    for name, fallback in DEFAULTS.items():
        if getattr(params, name) is None:
            filled[name] = model_defaults.get(name, fallback)
    if params.seed is None:
        filled["seed"] = seed
    return msgspec.structs.replace(params, **filled) if filled else params


__all__ = [
    "DEFAULTS",
    "GREEDY_TEMPERATURE",
    "MAX_CHOICES",
    "PARAMETERS",
    "Parameter",
    "SamplingParams",
    "parse_field",
    "resolve",
]

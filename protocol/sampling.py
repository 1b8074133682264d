"""Sampling parameters, declared once.

``SamplingParams`` is at once the message field, the library's class and what the bodies of the API,
their checks, JSON schema and documentation are made of: ``PARAMETERS`` lists name, type, default
and description, and ``parse_field`` checks one value.

A field that is ``None`` was left out by the client; the tokenizer fills it from the model's
generation config, then from ``DEFAULTS`` (``resolve``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from penstock.protocol.declared import description_of
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.sampler_parameters import (
    DEFAULT_BREAKERS,
    BannedStrings,
    DryAllowedLength,
    DryBase,
    DryBreakers,
    DryMultiplier,
    DryRange,
    DynatempExponent,
    DynatempMax,
    DynatempMin,
    EpsilonCutoff,
    EtaCutoff,
    MirostatEta,
    MirostatMode,
    MirostatTau,
    NoRepeatNgram,
    NSigma,
    SamplerOrder,
    Skew,
    SmoothingCurve,
    SmoothingFactor,
    TemperatureLast,
    Tfs,
    TopA,
    TypicalP,
    XtcProbability,
    XtcThreshold,
)
from penstock.protocol.validation import read

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_ALLOWED_TOKENS = 2**18
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**17
"""Logprobs of a whole prompt: its tokens times one and as many as are listed beside each."""
MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of a prompt that is no chat, where it is left out; as in OpenAI's completions."""
GREEDY_TEMPERATURE = 1e-5
"""Below it the highest logit wins and no random number is drawn."""

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
MaxTokens = Annotated[
    int,
    Meta(
        ge=0,
        le=MAX_TOKENS,
        description="Generate at most this many tokens; 0 only scores the prompt.",
    ),
]
StopStrings = Annotated[
    list[StopString],
    Meta(max_length=MAX_STOP_STRINGS, description="Stop before any of these strings."),
]
Logprobs = Annotated[
    int,
    Meta(
        ge=0,
        le=MAX_LOGPROBS,
        description="Return each token's logprob and those of so many likeliest ones.",
    ),
]
TopP = Annotated[
    float,
    Meta(
        ge=0.0,
        le=1.0,
        description="Keep the likeliest tokens whose probabilities add up to this.",
    ),
]
TopK = Annotated[
    int,
    Meta(
        ge=-1,
        le=MAX_TOKENS,
        description="Keep only so many of the likeliest tokens; 0 or -1 keeps all.",
    ),
]
Seed = Annotated[
    int, Meta(ge=-(2**63), le=2**63 - 1, description="The same seed draws the same tokens.")
]
Echo = Annotated[bool, Meta(description="Begin the text with the prompt; only for completions.")]


class _NamesParameters(msgspec.StructMeta):
    """A constructor that says how to go on from a parameter that does not exist."""

    if not TYPE_CHECKING:  # which then sees the fields, as of any other Struct

        def __call__(cls, *args, **kwargs):  # noqa: N805
            unknown = [name for name in kwargs if name not in cls.__struct_fields__]
            if unknown:
                # The second is a parameter of the methods that take chats.
                known = (*cls.__struct_fields__, "chat_template_kwargs")
                advice = FOREIGN_PARAMETERS.advice(unknown[0], known)
                raise TypeError(f"{cls.__name__}() has no parameter {unknown[0]}{advice}")
            return super().__call__(*args, **kwargs)


class SamplingParams(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    gc=False,
    kw_only=True,
    metaclass=_NamesParameters,
):
    """How the next token is chosen and when to stop.

    Append new fields at the end only: the order is the wire layout.
    """

    temperature: (
        Annotated[
            float,
            Meta(
                ge=0.0,
                le=100.0,
                description="The logits are divided by it; 0 takes the likeliest token.",
            ),
        ]
        | None
    ) = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="How many choices to generate.")] = 1
    max_tokens: MaxTokens | None = None
    stop: StopStrings = []
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(max_length=MAX_STOP_TOKENS, description="Stop after any of these tokens."),
    ] = []
    ignore_eos: Annotated[
        bool, Meta(description="Go on after the model's end token; meant for benchmarks.")
    ] = False
    min_p: (
        Annotated[
            float,
            Meta(
                ge=0.0,
                le=1.0,
                description="Keep tokens at least this fraction as probable as the likeliest.",
            ),
        ]
        | None
    ) = None
    presence_penalty: Annotated[
        float,
        Meta(
            ge=-2.0,
            le=2.0,
            description="Subtracted from the logit of each token that is in the output.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Meta(
            ge=-2.0,
            le=2.0,
            description="Subtracted once for each time that the token is in the output.",
        ),
    ] = 0.0
    repetition_penalty: (
        Annotated[
            float,
            Meta(
                gt=0.0,
                le=10.0,
                description="Lowers logits of tokens in prompt or output; 1 changes nothing.",
            ),
        ]
        | None
    ) = None
    min_tokens: Annotated[
        int,
        Meta(
            ge=0, le=MAX_TOKENS, description="The answer does not end before it has so many tokens."
        ),
    ] = 0
    logit_bias: Annotated[
        dict[TokenId, Bias],
        Meta(
            max_length=MAX_BIASES,
            description="Numbers to add to the logits of tokens, by token id.",
        ),
    ] = {}
    allowed_token_ids: (
        Annotated[
            list[TokenId],
            Meta(
                min_length=1,
                max_length=MAX_ALLOWED_TOKENS,
                description="Only these tokens may be generated.",
            ),
        ]
        | None
    ) = None
    bad_words: Annotated[
        list[BadWord],
        Meta(max_length=MAX_BAD_WORDS, description="These words are never generated."),
    ] = []
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Keep the stop string that was found at the end of the text.")
    ] = False
    skip_special_tokens: Annotated[
        bool, Meta(description="Leave special tokens out of the answer's text.")
    ] = True
    spaces_between_special_tokens: Annotated[
        bool, Meta(description="Has no effect: the tokenizers served here add no such spaces.")
    ] = True
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_TOKENS,
                description="Keep only so many tokens from the end of the prompt.",
            ),
        ]
        | None
    ) = None
    logprobs: Logprobs | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0, le=MAX_LOGPROBS, description="Return the same for the tokens of the prompt."
            ),
        ]
        | None
    ) = None
    echo: Echo = False
    structured_outputs: (
        Annotated[
            Grammar,
            Meta(description="Constrain the answer: json, json_object, regex, choice, grammar."),
        ]
        | None
    ) = None
    dynatemp_min: DynatempMin = 0.0
    dynatemp_max: DynatempMax = 0.0
    dynatemp_exponent: DynatempExponent = 1.0
    nsigma: NSigma = 0.0
    top_a: TopA = 0.0
    tfs: Tfs = 1.0
    eta_cutoff: EtaCutoff = 0.0
    epsilon_cutoff: EpsilonCutoff = 0.0
    typical_p: TypicalP = 1.0
    smoothing_factor: SmoothingFactor = 0.0
    smoothing_curve: SmoothingCurve = 1.0
    xtc_threshold: XtcThreshold = 0.1
    xtc_probability: XtcProbability = 0.0
    mirostat_mode: MirostatMode = 0
    mirostat_tau: MirostatTau = 5.0
    mirostat_eta: MirostatEta = 0.1
    skew: Skew = 0.0
    temperature_last: TemperatureLast = False
    sampler_order: SamplerOrder = []
    dry_multiplier: DryMultiplier = 0.0
    dry_base: DryBase = 1.75
    dry_allowed_length: DryAllowedLength = 2
    dry_range: DryRange = 0
    dry_sequence_breakers: DryBreakers = msgspec.field(
        default_factory=lambda: list(DEFAULT_BREAKERS)
    )
    no_repeat_ngram_size: NoRepeatNgram = 0
    banned_strings: BannedStrings = []


DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Used where neither the client nor the model's generation config says anything."""


class Parameter(msgspec.Struct, frozen=True):
    """One field of ``SamplingParams``, for documentation and schemas."""

    name: str
    type: Any
    default: Any
    description: str


def _parameters() -> dict[str, Parameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(SamplingParams):
        hint = hints[field.name]
        factory = field.default_factory
        default = field.default if factory is msgspec.NODEFAULT else factory()
        found[field.name] = Parameter(field.name, hint, default, description_of(hint))
    return found


PARAMETERS: dict[str, Parameter] = _parameters()


def parse_field(name: str, value: Any) -> Any:
    """Check one value of JSON against its declaration. Raises ``InvalidValue``."""
    return read(value, PARAMETERS[name].type, name)


def token_ids(params: SamplingParams) -> Iterator[tuple[str, int]]:
    """Every token id that the parameters name, with its parameter."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            yield name, token


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
    "MAX_LOGPROBS",
    "MAX_PROMPT_LOGPROBS",
    "PARAMETERS",
    "Parameter",
    "SamplingParams",
    "parse_field",
    "resolve",
    "token_ids",
]

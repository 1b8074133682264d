"""What the routes of KoboldAI's API take and give, with KoboldCpp's ``/api/extra``
(https://lite.koboldai.net/koboldcpp_api)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from penstock.client.answers import FinishReason
from penstock.protocol.declared import NO_ITEMS, Declared, said
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.sampling import MAX_STOP_STRINGS, MAX_TOKENS, StopString
from penstock.protocol.suggestions import ForeignNames
from penstock.services.frontend.bodies.requests import Flag
from penstock.services.frontend.bodies.responses import Count, Given
from penstock.services.frontend.bodies.sampling_fields import sampling_struct

MAX_KEY_LENGTH = 128
SAMPLING = {
    "temperature": "",
    "top_p": "",
    "top_k": "",
    "min_p": "",
    "presence_penalty": "",
    "frequency_penalty": "",
    "logit_bias": "",
    "n": "",
    "rep_pen": "repetition_penalty",
    "sampler_seed": "seed",
    "banned_tokens": "bad_words",
    "banned_strings": "",
    "top_a": "",
    "tfs": "",
    "typical": "typical_p",
    "eps_cutoff": "epsilon_cutoff",
    "eta_cutoff": "",
    "nsigma": "",
    "mirostat": "mirostat_mode",
    "mirostat_tau": "",
    "mirostat_eta": "",
    "dynatemp_exponent": "",
    "smoothing_factor": "",
    "smoothing_curve": "",
    "dry_multiplier": "",
    "dry_base": "",
    "dry_allowed_length": "",
    "dry_penalty_last_n": "dry_range",
    "dry_sequence_breakers": "",
    "xtc_threshold": "",
    "xtc_probability": "",
    "sampler_order": "",
}
"""Fields that are sampling parameters, with those that they are."""
_FOREIGN = ForeignNames(
    {
        **FOREIGN_PARAMETERS.renamed_to(
            max_tokens="max_length",
            stop="stop_sequence",
            **{known or name: name for name, known in SAMPLING.items()},
        ),
        "max_prompt_tokens": "max_context_length",
    },
    {
        **FOREIGN_PARAMETERS.explained,
        "guided_grammar": "use grammar",
        "memory": "put it at the beginning of the prompt",
        "logprobs": "use /v1/completions",
        "use_default_badwordsids": "bypass_eos goes on after the end token",
    },
)
_PENALTY = said("Has no effect: rep_pen reads prompt and output whole, each token alike.")
Key = Annotated[str, Meta(max_length=MAX_KEY_LENGTH)]
Number = float | None
Whole = int | None


if TYPE_CHECKING:

    class _SamplingFields(Declared):
        """Fields that are sampling parameters."""
else:
    _SamplingFields = sampling_struct("_SamplingFields", SAMPLING)


class KoboldBody(_SamplingFields, kw_only=True):
    """The body of /api/v1/generate and /api/extra/generate/stream."""

    FOREIGN: ClassVar[ForeignNames] = _FOREIGN
    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "tfs": (1, 0),
        "typical": (1, 0),
        "dry_allowed_length": (0,),
        "adaptive_target": (-1,),
        "guidance_scale": (1,),
        "negative_prompt": ("",),
        "memory": ("",),
        "images": NO_ITEMS,
        "audio": NO_ITEMS,
        "logprobs": (False,),
        "use_default_badwordsids": (False,),
        "grammar_retain_state": (False,),
        "gui_settings": (False,),
        "use_story": (False,),
        "use_memory": (False,),
        "use_authors_note": (False,),
        "use_world_info": (False,),
        "frmttriminc": (False,),
        "frmtrmblln": (False,),
        "frmtrmspch": (False,),
        "frmtadsnsp": (False,),
        "soft_prompt": ("",),
    }

    prompt: Annotated[str, Meta(min_length=1, description="The text to continue.")]
    max_length: (
        Annotated[
            int,
            Meta(ge=1, le=MAX_TOKENS, description="Generate at most this many tokens."),
        ]
        | None
    ) = None
    max_context_length: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_TOKENS,
                description="Of the prompt, so many last tokens less max_length are read; at most "
                "the model's max_model_len.",
            ),
        ]
        | None
    ) = None
    stop_sequence: (
        Annotated[
            list[StopString],
            Meta(max_length=MAX_STOP_STRINGS - 1, description="Stop before any of these strings."),
        ]
        | None
    ) = None
    trim_stop: Annotated[Flag, said("Leave the stop string out of the text (default).")] = None
    singleline: Annotated[Flag, said("Stop at the end of the line.")] = None
    bypass_eos: Annotated[Flag, said("Go on after the model's end token.")] = None
    render_special: Annotated[Flag, said("Keep special tokens in the text.")] = None
    grammar: Annotated[str, said("A grammar in GBNF or Lark syntax.")] | None = None
    genkey: (
        Annotated[Key, said("The client's name for the request, to check or abort it by.")] | None
    ) = None
    model: Annotated[str, said("The model, by one of its names; the first is the default.")] | (
        None
    ) = None
    replace_instruct_placeholders: (
        Annotated[
            bool, said("Has no effect where the prompt has no placeholders like {{[INPUT]}}.")
        ]
        | None
    ) = None
    adaptive_decay: Annotated[
        Number, said("Has no effect: it belongs to adaptive_target, which is off.")
    ] = None
    rep_pen_range: Annotated[Whole, _PENALTY] = None
    rep_pen_slope: Annotated[Number, _PENALTY] = None
    dynatemp_range: (
        Annotated[
            float,
            Meta(
                ge=0.0,
                le=100.0,
                description="The temperature goes up and down by so much with the entropy.",
            ),
        ]
        | None
    ) = None
    quiet: Annotated[Flag, said("Has no effect: prompts are never logged.")] = None


class KeyBody(Declared, kw_only=True):
    """The body of /api/extra/generate/check and /api/extra/abort."""

    genkey: (
        Annotated[Key, said("Which request; without one, all that the caller sent without one.")]
        | None
    ) = None


class CountBody(Declared, kw_only=True):
    """The body of /api/extra/tokencount."""

    prompt: Annotated[str, said("The text.")]
    special: (
        Annotated[bool, said("Count the special tokens around a text as well (default).")] | None
    ) = None
    model: Annotated[str, said("The model, by one of its names; the first is the default.")] | (
        None
    ) = None


# --- answers


class KoboldFault(Given, kw_only=True):
    msg: str
    type: str


class KoboldError(Given, kw_only=True):
    """Every answer with a status from 400 on; in a stream, the event that ends it instead."""

    detail: KoboldFault


class KoboldText(Given, kw_only=True):
    text: str
    finish_reason: FinishReason | None
    prompt_tokens: Count
    completion_tokens: Count


class KoboldResults(Given, kw_only=True):
    """The answer of /api/v1/generate."""

    results: list[KoboldText]


class TextSoFar(Given, kw_only=True):
    text: str


class KoboldProgress(Given, kw_only=True):
    """The answer of /api/extra/generate/check."""

    results: list[TextSoFar]


class KoboldToken(Given, kw_only=True):
    """An event of a stream of /api/extra/generate/stream."""

    token: str
    finish_reason: FinishReason | None


class KoboldAborted(Given, kw_only=True):
    success: Literal["true", "false"]
    done: Literal["true", "false"]


class KoboldCount(Given, kw_only=True):
    value: Count
    ids: list[int]


class KoboldValue(Given, kw_only=True):
    value: Count


class KoboldResult(Given, kw_only=True):
    result: str


class KoboldVersion(Given, kw_only=True):
    result: str
    version: str
    protected: Annotated[bool, said("A key is needed.")]
    txt2img: bool = False
    vision: bool = False
    transcribe: bool = False
    multiplayer: bool = False
    websearch: bool = False
    tts: bool = False
    embeddings: bool = False

"""Types of the parameters of rarer samplers, the order in which samplers act, and what contradicts.

``penstock.protocol.sampling`` declares the parameters themselves; the formulas are those of
``penstock.kernels.sampling.samplers``, a file each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from msgspec import Meta

if TYPE_CHECKING:
    from penstock.protocol.sampling import SamplingParams

MAX_BREAKERS = 64
MAX_BREAKER_LENGTH = 64
MAX_NGRAM = 1024
MAX_RANGE = 2**31 - 1
MAX_BANNED_STRINGS = 1024
MAX_BANNED_LENGTH = 256
MAX_BANNED_CHARACTERS = 16384
"""Of all banned strings together: what watches for them is built for each request."""
MAX_REDRAWS = 128
"""How often a choice goes back before it ends: each time, what came of the string is lost."""


def _number(least: float, most: float, description: str) -> Meta:
    return Meta(ge=least, le=most, description=description)


def _share(description: str) -> Meta:
    """Of a number that 1 switches off."""
    return Meta(gt=0.0, le=1.0, description=description)


DynatempBound = Annotated[float, Meta(ge=0.0, le=100.0)]
DynatempMin = Annotated[
    DynatempBound,
    Meta(description="Temperature where the distribution is sharp; 0 and 0: temperature holds."),
]
DynatempMax = Annotated[
    DynatempBound, Meta(description="Temperature where the distribution is flat.")
]
DynatempExponent = Annotated[
    float, Meta(gt=0.0, le=100.0, description="How the dynamic temperature grows with the entropy.")
]
NSigma = Annotated[
    float,
    _number(0, 100, "Keep logits within so many standard deviations of the highest; 0: all."),
]
TopA = Annotated[
    float,
    _number(0, 1, "Keep tokens of at least this times the square of the highest probability."),
]
Tfs = Annotated[float, _share("Tail-free sampling: keep the head of the curve; 1: all.")]
EtaCutoff = Annotated[
    float, _number(0, 1, "Drop tokens less probable than this, or than the entropy asks; 0: none.")
]
EpsilonCutoff = Annotated[float, _number(0, 1, "Drop tokens less probable than this; 0: none.")]
TypicalP = Annotated[
    float,
    _share("Keep tokens whose surprise is closest to the entropy, up to this probability; 1: all."),
]
SmoothingFactor = Annotated[
    float, _number(0, 100, "Bend the logits by a parabola around the highest; 0: off.")
]
SmoothingCurve = Annotated[float, _number(1, 10, "How far the parabola becomes a cubic; 1: off.")]
XtcThreshold = Annotated[
    float, _number(0, 1, "XTC: of the tokens at least so probable only the least likely stays.")
]
XtcProbability = Annotated[float, _number(0, 1, "How often XTC acts; 0: never.")]
MirostatMode = Annotated[int, Meta(ge=0, le=2, description="2: Mirostat 2.0; 0: none.")]
MirostatTau = Annotated[
    float,
    Meta(gt=0.0, le=100.0, description="The surprise that Mirostat keeps to, in bits a token."),
]
MirostatEta = Annotated[float, _number(0, 1, "How fast Mirostat learns.")]
Skew = Annotated[
    float, _number(-10, 10, "Shift probability to later token ids (or, below 0, earlier); 0: off.")
]
TemperatureLast = Annotated[
    bool, Meta(description="The temperature acts after the samplers that drop tokens.")
]
DryMultiplier = Annotated[
    float, _number(0, 100, "DRY: how much a token loses that would repeat a sequence; 0: nothing.")
]
DryBase = Annotated[
    float, _number(1, 100, "DRY: the penalty grows by it with each token of the sequence.")
]
DryAllowedLength = Annotated[
    int, Meta(ge=1, le=MAX_RANGE, description="DRY: shorter sequences may repeat.")
]
DryRange = Annotated[
    int,
    Meta(ge=-1, le=MAX_RANGE, description="DRY: tokens that are looked back at; 0 or -1: all."),
]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER_LENGTH)]
DryBreakers = Annotated[
    list[Breaker],
    Meta(max_length=MAX_BREAKERS, description="DRY: no sequence goes on over these texts."),
]
NoRepeatNgram = Annotated[
    int, Meta(ge=0, le=MAX_NGRAM, description="No sequence of so many tokens comes twice; 0: off.")
]
BannedStrings = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_BANNED_LENGTH)]],
    Meta(
        max_length=MAX_BANNED_STRINGS,
        description="Strings that never appear, in any case: where one would, it is drawn again.",
    ),
]
DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""Those of DRY's author."""

SamplerName = Literal[
    "temperature", "nsigma", "top_a", "min_p", "tfs", "eta_cutoff", "epsilon_cutoff", "typical_p",
    "smoothing", "xtc", "skew", "top_k", "top_p", "mirostat",
]  # fmt: skip
DEFAULT_ORDER: tuple[str, ...] = get_args(SamplerName)
KOBOLD_NUMBERS: tuple[tuple[str, ...], ...] = (
    ("top_k",),
    ("top_a",),
    ("top_p", "min_p"),
    ("tfs",),
    ("typical_p",),
    ("temperature", "smoothing"),
    (),
)
"""What KoboldAI's numbers stand for; 6 are the penalties, which always come first."""
_PENALTIES = 6
SamplerOrder = Annotated[
    list[SamplerName | Annotated[int, Meta(ge=0, le=_PENALTIES)]],
    Meta(
        max_length=len(DEFAULT_ORDER) + len(KOBOLD_NUMBERS),
        description="The order of samplers, by name or by KoboldAI's number; the others follow.",
    ),
]


def order_of(params: SamplingParams) -> list[str]:
    """Every sampler in the order that a request wants; see ``order_conflict``."""
    asked = dict.fromkeys(name for _, name in _named(params.sampler_order))
    rest = [name for name in DEFAULT_ORDER if name not in asked]
    if params.temperature_last:
        rest.remove("temperature")
        rest.insert(rest.index("xtc") + 1, "temperature")
    return [*asked, *rest]


def _named(order: list[SamplerName | int]) -> list[tuple[SamplerName | int, str]]:
    """Entries of an order, each with the sampler that it stands for."""
    found: list[tuple[SamplerName | int, str]] = []
    for entry in order:
        names = (entry,) if isinstance(entry, str) else KOBOLD_NUMBERS[entry]
        found += [(entry, name) for name in names]
    return found


def sampler_conflict(params: SamplingParams) -> tuple[str, str] | None:
    """A parameter that its type allows and the others, or this server, do not, and why."""
    if params.mirostat_mode == 1:
        allowed = "2, Mirostat 2.0, or 0, none, is allowed"
        return "mirostat_mode", f"mirostat_mode (mirostat) is 1; {allowed}"
    low, high = params.dynatemp_min, params.dynatemp_max
    if low > high:
        return "dynatemp_min", (
            f"dynatemp_min is {low:g}; at most dynatemp_max, {high:g}, is allowed"
        )
    return _banned_conflict(params) or _order_conflict(params)


def _banned_conflict(params: SamplingParams) -> tuple[str, str] | None:
    if not (banned := params.banned_strings):
        return None
    if (characters := sum(map(len, banned))) > MAX_BANNED_CHARACTERS:
        return "banned_strings", (
            f"banned_strings have {characters} characters together; at most "
            f"{MAX_BANNED_CHARACTERS} are allowed"
        )
    return None


def _order_conflict(params: SamplingParams) -> tuple[str, str] | None:
    order = params.sampler_order
    if order and params.temperature_last:
        return "temperature_last", (
            "temperature_last and sampler_order contradict each other; leave temperature_last out, "
            "and put temperature where it is to act"
        )
    seen: dict[str, SamplerName | int] = {}
    for entry, name in _named(order):
        if name in seen:
            return "sampler_order", (
                f"sampler_order has {name} twice, as {seen[name]!r} and as {entry!r}; leave one out"
            )
        seen[name] = entry
    penalised = params.repetition_penalty not in (None, 1.0)
    penalised |= bool(params.presence_penalty or params.frequency_penalty)
    if penalised and _PENALTIES in order[1:]:
        return "sampler_order", (
            f"sampler_order has 6, the penalties, at place {order.index(_PENALTIES, 1) + 1}; they "
            "always act first: put it first, or leave it out"
        )
    return None

"""What a client asks for, once the body of its dialect is checked."""

from __future__ import annotations

import msgspec

from penstock.client.batches import as_one
from penstock.client.beam_search import BeamSearchParams
from penstock.client.gateway_interface import ServedModel
from penstock.client.request_terms import (
    DEFAULT_TERMS,
    Caller,
    RequestTerms,
    head_of,
    terms_of,
)
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.shown_values import show
from penstock.protocol.suggestions import closest
from penstock.protocol.tasks import GENERATE, TASK_INPUT
from penstock.protocol.wire.messages.cache_hints import CacheHints
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    OutputFormat,
    PoolingParams,
    Prompt,
    Rejected,
    Work,
)
from penstock.services.frontend.bodies.requests import GenerationBody, StreamOptions
from penstock.services.frontend.errors import ApiError, bad_request, retry_after

MAX_CHOICES_IN_ALL = 256


class GenerateRequest(msgspec.Struct, frozen=True):
    """What a client asked for. Choice ``prompt * n + choice`` of the answer is ``choice`` of
    the gateway request for ``prompt``."""

    model: str
    """The name that the client used."""
    served: str
    """The first name of the model that is served under it."""
    prompts: list[Prompt]
    """Without any, nothing is asked of the pipeline."""
    params: SamplingParams = SamplingParams()
    stream: bool = False
    options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    terms: RequestTerms = DEFAULT_TERMS
    lists_prompt: bool = False
    """``prompt_logprobs`` were asked for by name, not by ``echo``."""
    task: str = GENERATE
    pooling: PoolingParams | None = None
    """For the tasks that make a vector or scores of each prompt."""
    window: int = 0
    """So many prompts are open at once, the next ones when others have ended; 0: all of them."""
    field: str = ""
    """Which field of the body holds the prompts of such a task."""
    output: OutputFormat | None = None
    """How the answer is read; ``None``: as text alone."""
    fits_window: bool = False
    """``max_tokens`` may be more than what fits behind the prompt."""
    returns_ids: bool = False
    """The answer holds the ids of its tokens, and those of its prompt."""
    is_part: bool = False
    """It serves another request of the same client, which is the one that counts."""
    keeps: int = 0
    """Of each prompt's choices only so many are answered, the likeliest; 0: all."""
    beams: BeamSearchParams | None = None
    """The likeliest answers as a whole are searched for, ``n`` to each prompt; ``None``: answers
    are drawn."""
    ends: list[int] = []
    """The model's end tokens, for a search."""
    hides_logprobs: bool = False
    """Logprobs are made to choose by, and nobody asked for them."""
    handle: str | None = None
    """The client's name for it, by which it may ask for it while it runs; ``None``: it may not."""
    cache: CacheHints | None = None

    def work(self, prompts: range, caller: Caller, *, time_left: float, age: float) -> Work:
        """The gateway request for one of the prompts, or for a batch of them."""
        asked = as_one(self.prompts[prompts.start : prompts.stop])
        head = head_of(
            self.terms,
            caller,
            asked,
            model=self.served,
            task=self.task,
            streamed=self.stream,
            siblings=len(self.prompts) * self.params.n,
            time_left=time_left,
            age=age,
        )
        choices = [ChoiceState(choice) for choice in range(len(prompts) * self.params.n)]
        return Work(
            *(head, asked, self.params, choices, self.output, self.fits_window),
            self.pooling,
            self.cache,
        )

    def at(self, first: int, rejected: Rejected) -> Rejected:
        """What is wrong with one of the inputs, with the place where it stands in the body.
        first: of those that were asked for together."""
        if not self.field or rejected.param != TASK_INPUT:
            return rejected
        where = f"{self.field}[{first + rejected.choice}]: " if len(self.prompts) > 1 else ""
        return msgspec.structs.replace(
            rejected, param=self.field, message=f"{where}{rejected.message}"
        )


class UnknownModel(ApiError):
    """A 404. Not for ever: what the engines serve may not have been heard of yet."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(404, f"The model {message}", param="model", code="model_not_found")
        self.name = name


class NoModel(ApiError):
    """A 503: no engine has been ready yet."""

    def __init__(self, name: str | None) -> None:
        """name: of the model that was asked for."""
        super().__init__(
            503,
            "No engine is ready yet (/ready tells what the server is doing); try again",
            kind="overloaded_error",
            headers=retry_after(1.0),
        )
        self.name = name


def short_names(models: list[ServedModel]) -> dict[str, ServedModel]:
    """Names without what stands before their last ``/``, which some clients cannot send. One that
    two models would share is none."""
    found: dict[str, list[ServedModel]] = {}
    for model in models:
        names = (one.rpartition("/") for one in (model.name, *model.aliases))
        for name in dict.fromkeys(last for _, slash, last in names if slash and last):
            found.setdefault(name, []).append(model)
    return {name: owners[0] for name, owners in found.items() if len(owners) == 1}


def find_model(name: str | None, models: list[ServedModel]) -> tuple[ServedModel, str]:
    """The model or adapter of that name and the name to answer with; None asks for the only model,
    or where there are adapters alone (a key may be restricted to them), for the only one.
    A name without what stands before its ``/`` is known too, where that is unambiguous.

    Raises ``UnknownModel``, ``NoModel``, and ``ApiError`` 400.
    """
    if not models:
        raise NoModel(name)
    meant = [one for one in models if not one.parent] or models
    if name is None and len(meant) == 1:
        return meant[0], meant[0].name
    for model in models:
        if name == model.name or name in model.aliases:
            return model, name
    names = [one for model in models for one in (model.name, *model.aliases)[:8]]
    served = ", ".join(map(show, names))
    if name is None:
        raise bad_request(f"model is missing; served here: {served}", param="model")
    if (found := short_names(models).get(name)) is not None:
        return found, name
    likely = closest(name, names)
    hint = f"; did you mean {show(likely)}?" if likely and len(names) > 1 else ""
    raise UnknownModel(name, f"{show(name)} does not exist; served here: {served}{hint}")


def check_choices(prompts: int, each: int, name: str) -> None:
    """Raise ``ApiError`` 400 for more choices than one request may have. each: of a prompt, by the
    parameter ``name``."""
    if prompts * each > MAX_CHOICES_IN_ALL:
        raise bad_request(
            f"{name} is {each}, which with {prompts} prompts makes {prompts * each} "
            f"choices; at most {MAX_CHOICES_IN_ALL} are allowed in one request",
            param=name,
        )


def generate_request(
    body: GenerationBody,
    model: ServedModel,
    name: str,
    params: SamplingParams,
    prompts: list[Prompt],
    output: OutputFormat | None = None,
    cache: CacheHints | None = None,
) -> GenerateRequest:
    """What a checked body asks for, under the name that the client used for the model.

    Raises ``ApiError`` 400 for too many choices.
    """
    check_choices(len(prompts), params.n, "n")
    return GenerateRequest(
        model=name,
        served=model.name,
        prompts=prompts,
        params=params,
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
        terms=terms_of(body),
        lists_prompt=params.prompt_logprobs is not None,
        output=output,
        returns_ids=bool(body.return_token_ids),
        cache=cache,
    )

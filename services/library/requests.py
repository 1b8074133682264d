"""What the library sends: a prompt, its parameters and its terms, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from penstock.client.request_terms import (
    DEFAULT_TERMS,
    Caller,
    Deterministic,
    Priority,
    RequestTerms,
    Salt,
    Seconds,
    Speculation,
    User,
    check_printable,
    head_of,
)
from penstock.protocol.config.adapters import AdapterName
from penstock.protocol.grammar.request import from_structured_outputs
from penstock.protocol.plain_errors import plain_error
from penstock.protocol.sampler_parameters import sampler_conflict
from penstock.protocol.sampling import PARAMETERS, SamplingParams
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.trace_context import traceparent_of
from penstock.protocol.validation import InvalidValue, check_text, read
from penstock.protocol.wire.messages.requests import ChoiceState, OutputFormat, Prompt, Work

_FOREIGN = ForeignNames(
    {"timeout": "deadline_s", "timeout_s": "deadline_s", "tenant": "user", "use_tqdm": "progress"},
    {
        "lora_request": "adapter=NAME names one of those that lora=['NAME=FOLDER'] loads",
        "tokenization_kwargs": "SamplingParams has truncate_prompt_tokens",
        "data_parallel_rank": "the router chooses the engine",
        "arrival_time": "a request arrives when it is added",
    },
)


class Terms(TypedDict, total=False):
    """What may be said of a request beside its prompt and its parameters."""

    adapter: str | Sequence[str]
    """Name of the adapter that is added to the model; empty: none. Methods that answer many prompts
    at once also take one each."""
    user: str
    """Whose it is, for the policy ``fair`` and the shares of a full server."""
    cache_salt: str
    """Requests with different salts share no cached prefix."""
    deadline_s: float
    """Seconds from the call in which the whole answer must be there, or it ends with an error."""
    speculation: bool
    """Whether tokens may be drafted ahead, where the engine does so; text is the same."""
    deterministic: bool
    """The answer of a seed has the same bits whatever runs beside it; an error says where an engine
    cannot promise that."""
    trace_headers: Mapping[str, str] | None
    """Headers of the request that this one is made for; ``traceparent`` (W3C Trace Context) names
    the trace in all log lines about it."""


class Asked(msgspec.Struct, frozen=True):
    """The terms of a request, checked."""

    terms: RequestTerms = DEFAULT_TERMS
    caller: Caller = Caller()


_TYPES = {
    "adapter": AdapterName, "user": User, "cache_salt": Salt, "deadline_s": Seconds,
    "speculation": Speculation, "deterministic": Deterministic,
}  # fmt: skip
_NAMES = (*_TYPES, "trace_headers")
_OTHERS = ("priority", "progress")
"""Parameters of the methods that answer many prompts at once."""


def asked_of(
    method: str, given: Terms, priority: Any = 0, others: tuple[str, ...] = ("priority",)
) -> Asked:
    """Raises ``ValueError`` for a wrong value, and ``TypeError`` for an unknown name.

    method: its name, and others: its further parameters, for errors.
    """
    for name in given:
        if name not in _NAMES:
            advice = _FOREIGN.advice(name, (*others, *_NAMES))
            raise TypeError(f"{method}() has no parameter {name!r}{advice}")
    values: dict[str, Any] = {"priority": read(priority, Priority, "priority")}
    for name, declared in _TYPES.items():
        if given.get(name) is not None:
            values[name] = read(given[name], declared, name)  # type: ignore[literal-required]
    terms = RequestTerms(**values)
    check_printable(terms)
    headers = {name.lower(): value for name, value in (given.get("trace_headers") or {}).items()}
    return Asked(terms, Caller(trace=traceparent_of(headers.get("traceparent", ""))))


def all_asked(method: str, given: Terms, priority: int | Sequence[int], count: int) -> list[Asked]:
    """The terms of each prompt. Raises what ``asked_of`` raises."""
    adapter = given.get("adapter")
    if not _are_several(priority) and not _are_several(adapter):
        return [asked_of(method, given, priority, _OTHERS)] * count
    each = zip(_each(priority, "priorities", count), _each(adapter, "adapters", count), strict=True)
    return [asked_of(method, {**given, "adapter": name}, one, _OTHERS) for one, name in each]


def _are_several(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _each(given: Any, what: str, count: int) -> list[Any]:
    """What each of ``count`` prompts is given: the same, or its own."""
    if not _are_several(given):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} {what} for {count} prompts; give one, or one each")
    return list(given)


def spread(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The parameters of each prompt. Raises ``ValueError`` where there are more or fewer."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts; give one, or one each")
    return list(given)


def work_of(
    prompt: Prompt,
    params: SamplingParams,
    output: OutputFormat | None = None,
    asked: Asked = Asked(),  # noqa: B008 - it is frozen
    *,
    streamed: bool = False,
) -> Work:
    """Checks the parameters' ranges. Raises ``ValueError``. Its id, its model and how much of its
    time has passed are filled in when it is sent."""
    return checked_work(prompt, checked_params(params), output, asked, streamed=streamed)


def checked_params(params: SamplingParams) -> SamplingParams:
    """Parameters whose ranges were checked. Raises ``ValueError``.

    ``structured_outputs`` may be the object that a client of the API would send.
    """
    grammar: Any = params.structured_outputs
    if isinstance(grammar, dict):
        made = from_structured_outputs(grammar)
        params = msgspec.structs.replace(params, structured_outputs=made)
    try:
        # Constructing a Struct checks nothing; decoding does.
        checked = msgspec.convert(msgspec.to_builtins(params), SamplingParams)
        msgspec.msgpack.encode(checked)  # it must be able to travel
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(_first_fault(params) or plain_error(error)) from None
    except UnicodeEncodeError:
        check_text(msgspec.structs.asdict(params), "sampling_params")
        raise
    if (wrong_together := sampler_conflict(checked)) is not None:
        raise ValueError(f"sampling_params: {wrong_together[1]}")
    return checked


def all_checked(params: Iterable[SamplingParams]) -> Iterator[SamplingParams]:
    """Each one checked, when it is asked for; one that several prompts have, once."""
    found: dict[int, tuple[SamplingParams, SamplingParams]] = {}
    for one in params:
        if id(one) not in found:
            found[id(one)] = one, checked_params(one)
        yield found[id(one)][1]


def checked_work(
    prompt: Prompt,
    checked: SamplingParams,
    output: OutputFormat | None = None,
    asked: Asked = Asked(),  # noqa: B008 - it is frozen
    *,
    streamed: bool = False,
) -> Work:
    """As ``work_of``, of parameters that were checked."""
    choices = [ChoiceState(number) for number in range(checked.n)]
    head = head_of(
        asked.terms,
        asked.caller,
        prompt,
        streamed=streamed,
        siblings=len(choices),
        time_left=asked.terms.deadline_s,
    )
    return Work(head, prompt, checked, choices, output)


def task_work(task: str, work: Work) -> Work:
    """The same for another task than to generate."""
    return msgspec.structs.replace(work, head=msgspec.structs.replace(work.head, task=task))


def _first_fault(params: SamplingParams) -> str:
    """What is wrong with the first parameter that is not as it is declared."""
    for name, parameter in PARAMETERS.items():
        try:
            read(msgspec.to_builtins(getattr(params, name)), parameter.type, name)
        except InvalidValue as invalid:
            return f"sampling_params: {invalid}"
    return ""

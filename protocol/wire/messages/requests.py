"""A request on its way to an engine, and every word about who holds it.

A request is named by ``id`` (made by its frontend, unique in the cluster) and ``attempt``.
``attempt`` is ``submission << ATTEMPT_BITS | enqueue``: the frontend counts submissions, the
tokenizer that holds one counts its enqueues. A higher attempt always replaces a lower one of the
same id. The ``n`` choices of a request travel together; rows of tokens name the choice. They share
a prompt, or each has its own (``Inputs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.cache_hints import CacheHints, RetainedSpan
from penstock.protocol.wire.messages.tokens import Released

ATTEMPT_BITS = 16
"""Room for the restarts of a submission, and for the redraws of all its choices."""
TOKEN_BYTES = 4
"""Bytes of a token id in a message: int32, little endian."""
MAX_CACHE_SALT = 128

RequestPriority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""Lower is more urgent; only the scheduling policy ``priority`` looks at it."""
CacheSalt = Annotated[str, Meta(max_length=MAX_CACHE_SALT)]
"""Requests with different salts share no KV blocks."""
TaskName = Annotated[str, Meta(max_length=64)]


def first_attempt(submission: int) -> int:
    """The attempt number of a submission's first enqueue."""
    return submission << ATTEMPT_BITS


def submission_of(attempt: int) -> int:
    return attempt >> ATTEMPT_BITS


def split_ids(ids: bytes, lengths: list[int]) -> list[bytes]:
    """The prompts of a batch, of so many tokens each; without ``lengths`` the one that there is.
    Raises ``ValueError`` where they are not as long together."""
    if not lengths:
        return [ids]
    if min(lengths) < 0 or TOKEN_BYTES * sum(lengths) != len(ids):
        raise ValueError(f"{len(ids)} bytes are no prompts of {sum(lengths)} tokens")
    ends = list(accumulate(lengths, initial=0))
    return [ids[TOKEN_BYTES * a : TOKEN_BYTES * b] for a, b in pairwise(ends)]


class ChoiceState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a choice has already produced; empty at first, filled in a continuation."""

    choice: int
    output: bytes = b""
    """int32 token ids, little endian."""
    released: Released = msgspec.field(default_factory=Released)
    sampling: bytes = b""
    """An encoded ``SlotSampling`` of its own, where its draws differ from the other choices'."""


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat", gc=False):
    """Messages to be rendered by the model's chat template."""

    messages: bytes
    """JSON array of messages, checked for shape by the frontend."""
    template_kwargs: bytes = b"{}"
    """JSON object of extra template variables, from an allowlist; with ``continue_final_message``
    true the prompt ends with the last message, open."""


class PromptText(msgspec.Struct, frozen=True, array_like=True, tag="text", gc=False):
    text: str
    add_special_tokens: bool = True
    """Begin and end it as the tokenizer does by itself."""


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens", gc=False):
    ids: bytes
    """int32 token ids, little endian. Also what a continuation sends: no second rendering."""


class Pair(msgspec.Struct, frozen=True, array_like=True, tag="pair", gc=False):
    """Two texts to be judged together, such as a query and a document. A continuation sends it
    again: ids alone would not say where the second one begins."""

    text: str
    other: str


Prompt = Chat | PromptText | Tokens | Pair
PromptKind = Literal["chat", "text", "tokens", "pair"]


class Inputs(msgspec.Struct, frozen=True, array_like=True, tag="inputs", gc=False):
    """A batch: the prompts of a request of whose each choice has its own, in the order of the
    choices. For the tasks that a model's folder decides on."""

    prompts: list[PromptText | Tokens | Pair]


def kind_of(prompt: Prompt | Inputs) -> PromptKind:
    """Of a batch: that of its first prompt."""
    match prompt:
        case Inputs(prompts):
            return kind_of(prompts[0])
        case Chat():
            return "chat"
        case PromptText():
            return "text"
        case Tokens():
            return "tokens"
        case Pair():
            return "pair"


REPEATING = (
    "a CPU does in float32 (--dtype float32) with plain weights of a model of Penstock's own "
    "families, a GPU with --deterministic; leave deterministic out, or see docs/determinism.md"
)
"""Which engines repeat the answer of a seed bit for bit, for refusals."""


class RequestHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every process may need to know of a request, whatever the request asks for.

    ``Work``, ``TokenWork`` and the scheduler's record hold it as it is: a new field is declared
    here, set by the client's side and read where it is needed.
    """

    request_id: str = ""
    """What the client sees as ``x-request-id``. It stands in every process's log lines about the
    request; nothing is keyed by it, since a client may use one twice."""
    model: str = ""
    """The served model, by its first name."""
    task: TaskName = "generate"
    """See ``penstock.protocol.tasks``."""
    prompt_kind: PromptKind = "text"
    """What the client sent, also when it has become tokens since."""
    adapter: str = ""
    """Digest of the adapter that is added to the model; empty: none is."""
    tenant: str = ""
    priority: RequestPriority = 0
    cache_salt: CacheSalt = ""
    time_left: float | None = None
    """Seconds until the request's deadline; clocks differ between hosts, so never a time."""
    age: float = 0.0
    """Seconds since the client's request arrived."""
    trace: str = ""
    """W3C ``traceparent``, as the client sent it."""
    media: list[str] = []
    """Content digests of the prompt's media."""
    streamed: bool = True
    """Somebody reads the tokens as they come, and feels each pause."""
    siblings: int = 1
    """Choices of the client's request, over all its prompts: they share what an answer may hold."""
    accepted: bool = False
    """An engine had taken it before: nothing is refused any more that was not then."""
    speculation: bool = True
    """Its tokens may be drafted, where its engine does so."""
    hand_overs: int = 0
    """How often an engine has handed it over to another: the blocks are kept, and whoever has it
    now loads them."""
    deterministic: bool = False
    """The answer of its seed has the same bits in any batch: its engine is one that ``repeats``."""
    virtual_tokens: int = 0
    """``Adapter.virtual_tokens`` of its adapter: they take positions, and count in no usage."""


ToolMode = Literal["none", "auto", "required"]
ReasoningMode = Literal["apart", "hidden", "text"]


class OutputFormat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the tokens of an answer become events. Without one they become text alone."""

    tools: bytes = b""
    """JSON array of the tools that are offered, as chat templates take them: objects of the type
    ``function``. Empty: none are."""
    mode: ToolMode = "auto"
    """Whether the model may call them, or must."""
    allowed: list[str] = []
    """Names of the tools that may be called; empty: all of them."""
    strict: list[str] = []
    """Names of the tools whose arguments must be what their schema says."""
    parallel: bool = True
    """Several calls may stand in one answer."""
    reasoning: ReasoningMode = "apart"
    """What the model thinks becomes ``Reasoning``, nothing, or a part of the text."""
    thinking_budget: int | None = None
    """Tokens of thinking, after which it is closed."""


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request for the task ``embed``, ``score`` or ``classify`` asks for beside its prompt.
    What the model's folder says holds where it says nothing."""

    dimensions: int | None = None
    """``embed``: the vector's first numbers alone, so many of them."""
    normalize: bool | None = None
    """``embed``: whether vectors have length 1."""
    activation: bool | None = None
    """``score``, ``classify``: whether the logits go through the folder's activation."""
    prompt_name: str = ""
    """Which of the folder's prompts stands ahead of a text; empty: its default, if it has one."""
    input_type: Literal["", "query", "document"] = ""
    """``embed``: what the text is, where no prompt is named. The folder's prompt for it stands
    ahead, if it has one."""
    document_tokens: int | None = None
    """``score``: of the second text of a pair so many tokens at most, its beginning."""


class Work(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the client asked for, as the frontend sends it. The router never decodes it."""

    head: RequestHead
    prompt: Prompt | Inputs
    params: SamplingParams
    choices: list[ChoiceState]
    """The choices still open; at first all ``n``."""
    output: OutputFormat | None = None
    fits_window: bool = False
    """``max_tokens`` may be more than what fits behind the prompt: the window ends the answer."""
    pooling: PoolingParams | None = None
    """For the tasks that make a vector or scores of a prompt."""
    cache: CacheHints | None = None


def prompts_of(work: Work) -> Sequence[Prompt]:
    """The one that the choices share, or each choice's own."""
    return work.prompt.prompts if isinstance(work.prompt, Inputs) else [work.prompt]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=20, gc=False):
    """Frontend → router → a tokenizer. Sent again each second until ``Taken``."""

    id: int
    attempt: int
    reply_to: str
    work: bytes
    """An encoded ``Work``."""
    model: str = ""
    """``RequestHead.model``, for those who do not decode the work."""
    choices: int = 1
    """Choices still open, likewise: what the request weighs."""
    trace: str = ""
    """``RequestHead.trace``, likewise, where this server's own spans are recorded."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=21, gc=False):
    """Tokenizer → frontend: the tokenizer owns the submission from here on."""

    id: int
    attempt: int


class TokenWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request in tokens, as the scheduler needs it. The router never decodes it."""

    head: RequestHead
    prompt: bytes
    """int32 token ids, little endian; of a batch those of all prompts, one after another."""
    sampling: bytes
    """An encoded ``SlotSampling`` of every choice. The scheduler passes it on unread; what it
    plans by stands in the fields below."""
    choices: list[ChoiceState]
    stop_ids: list[int]
    """Tokens that end a choice."""
    max_tokens: int
    """Tokens of one choice's output, at most."""
    prompt_logprobs: int | None = None
    """Logprobs of the prompt are owed, each with so many of the likeliest tokens."""
    reads_output: bool = False
    """What is drawn depends on the output so far: a slot needs all of it."""
    reads_prompt: bool = False
    """And on the whole prompt."""
    stalls: int = 0
    """How often it was started again without a new token in between."""
    prefix: bytes = b""
    """Digests of the prompt's prefixes, see ``penstock.protocol.prefix_digest``; of a batch those
    that all its prompts share."""
    lengths: list[int] = []
    """Of a batch: the tokens of each choice's own prompt, in the order of ``choices``. Empty: the
    choices share one prompt."""
    seconds: list[int] = []
    """Where the second text of a pair begins in each prompt, 0 where it is none. Empty: no prompt
    is a pair."""
    reads_logits: bool = False
    """What is drawn depends on how probable the output was to the model, too: a slot computes all
    of it anew."""
    retain: list[RetainedSpan] = []
    """The longest one first, at most ``MAX_BREAKPOINTS``."""
    release: bool = False
    """As in ``CacheHints``."""


class Enqueue(msgspec.Struct, frozen=True, array_like=True, tag=22, gc=False):
    """Tokenizer → router → a scheduler. Sent again each second until ``Accepted``."""

    id: int
    attempt: int
    reply_to: str
    work: bytes
    """An encoded ``TokenWork``."""
    model: str = ""
    """``RequestHead.model``, for those who do not decode the work."""
    prefix: bytes = b""
    """``TokenWork.prefix``, likewise."""
    choices: int = 1
    """Choices still open, likewise: the sequences that an engine runs for it."""
    tokens: int = 0
    """Positions of its longest sequence in the end, at most: an engine that holds fewer may have to
    give it up."""
    task: TaskName = "generate"
    """``RequestHead.task``, likewise: engines that do not do it do not get it."""
    trace: str = ""
    """As ``Submit.trace``."""
    adapter: str = ""
    """``RequestHead.adapter``, likewise: it goes to an engine that has loaded it."""
    begun: bool = False
    """It has tokens already, or was handed over: it goes to an engine that decodes."""
    deterministic: bool = False
    """``RequestHead.deterministic``, likewise: it goes to an engine that ``repeats``."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=23, gc=False):
    """Scheduler → tokenizer → frontend: the request waits or runs in an engine.

    The tokenizer adds ``prompt`` so that the frontend can resubmit without rendering again. No
    HTTP status goes out before it.
    """

    id: int
    attempt: int
    prompt: bytes = b""
    max_tokens: int = 0
    """The resolved limit, so that a continuation keeps it. A scheduler says what its engine leaves
    of it."""
    lengths: list[int] = []
    """As ``TokenWork.lengths``, for the choices of the submission."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=24, gc=False):
    """The request cannot be served; the whole request ends with this error."""

    id: int
    attempt: int
    status: int
    """HTTP status, from 400 on."""
    kind: str
    """OpenAI error ``type``: ``invalid_request_error``, ``overloaded_error``, …"""
    message: str
    param: str | None = None
    retry_after: float | None = None
    retry_elsewhere: bool = False
    """The request itself is fine (draining or full receiver): another peer may take it."""
    code: str | None = None
    """OpenAI's ``error.code``, by which clients tell causes of one type apart."""
    choice: int = 0
    """Of a batch: the choice whose prompt is at fault, where ``param`` says that one is."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=25, gc=False):
    """The sender is no longer interested. Columns of the same length.

    It may overtake the request it cancels; the receiver keeps a tombstone for 60 s.
    """

    ids: list[int]
    attempts: list[int]
    choices: list[int]
    """The choice that is no longer wanted, or -1 for the whole request."""


class Holding(msgspec.Struct, frozen=True, array_like=True, tag=26, gc=False):
    """Every 2 s: all that the sender believes open at the receiver. Columns."""

    reply_to: str
    ids: list[int]
    attempts: list[int]


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag=27, gc=False):
    """These are not open here (any more): continue them elsewhere. Columns.

    The answer to ``Holding``, and what an engine says that has lost its worker.
    """

    ids: list[int]
    attempts: list[int]
    failures: list[int] = []
    """Steps that died with each since its last token; 0: it only waited. Empty: nobody knows."""
    prefilled: bool = False
    """Nothing was lost: their prompts are computed, the blocks are kept, and an engine hands them
    over to another, as one that decodes, or has room."""

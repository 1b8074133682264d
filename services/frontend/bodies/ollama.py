"""What the routes of Ollama's API take and give (https://docs.ollama.com/api)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from penstock.client.messages import MAX_MESSAGES, Name
from penstock.client.tools import ToolDeclarations
from penstock.protocol.declared import NO_ITEMS, Declared, said
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.sampling import MAX_TOKENS, Logprobs, StopString, StopStrings
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.wire.messages.tokens import MAX_CALLS
from penstock.services.frontend.bodies.requests import Flag
from penstock.services.frontend.bodies.responses import ChatTokenLogprob, Count, Given
from penstock.services.frontend.bodies.sampling_fields import sampling_struct

OPTIONS = {
    "temperature": "",
    "top_k": "",
    "top_p": "",
    "min_p": "",
    "seed": "",
    "presence_penalty": "",
    "frequency_penalty": "",
    "repeat_penalty": "repetition_penalty",
    "tfs_z": "tfs",
    "typical_p": "",
    "mirostat": "mirostat_mode",
    "mirostat_tau": "",
    "mirostat_eta": "",
}
"""Options that are sampling parameters, with those that they are."""
_OF_OPTIONS = ForeignNames(
    FOREIGN_PARAMETERS.renamed_to(
        max_tokens="num_predict", **{known or name: name for name, known in OPTIONS.items()}
    ),
    FOREIGN_PARAMETERS.explained,
)
_FORMATS = ("ebnf", "grammar", "guided_grammar", "guided_json", "guided_decoding", "json_schema")
_OF_REQUESTS = ForeignNames(
    {},
    {
        **FOREIGN_PARAMETERS.explained,
        **{name: f"use {option} in options" for name, option in _OF_OPTIONS.renamed.items()},
        **dict.fromkeys((*OPTIONS, "stop", "num_predict", "num_ctx"), "put it into options"),
        **dict.fromkeys(_FORMATS, "use format"),
        **dict.fromkeys(("enable_thinking", "reasoning_effort", "thinking"), "use think"),
        "response_format": "use format",
        "structured_outputs": "use format",
        "n": "one answer is given",
        "template": "not supported: the model's own chat template is used; raw leaves it out",
        "context": "not supported: send the conversation to /api/chat",
        "truncate": "not supported: a prompt is never cut; send false",
        "shift": "not supported: an answer ends where the context does; send false",
    },
)
_NO_EFFECT = said("Has no effect: it says how Ollama loads a model or shares the machine.")
Whole = int | None

if TYPE_CHECKING:

    class _OptionFields(Declared):
        """Options that are sampling parameters."""
else:
    _OptionFields = sampling_struct("_OptionFields", OPTIONS)


class OllamaOptions(_OptionFields, kw_only=True):
    """How the answer is generated. What is left out has this server's defaults."""

    FOREIGN: ClassVar[ForeignNames] = _OF_OPTIONS
    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "penalize_newline": (True,),
        "logits_all": (False,),
        "vocab_only": (False,),
        "embedding_only": (False,),
    }

    num_predict: (
        Annotated[
            int,
            Meta(
                ge=-2,
                le=MAX_TOKENS,
                description="Generate at most this many tokens; -1 and -2: what the context holds.",
            ),
        ]
        | None
    ) = None
    stop: StopString | StopStrings | None = None
    num_ctx: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_TOKENS,
                description="Has no effect: the context is the model's max_model_len.",
            ),
        ]
        | None
    ) = None
    repeat_last_n: (
        Annotated[
            int,
            Meta(
                ge=-1,
                le=MAX_TOKENS,
                description="0 switches repeat_penalty off; otherwise that reads prompt and output "
                "whole.",
            ),
        ]
        | None
    ) = None
    num_keep: Annotated[Whole, said("Has no effect: a prompt is never cut.")] = None
    num_batch: Annotated[Whole, _NO_EFFECT] = None
    num_gpu: Annotated[Whole, _NO_EFFECT] = None
    main_gpu: Annotated[Whole, _NO_EFFECT] = None
    num_thread: Annotated[Whole, _NO_EFFECT] = None
    numa: Annotated[Flag, _NO_EFFECT] = None
    low_vram: Annotated[Flag, _NO_EFFECT] = None
    f16_kv: Annotated[Flag, _NO_EFFECT] = None
    use_mmap: Annotated[Flag, _NO_EFFECT] = None
    use_mlock: Annotated[Flag, _NO_EFFECT] = None


class OllamaFunction(Declared, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"index": tuple(range(MAX_CALLS))}

    name: Name
    arguments: Annotated[dict[str, Any], said("By their names.")]


class OllamaCall(Declared, kw_only=True):
    """A call that an assistant's message has made."""

    id: Annotated[Name, said("Of the call; one is made where it is left out.")] | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Declared, kw_only=True):
    """A message of a chat."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {"images": NO_ITEMS}

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, said("The text.")] | None = None
    thinking: Annotated[str, said("What an assistant thought before the content.")] | None = None
    tool_calls: (
        Annotated[
            list[OllamaCall],
            Meta(max_length=MAX_CALLS, description="Calls that an assistant's message has made."),
        ]
        | None
    ) = None
    tool_name: (
        Annotated[Name, said("The tool whose result a message of the role tool is.")] | None
    ) = None
    tool_call_id: (
        Annotated[Name, said("The call that a message of the role tool answers.")] | None
    ) = None


class OllamaBody(Declared, kw_only=True):
    """What both generating routes have."""

    FOREIGN: ClassVar[ForeignNames] = _OF_REQUESTS
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"truncate": (False,), "shift": (False,)}

    model: Annotated[
        str, Meta(min_length=1, description="By one of its names; the tag :latest may follow.")
    ]
    stream: Annotated[Flag, said("Send the answer in pieces, a line of JSON each (default).")] = (
        None
    )
    options: OllamaOptions | None = None
    format: (
        Annotated[
            Literal["", "json"] | dict[str, Any],
            said("json for any JSON object, or a JSON schema that the answer must have."),
        ]
        | None
    ) = None
    think: (
        Annotated[
            bool | Literal["low", "medium", "high", "max"],
            said("Whether, or how much, to think before the answer, for models that can."),
        ]
        | None
    ) = None
    logprobs: Annotated[Flag, said("Return each token's logprob.")] = None
    top_logprobs: (
        Annotated[Logprobs, said("So many of the likeliest tokens beside each, with logprobs.")]
        | None
    ) = None
    keep_alive: (
        Annotated[float | str, said("Has no effect: --keep-alive of the server says it.")] | None
    ) = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """The body of /api/chat."""

    messages: (
        Annotated[
            list[OllamaMessage],
            Meta(
                max_length=MAX_MESSAGES,
                description="The conversation, oldest first. Without any, nothing is generated.",
            ),
        ]
        | None
    ) = None
    tools: ToolDeclarations | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """The body of /api/generate."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        **OllamaBody.NEUTRAL,
        "suffix": ("",),
        "template": ("",),
        "images": NO_ITEMS,
        "context": NO_ITEMS,
        "width": (0,),
        "height": (0,),
        "steps": (0,),
    }

    prompt: Annotated[str, said("Without any, nothing is generated.")] | None = None
    system: Annotated[str, said("A system message before the prompt.")] | None = None
    raw: Annotated[Flag, said("Take the prompt as it is, without the chat template.")] = None


class ShowBody(Declared, kw_only=True):
    """The body of /api/show."""

    model: Annotated[str, said("By one of its names.")] | None = None
    name: Annotated[str, said("The same, as older clients write it.")] | None = None
    verbose: Annotated[Flag, said("Has no effect: all that is known is given.")] = None
    system: Annotated[str, said("Has no effect.")] | None = None
    template: Annotated[str, said("Has no effect.")] | None = None
    options: Annotated[dict[str, Any], said("Has no effect.")] | None = None


# --- answers


class OllamaError(Given, kw_only=True):
    """Every answer with a status from 400 on; in a stream, the line that ends it instead."""

    error: str


class GivenFunction(Given, kw_only=True):
    index: Count
    name: str
    arguments: dict[str, Any]


class GivenCall(Given, kw_only=True):
    id: str
    function: GivenFunction


class GivenMessage(Given, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[GivenCall] | UnsetType = UNSET


Nanoseconds = Annotated[int, Meta(ge=0)] | UnsetType


class OllamaHead(Given, kw_only=True):
    """How a whole answer and each line of its stream begin."""

    model: str
    created_at: str


class OllamaEnd(OllamaHead, kw_only=True):
    """What a whole answer and the last line of its stream have in common."""

    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done: bool
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: Nanoseconds = UNSET
    load_duration: Nanoseconds = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_duration: Nanoseconds = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Nanoseconds = UNSET


class OllamaChat(OllamaEnd, kw_only=True):
    """The answer of /api/chat, and each line of its stream."""

    message: GivenMessage


class OllamaGenerated(OllamaEnd, kw_only=True):
    """The answer of /api/generate, and each line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


class ModelDetails(Given, kw_only=True):
    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Given, kw_only=True):
    """A name under which a model is served."""

    name: str
    model: str
    modified_at: str
    size: Count = 0
    digest: str
    details: ModelDetails


class OllamaTags(Given, kw_only=True):
    models: list[OllamaModel]


class RunningModel(OllamaModel, kw_only=True):
    expires_at: str
    size_vram: Count = 0
    context_length: Count


class OllamaRunning(Given, kw_only=True):
    models: list[RunningModel]


class OllamaShown(Given, kw_only=True):
    """What is known of a model."""

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    license: str = ""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str

"""What /tokenize and /detokenize take and give, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from penstock.client.messages import Messages, TemplateVariables
from penstock.client.tools import ToolDeclarations
from penstock.protocol.declared import Declared, said
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.sampling import TokenId
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.responses import Count, Given

MAX_TOKEN_IDS = 2**19
"""As many values as a body may hold."""
Model = Annotated[str, said("The model, by one of its names.")]
_NAMES_OF_TEXTS = ForeignNames(
    {
        "add_special": "add_special_tokens",
        "content": "prompt",
        "input": "prompt",
        "inputs": "prompt",
        "text": "prompt",
    },
    FOREIGN_PARAMETERS.explained,
)
_NAMES_OF_IDS = ForeignNames({"ids": "tokens", "input_ids": "tokens", "token_ids": "tokens"}, {})


class TokenizeBody(Declared, kw_only=True):
    """The body of /tokenize: a prompt, or messages."""

    FOREIGN: ClassVar[ForeignNames] = _NAMES_OF_TEXTS
    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "chat_template": (),
        "mm_processor_kwargs": (),
        "return_token_strs": (False,),
    }

    model: Model | None = None
    prompt: Annotated[str, Meta(min_length=1, description="A text.")] | None = None
    messages: Messages | None = None
    add_special_tokens: (
        Annotated[
            bool,
            said("Add the special tokens around a text, as completions do (default)."),
        ]
        | None
    ) = None
    tools: ToolDeclarations | None = None
    add_generation_prompt: (
        Annotated[bool, said("End a chat with the opening of an assistant's message (default).")]
        | None
    ) = None
    continue_final_message: (
        Annotated[bool, said("End a chat with the last message's text, to be continued.")] | None
    ) = None
    chat_template_kwargs: (
        Annotated[TemplateVariables, said("Variables of the chat template.")] | None
    ) = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        if (self.prompt is None) == (self.messages is None):
            found = "both prompt and messages" if self.messages else "neither prompt nor messages"
            raise InvalidValue(f"there are {found}; one of them is required", "prompt")
        chat = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        given = [name for name in chat if getattr(self, name) is not None]
        if self.messages is None and given:
            raise InvalidValue(f"{given[0]} is allowed only together with messages", given[0])
        if self.messages is not None and self.add_special_tokens:
            raise InvalidValue(
                "add_special_tokens is true; a chat has those of its template alone: send false",
                "add_special_tokens",
            )


class DetokenizeBody(Declared, kw_only=True):
    """The body of /detokenize."""

    FOREIGN: ClassVar[ForeignNames] = _NAMES_OF_IDS

    model: Model | None = None
    tokens: Annotated[
        list[TokenId], Meta(min_length=1, max_length=MAX_TOKEN_IDS, description="Token ids.")
    ]


class TokenList(Given, kw_only=True):
    """The answer of /tokenize."""

    count: Count
    max_model_len: Annotated[Count, said("Tokens of prompt and output together.")]
    tokens: list[int]
    token_strs: None = None


class TokenText(Given, kw_only=True):
    """The answer of /detokenize."""

    prompt: Annotated[str, said("The text, special tokens included.")]

"""What /v1/embeddings takes and gives, as OpenAI has it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from penstock.client.request_terms import Priority, Seconds, User, check_printable
from penstock.protocol.declared import Declared, said
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.sampling import MAX_TOKENS
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.responses import Count, Given

MAX_DIMENSIONS = 65_536


class EmbeddingBody(Declared, kw_only=True):
    """The body of /v1/embeddings."""

    FOREIGN: ClassVar[ForeignNames] = FOREIGN_PARAMETERS

    input: Annotated[
        str | list[str | int | list[int]], said("Text, token ids, or an array of either.")
    ]
    model: Annotated[str, said("The model, by one of its names.")] | None = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        said("How vectors are written: numbers (default), or little-endian float32 in base64."),
    ] = None
    dimensions: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_DIMENSIONS,
                description="Cut vectors to so many numbers, if the model is trained for it.",
            ),
        ]
        | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(
                ge=-1,
                le=MAX_TOKENS,
                description="Keep so many tokens from the beginning of each input, special tokens "
                "included; -1: as many as the model takes.",
            ),
        ]
        | None
    ) = None
    prompt_name: (
        Annotated[
            str,
            Meta(
                max_length=128,
                description="Which of the prompts in the model's folder stands ahead of each text.",
            ),
        ]
        | None
    ) = None
    normalize: (
        Annotated[
            bool, said("Whether vectors have length 1; by default as the model's folder says.")
        ]
        | None
    ) = None
    add_special_tokens: (
        Annotated[bool, said("Add the special tokens around each text (default).")] | None
    ) = None
    user: User | None = None
    priority: Priority | None = None
    deadline_s: Seconds | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        check_printable(self)
        if self.truncate_prompt_tokens == 0:
            raise InvalidValue(
                "truncate_prompt_tokens is 0; a number from 1 on is allowed, or -1",
                "truncate_prompt_tokens",
            )


class Embedding(Given, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: Count
    embedding: Annotated[
        list[float] | str, Meta(description="Numbers, or float32 in base64 if that was asked for.")
    ]


class EmbeddingUsage(Given, kw_only=True):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(Given, kw_only=True):
    """The answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage

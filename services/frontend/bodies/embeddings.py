"""What /v1/embeddings takes and gives, as OpenAI has it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.protocol.declared import said
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.pooling import PooledBody, PromptUsage
from penstock.services.frontend.bodies.responses import Count, Given

MAX_DIMENSIONS = 65_536


class EmbeddingBody(PooledBody, kw_only=True):
    """The body of /v1/embeddings."""

    input: Annotated[
        str | list[str | int | list[int]], said("Text, token ids, or an array of either.")
    ]
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
    normalize: (
        Annotated[
            bool, said("Whether vectors have length 1; by default as the model's folder says.")
        ]
        | None
    ) = None
    add_special_tokens: (
        Annotated[bool, said("Add the special tokens around each text (default).")] | None
    ) = None
    input_type: (
        Annotated[
            Literal["query", "document", "passage", "search_query", "search_document"],
            said(
                "What the texts are, for models that have a prompt for queries and another one for "
                "documents; a passage is a document."
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        super().__post_init__()
        if self.input_type is not None and self.prompt_name:
            raise InvalidValue(
                f"input_type is {self.input_type!r} and prompt_name is {self.prompt_name!r}; one "
                "of them says which prompt stands ahead of the texts",
                "input_type",
            )


class Embedding(Given, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: Count
    embedding: Annotated[
        list[float] | str, Meta(description="Numbers, or float32 in base64 if that was asked for.")
    ]


class EmbeddingList(Given, kw_only=True):
    """The answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage

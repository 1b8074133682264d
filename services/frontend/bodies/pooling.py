"""What requests have in common of which each text becomes a vector or scores, and what those for
scores take and give: /v1/rerank, /v1/score and /v1/classify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock.client.request_terms import Priority, Seconds, User, check_printable
from penstock.protocol.declared import Declared, SameAs, said
from penstock.protocol.sampling import MAX_TOKENS
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.responses import Count, Given

MAX_INPUTS = 2048
"""As OpenAI has it. They are not open all at once: see ``GenerateRequest.window``."""

_TRUNCATES = {
    "max_length": "truncate_prompt_tokens",
    "max_seq_length": "truncate_prompt_tokens",
    "truncate": "truncate_prompt_tokens",
}
_NO_ADAPTER = "adapters (LoRA) only generate; vectors and scores are the model's alone"
_NAMES_OF_VECTORS = ForeignNames(
    {
        **_TRUNCATES,
        "embedding_format": "encoding_format",
        "embedding_type": "encoding_format",
        "embedding_types": "encoding_format",
        "inputs": "input",
        "normalized": "normalize",
        "output_dimension": "dimensions",
        "output_dimensionality": "dimensions",
        "prompt": "input",
        "task": "input_type",
        "texts": "input",
    },
    {
        "adapter": _NO_ADAPTER,
        "images": "not supported yet: models take text alone",
        "instruction": "prompt_name names one of the instructions in the model's folder",
        "late_chunking": "each input becomes a vector of its own",
        "messages": "use input, with the text of a message",
        "stream": "vectors come in one piece",
    },
)
"""What vLLM, Jina, Cohere, Ollama and text-embeddings-inference have for vectors."""
_TEXTS = "use text_1 and text_2, or queries and documents"
_NAMES_OF_OTHERS = ForeignNames(
    {
        **_TRUNCATES,
        "activation": "use_activation",
        "inputs": "input",
        "raw_scores": "use_activation",
        "return_text": "return_documents",
        "softmax": "use_activation",
        "top_k": "top_n",
    },
    {
        "adapter": _NO_ADAPTER,
        "data_1": _TEXTS,
        "data_2": _TEXTS,
        "instruction": "prompt_name names one of the instructions in the model's folder",
        "items": _TEXTS,
        "max_chunks_per_doc": "a document is read in one piece; max_tokens_per_doc cuts it",
        "rank_fields": "put what counts of a document into its text",
        "texts": "use documents, or text_1 and text_2",
    },
)
"""What vLLM, Jina, Cohere and text-embeddings-inference have for the routes of scores."""


class PooledBody(Declared, kw_only=True):
    """The fields of every request for a vector or scores of each text."""

    FOREIGN: ClassVar[ForeignNames] = _NAMES_OF_VECTORS

    model: Annotated[str, said("The model, by one of its names.")] | None = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(
                ge=-1,
                le=MAX_TOKENS,
                description="Keep so many tokens from the beginning of each input, special tokens "
                "included (of a pair the longer text is cut); -1: as many as the model takes.",
            ),
        ]
        | None
    ) = None
    prompt_name: (
        Annotated[
            str,
            Meta(
                max_length=128,
                description="Which of the prompts in the model's folder stands ahead of each text, "
                "or instructs a language model that judges pairs.",
            ),
        ]
        | None
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


class PromptUsage(Given, kw_only=True):
    """Tokens of all prompts; nothing is generated."""

    prompt_tokens: Count
    total_tokens: Count


Text = Annotated[str, Meta(min_length=1)]
UseActivation = Annotated[
    bool,
    said("Whether scores go through the model's activation (default); false gives the logits."),
]


class ScoredBody(PooledBody, kw_only=True):
    """The fields of every request for scores."""

    FOREIGN: ClassVar[ForeignNames] = _NAMES_OF_OTHERS

    use_activation: UseActivation | None = None


# --- /v1/rerank


class Document(Declared, kw_only=True):
    """A document as an object."""

    text: Text


Documents = Annotated[
    list[Text | Document],
    Meta(
        min_length=1,
        max_length=MAX_INPUTS,
        description="Texts, or objects with a text, each of which is rated beside the query.",
    ),
]


class RerankedBody(ScoredBody, kw_only=True):
    """What is said of a query and its documents, however these are given."""

    query: Annotated[Text, said("What the documents are to answer.")]
    top_n: (
        Annotated[
            int,
            Meta(ge=0, le=MAX_TOKENS, description="Give the best so many alone; 0: all (default)."),
        ]
        | None
    ) = None
    return_documents: (
        Annotated[bool, said("Whether results hold the documents' texts (default).")] | None
    ) = None
    max_tokens_per_doc: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_TOKENS,
                description="Keep so many tokens from the beginning of each document; 0: all of it "
                "(default).",
            ),
        ]
        | None
    ) = None


class RerankBody(RerankedBody, kw_only=True):
    """The body of /v1/rerank."""

    documents: Documents


class PlainRerankBody(RerankedBody, kw_only=True):
    """The body of /rerank: that of /v1/rerank, or of text-embeddings-inference, which has texts."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...] | SameAs]] = {
        "truncation_direction": ("right", "Right")
    }

    documents: Documents | None = None
    texts: (
        Annotated[
            list[Text],
            Meta(
                min_length=1,
                max_length=MAX_INPUTS,
                description="In place of documents, as text-embeddings-inference has it; the "
                "answer is an array of index and score then.",
            ),
        ]
        | None
    ) = None
    raw_scores: Annotated[bool, said("With texts: give the logits.")] | None = None
    return_text: Annotated[bool, said("With texts: results hold them.")] | None = None
    truncate: (
        Annotated[bool, said("With texts: keep as many tokens as the model takes.")] | None
    ) = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        super().__post_init__()
        if self.documents is None and self.texts is None:
            raise InvalidValue("documents is missing; it is needed, or texts", "documents")
        given, others = "documents", ["texts", "raw_scores", "return_text", "truncate"]
        if self.documents is None:
            given, others = "texts", ["top_n", "return_documents"]
        for name in others:
            if getattr(self, name) is not None:
                raise InvalidValue(f"{given} and {name} do not go together", name)


class RerankedDocument(Given, kw_only=True):
    text: str


class RerankResult(Given, kw_only=True):
    index: Annotated[int, Meta(ge=0, description="Which of the documents.")]
    relevance_score: Annotated[float, said("The higher the better.")]
    document: (
        Annotated[RerankedDocument, said("Left out with return_documents: false.")]
        | msgspec.UnsetType
    ) = msgspec.UNSET


class RerankList(Given, kw_only=True):
    """The answer of /v1/rerank."""

    object: Literal["list"] = "list"
    results: Annotated[list[RerankResult], said("The best one first.")]
    id: str
    model: str
    usage: PromptUsage


class TextScore(Given, kw_only=True):
    """Of the array that /rerank gives for texts, the best one first."""

    index: Annotated[int, Meta(ge=0, description="Which of the texts.")]
    score: Annotated[float, said("The higher the better.")]
    text: Annotated[str, said("With return_text.")] | msgspec.UnsetType = msgspec.UNSET


# --- /v1/score

_PAIRS = (("text_1", "text_2"), ("queries", "documents"))
_ALLOWED = "text_1 and text_2, or queries and documents,"
Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoreBody(ScoredBody, kw_only=True):
    """The body of /v1/score."""

    text_1: (
        Annotated[Texts, said("A text, which stands beside each of text_2, or as many texts.")]
        | None
    ) = None
    text_2: Annotated[Texts, said("A text, or an array.")] | None = None
    queries: Annotated[Texts, said("Another name of text_1.")] | None = None
    documents: Annotated[Texts, said("Another name of text_2.")] | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        super().__post_init__()
        names = self.names
        for other in (name for pair in _PAIRS for name in pair if name not in names):
            if getattr(self, other) is not None:
                given = next(name for name in names if getattr(self, name) is not None)
                raise InvalidValue(f"{given} and {other} do not go together; {_ALLOWED} do", other)
        for name in names:
            if getattr(self, name) is None:
                raise InvalidValue(f"{name} is missing; {_ALLOWED} are needed", name)
        first, second = self.texts
        if len(first) not in (1, len(second)):
            raise InvalidValue(
                f"{names[0]} holds {len(first)} texts and {names[1]} {len(second)}; one text is "
                "allowed beside many, or as many in both",
                names[0],
            )

    @property
    def names(self) -> tuple[str, str]:
        """Of the two fields that are given."""
        given = (pair for pair in _PAIRS if any(getattr(self, one) is not None for one in pair))
        return next(given, _PAIRS[0])

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        """The first texts, one or as many as the second ones, and these."""
        first, second = (_listed(getattr(self, name)) for name in self.names)
        return first, second


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value


class Score(Given, kw_only=True):
    index: Annotated[int, Meta(ge=0, description="Which of the pairs.")]
    object: Literal["score"] = "score"
    score: Annotated[float, said("The higher the better.")]


class ScoreList(Given, kw_only=True):
    """The answer of /v1/score."""

    object: Literal["list"] = "list"
    data: list[Score]
    id: str
    created: Annotated[int, said("Seconds since the epoch.")]
    model: str
    usage: PromptUsage


# --- /v1/classify


class ClassifyBody(ScoredBody, kw_only=True):
    """The body of /v1/classify."""

    input: Annotated[
        str | list[str | int | list[int]], said("Text, token ids, or an array of either.")
    ]
    add_special_tokens: (
        Annotated[bool, said("Add the special tokens around each text (default).")] | None
    ) = None


class Classification(Given, kw_only=True):
    index: Annotated[int, Meta(ge=0, description="Which of the inputs.")]
    label: Annotated[str, said("The likeliest one.")]
    probs: Annotated[list[float], said("Of all labels, in the order of the model's folder.")]
    num_classes: Count


class ClassificationList(Given, kw_only=True):
    """The answer of /v1/classify."""

    object: Literal["list"] = "list"
    data: list[Classification]
    id: str
    created: Annotated[int, said("Seconds since the epoch.")]
    model: str
    usage: PromptUsage

"""Scores of pairs and of texts: /v1/rerank, /v1/score and /v1/classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.client.request_terms import terms_of
from penstock.client.vectors import likeliest, rank, scores_of
from penstock.protocol.tasks import CLASSIFY, SCORE
from penstock.protocol.wire.messages.requests import PoolingParams
from penstock.services.frontend.bodies.pooling import (
    Classification,
    ClassificationList,
    ClassifyBody,
    Document,
    PlainRerankBody,
    RerankBody,
    RerankedBody,
    RerankedDocument,
    RerankList,
    RerankResult,
    Score,
    ScoreBody,
    ScoredBody,
    ScoreList,
    TextScore,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.interface import Unstreamed
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest, find_model
from penstock.services.frontend.pooled_answers import listed, usage_of
from penstock.services.frontend.pooling_request import parse_inputs, parse_pairs, pooling_request
from penstock.services.frontend.token_arrays import decode_with_ids

GROUP = "Scores"


class ScoresRequest(GenerateRequest, frozen=True):
    """What the renderers know of a request, beside its answers."""

    documents: list[str] | None = None
    """``rerank``: the texts that results hold; ``None``: they hold none."""
    top_n: int = 0
    """``rerank``: so many results; 0: all."""
    lists_scores: bool = False
    """``rerank``: the answer is an array, as text-embeddings-inference has it."""
    labels: list[str] = []
    """``classify``: what the scores of a text stand for."""


def _request(made: GenerateRequest, **more: Any) -> ScoresRequest:
    fields: dict[str, Any] = {name: getattr(made, name) for name in made.__struct_fields__}
    return ScoresRequest(**fields, **more)


def _pooling(body: ScoredBody, document_tokens: int | None = None) -> PoolingParams:
    return PoolingParams(
        activation=body.use_activation,
        prompt_name=body.prompt_name or "",
        document_tokens=document_tokens,
    )


class RerankDialect:
    """As Jina, Cohere and vLLM have it."""

    name = "rerank"
    routes: tuple[str, ...] = ("/v1/rerank", "/v2/rerank")
    bodies = tuple(
        RouteBodies(
            *("POST", path, RerankList, RerankBody),
            summary="Documents by how well they answer a query, the best first",
            group=GROUP,
        )
        for path in ("/v1/rerank", "/v2/rerank")
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, RerankBody, pause or no_pause)
        return _reranked(body, body.documents, models)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> RerankRenderer:
        return RerankRenderer(request, answer_id)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class PlainRerankDialect(RerankDialect):
    """The same, and text-embeddings-inference's, whose route has this path and whose body has
    texts."""

    name = "plain-rerank"
    routes: tuple[str, ...] = ("/rerank",)
    bodies: tuple[RouteBodies, ...] = (
        RouteBodies(
            *("POST", "/rerank", RerankList, PlainRerankBody),
            or_gives=(list[TextScore],),
            summary="Documents or texts by how well they answer a query, the best first",
            group=GROUP,
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, PlainRerankBody, pause or no_pause)
        if body.texts is None:
            return _reranked(body, body.documents or [], models)
        if body.raw_scores is not None:
            body.use_activation = not body.raw_scores
        if body.truncate:
            body.truncate_prompt_tokens = body.truncate_prompt_tokens or -1
        body.return_documents = bool(body.return_text)
        return _reranked(body, body.texts, models, field="texts")


def _reranked(
    body: RerankedBody,
    documents: Sequence[str | Document],
    models: list[ServedModel],
    field: str = "documents",
) -> GenerateRequest:
    """field: which holds the documents. Raises ``ApiError``."""
    model, name = find_model(body.model, models)
    texts = [one if isinstance(one, str) else one.text for one in documents]
    made = pooling_request(
        *(SCORE, model, name, parse_pairs([body.query], texts, "query")),
        _pooling(body, body.max_tokens_per_doc or None),
        truncate=body.truncate_prompt_tokens,
        terms=terms_of(body),
        field=field,
    )
    kept = None if body.return_documents is False else texts
    return _request(made, documents=kept, top_n=body.top_n or 0, lists_scores=field == "texts")


class RerankRenderer(Unstreamed):
    def __init__(self, request: GenerateRequest, answer_id: str) -> None:
        self._head = {"id": f"rerank-{answer_id}", "model": request.model}
        self._documents: list[str] | None = getattr(request, "documents", None)
        self._top_n: int = getattr(request, "top_n", 0)
        self._lists_scores: bool = getattr(request, "lists_scores", False)

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        scores = [scores_of(answer)[0] for answer in answers]
        best = sorted(range(len(scores)), key=lambda index: rank(scores[index]))
        best = best[: self._top_n or None]
        if self._lists_scores:
            return listed(self._text_score(index, scores[index]) for index in best)
        results = listed(self._result(index, scores[index]) for index in best)
        tail = encode({**self._head, "usage": usage_of(usage)})
        return b'{"object":"list","results":%b,%b' % (results, tail[1:])

    def _result(self, index: int, score: float) -> bytes:
        found = RerankResult(index=index, relevance_score=score)
        if self._documents is not None:
            found.document = RerankedDocument(text=self._documents[index])
        return encode(found)

    def _text_score(self, index: int, score: float) -> bytes:
        found = TextScore(index=index, score=score)
        if self._documents is not None:
            found.text = self._documents[index]
        return encode(found)


class ScoreDialect:
    """As vLLM has it."""

    name = "score"
    routes: tuple[str, ...] = ("/v1/score", "/score")
    bodies = tuple(
        RouteBodies(
            *("POST", path, ScoreList, ScoreBody),
            summary="How well the texts of each pair fit together",
            group=GROUP,
        )
        for path in ("/v1/score", "/score")
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, ScoreBody, pause or no_pause)
        model, name = find_model(body.model, models)
        first, second = body.texts
        made = pooling_request(
            *(SCORE, model, name, parse_pairs(first, second, body.names[0])),
            _pooling(body),
            truncate=body.truncate_prompt_tokens,
            terms=terms_of(body),
            field=body.names[1],
        )
        return _request(made)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> ScoreRenderer:
        return ScoreRenderer(request.model, f"score-{answer_id}", created)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class ScoreRenderer(Unstreamed):
    def __init__(self, model: str, answer_id: str, created: int) -> None:
        self._head = {"id": answer_id, "created": created, "model": model}

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        data = listed(encode(self._one(index, answer)) for index, answer in enumerate(answers))
        tail = encode({**self._head, "usage": usage_of(usage)})
        return b'{"object":"list","data":%b,%b' % (data, tail[1:])

    def _one(self, index: int, answer: Answer) -> Score | Classification:
        return Score(index=index, score=scores_of(answer)[0])


class ClassifyDialect:
    """As vLLM has it."""

    name = "classify"
    routes: tuple[str, ...] = ("/v1/classify", "/classify")
    bodies = tuple(
        RouteBodies(
            *("POST", path, ClassificationList, ClassifyBody),
            summary="The likeliest label of each text, and the shares of all",
            group=GROUP,
        )
        for path in ("/v1/classify", "/classify")
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_with_ids(raw, ClassifyBody, pause, "input")
        model, name = find_model(body.model, models)
        truncate = body.truncate_prompt_tokens
        prompts = parse_inputs(
            body.input, model, truncate, add_special_tokens=body.add_special_tokens is not False
        )
        made = pooling_request(
            *(CLASSIFY, model, name, prompts, _pooling(body)),
            truncate=truncate,
            terms=terms_of(body),
        )
        return _request(made, labels=model.labels)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> ScoreRenderer:
        labels: list[str] = getattr(request, "labels", [])
        return ClassifyRenderer(request.model, f"classify-{answer_id}", created, labels)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class ClassifyRenderer(ScoreRenderer):
    def __init__(self, model: str, answer_id: str, created: int, labels: list[str]) -> None:
        super().__init__(model, answer_id, created)
        self._labels = labels

    def _one(self, index: int, answer: Answer) -> Classification:
        shares = scores_of(answer).tolist()
        return Classification(
            index=index,
            label=likeliest(shares, self._labels),
            probs=shares,
            num_classes=len(shares),
        )

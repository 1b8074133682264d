"""Cohere's SDK: documents reranked by its second API."""

from __future__ import annotations

import cohere
import pytest
from asked import DOCUMENTS, QUERY


@pytest.fixture
def client(base_url: str, api_key: str) -> cohere.ClientV2:
    return cohere.ClientV2(api_key=api_key, base_url=base_url)


def test_documents_come_sorted_with_their_places(client: cohere.ClientV2, reranker: str) -> None:
    answer = client.rerank(model=reranker, query=QUERY, documents=DOCUMENTS)
    assert sorted(one.index for one in answer.results) == [0, 1, 2]
    scores = [one.relevance_score for one in answer.results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    best = client.rerank(model=reranker, query=QUERY, documents=DOCUMENTS, top_n=1)
    assert [(one.index, one.relevance_score) for one in best.results] == [
        (answer.results[0].index, answer.results[0].relevance_score)
    ]
    cut = client.rerank(model=reranker, query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=4)
    assert len(cut.results) == 3


def test_errors_are_its_own(client: cohere.ClientV2, base_url: str, reranker: str) -> None:
    with pytest.raises(cohere.errors.NotFoundError):
        client.rerank(model="none", query=QUERY, documents=DOCUMENTS)
    with pytest.raises(cohere.errors.BadRequestError):
        client.rerank(model=reranker, query=QUERY, documents=["word " * 1000])
    stranger = cohere.ClientV2(api_key="wrong", base_url=base_url)
    with pytest.raises(cohere.errors.UnauthorizedError):
        stranger.rerank(model=reranker, query=QUERY, documents=DOCUMENTS)

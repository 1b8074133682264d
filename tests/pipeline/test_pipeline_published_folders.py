"""A server of folders in the form in which Qwen3-Embedding and EmbeddingGemma were published, asked
by OpenAI's SDK for vectors of fewer dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest
from support.pipeline.published_folders import HIDDEN, write_embedding_gemma, write_qwen3_embedding
from support.pipeline.served import Served, served

QWEN3, GEMMA = "Qwen3-Embedding-tiny", "embeddinggemma-tiny"
TEXTS = ["a weir", "What is a sluice?"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    models = write_qwen3_embedding(folder / QWEN3), write_embedding_gemma(folder / GEMMA)
    with served(*map(str, models), "--device", "cpu", "--dtype", "float32") as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_vectors_have_as_many_dimensions_as_are_asked_for(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model=QWEN3, input=TEXTS).data
    for dimensions in (32, 40, HIDDEN):
        cut = client.embeddings.create(model=QWEN3, input=TEXTS, dimensions=dimensions).data
        for short, long in zip(cut, whole, strict=True):
            beginning = np.array(long.embedding[:dimensions])
            wanted = beginning / np.linalg.norm(beginning)
            np.testing.assert_allclose(short.embedding, wanted, atol=1e-6)
    with pytest.raises(openai.BadRequestError, match=r"is 31; .* may be cut to 32 or more"):
        client.embeddings.create(model=QWEN3, input=TEXTS, dimensions=31)


def test_lengths_that_a_model_was_not_trained_for_are_refused(client: openai.OpenAI) -> None:
    assert len(client.embeddings.create(model=GEMMA, input="a").data[0].embedding) == HIDDEN
    with pytest.raises(openai.BadRequestError, match="cut to 128, 256, 512, 768, or start"):
        client.embeddings.create(model=GEMMA, input="a", dimensions=32)

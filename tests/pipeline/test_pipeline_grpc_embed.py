"""Vectors over gRPC, of the null device: they begin with the prompt's length and its last token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.pipeline.grpc_client import address_of, details_of, stub_of
from support.pipeline.served import VECTORS, Served, SharedServers, served

from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.grpc.engine import vllm_engine_pb2, vllm_engine_pb2_grpc

BUILT_IN = Path(__file__).parents[2] / "demo/model"


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*VECTORS)


@pytest.fixture(scope="module")
def channel(server: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address_of(server)) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return stub_of(channel)


def ids(*tokens: int) -> pb.Input:
    return pb.Input(token_ids=pb.TokenIds(ids=tokens))


def test_vectors_are_those_of_http(server: Served, stub: Any) -> None:
    texts = [f"text number {number}" for number in range(100)]
    status, body = server.post("/v1/embeddings", {"input": texts})
    assert status == 200, body
    answer = stub.Embed(pb.EmbedRequest(inputs=[pb.Input(text=text) for text in texts]))
    assert answer.model == "vectors"
    assert [list(one.values) for one in answer.vectors] == [
        pytest.approx(one["embedding"]) for one in body["data"]
    ]
    assert answer.usage.prompt_tokens == body["usage"]["prompt_tokens"]


def test_token_ids_become_vectors_and_options_hold(channel: grpc.Channel, stub: Any) -> None:
    inputs = [ids(5, 6, 7), ids(8)]
    answer = stub.Embed(pb.EmbedRequest(inputs=inputs, normalize=False))
    assert [list(one.values) for one in answer.vectors] == [[3, 7], [1, 8]]
    (vector,) = stub.Embed(pb.EmbedRequest(inputs=[ids(5, 6, 4)])).vectors
    assert list(vector.values) == pytest.approx([0.6, 0.8])
    engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    tokens = vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 4])
    found = engine.Embed(vllm_engine_pb2.EmbedRequest(request_id="one", tokenized=tokens))
    assert list(found.embedding) == pytest.approx([0.6, 0.8])
    assert (found.prompt_tokens, found.embedding_dim) == (3, 2)
    assert not engine.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest()).is_generation


@pytest.mark.parametrize(
    ("method", "asked", "field", "said"),
    [
        ("Embed", pb.EmbedRequest(inputs=[pb.Input()]), "inputs", "inputs[0] is empty"),
        ("Embed", pb.EmbedRequest(), "input", "input is empty"),
        (
            "Embed",
            pb.EmbedRequest(inputs=[ids(1)], dimensions=0),
            "dimensions",
            "dimensions is 0",
        ),
        ("Score", pb.ScoreRequest(texts=["a"]), "model", "it does: embed (/v1/embeddings)"),
        ("Score", pb.ScoreRequest(), "texts", "texts is missing"),
        ("Score", pb.ScoreRequest(query="a", texts=["a"]), "model", "not do the task 'score'"),
        ("Generate", pb.GenerateRequest(text="a"), "model", "generates no text"),
    ],
)
def test_what_the_model_does_not_do_is_refused_by_name(
    stub: Any, method: str, asked: Any, field: str, said: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(getattr(stub, method)(asked))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in caught.value.details()
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == field


@pytest.mark.slow
def test_texts_are_judged_beside_a_query_in_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-tiny"  # by whose name it is asked in that model's words
    folder.symlink_to(BUILT_IN)
    flags = (str(folder), "--device", "null", "--task", "score", "--grpc-port", "0")
    with served(*flags) as server, grpc.insecure_channel(address_of(server)) as channel:
        stub = stub_of(channel)
        assert list(stub.Models(pb.ModelsRequest()).models[0].tasks) == ["score"]
        texts = ["a weir", "a penstock and a weir", "a weir"]
        answer = stub.Score(pb.ScoreRequest(query="What is a penstock?", texts=texts))
        first, second, again = [one.values[0] for one in answer.scores]
        assert first == again != second
        assert answer.usage.prompt_tokens > 0
        with pytest.raises(grpc.RpcError) as caught:
            stub.Score(pb.ScoreRequest(texts=texts))
        assert "does not do the task 'classify'" in caught.value.details()

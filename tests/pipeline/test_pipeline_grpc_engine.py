"""The engine protocol of gateways: tokens in, tokens out."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.pipeline.grpc_client import address_of, details_of
from support.pipeline.served import BUILT_IN, Served, SharedServers

from penstock.protocol.grpc.engine import common_pb2, vllm_engine_pb2_grpc
from penstock.protocol.grpc.engine import vllm_engine_pb2 as pb
from penstock.services.frontend.grpc.engine.tokenizer_files import PIECE_BYTES, archive_of, pieces


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*BUILT_IN)


@pytest.fixture(scope="module")
def stub(server: Served) -> Iterator[Any]:
    with grpc.insecure_channel(address_of(server)) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def prompt_of(server: Served, text: str) -> pb.TokenizedInput:
    return pb.TokenizedInput(input_ids=server.post("/tokenize", {"prompt": text})[1]["tokens"])


def test_tokens_are_those_of_http_streamed_and_whole(server: Served, stub: Any) -> None:
    body = {
        "prompt": "Tell me",
        "return_token_ids": True,
        "max_tokens": 12,
        "seed": 3,
        "n": 2,
        "temperature": 1.5,
        "logprobs": 1,
    }
    status, expected = server.post("/v1/completions", body)
    assert status == 200, expected
    ids = [choice["token_ids"] for choice in expected["choices"]]
    sampling = pb.SamplingParams(max_tokens=12, seed=3, n=2, temperature=1.5, logprobs=1)
    asked = pb.GenerateRequest(
        request_id="from-gateway",
        tokenized=prompt_of(server, "Tell me"),
        sampling_params=sampling,
        stream=True,
    )
    chunks: list[list[int]] = [[], []]
    logprobs: list[list[float]] = [[], []]
    ends = {}
    for message in stub.Generate(asked):
        if message.HasField("chunk"):
            chunk = message.chunk
            assert chunk.completion_tokens == len(chunk.token_ids)
            assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
            chunks[chunk.index] += chunk.token_ids
            logprobs[chunk.index] += chunk.output_logprobs.token_logprobs
        else:
            ends[message.complete.index] = message.complete
    assert chunks == ids
    for own, choice in zip(logprobs, expected["choices"], strict=True):
        assert own == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    asked.stream = False
    whole = {one.complete.index: one.complete for one in stub.Generate(asked)}
    assert [list(whole[index].output_ids) for index in range(2)] == ids
    for index, choice in enumerate(expected["choices"]):
        assert ends[index].finish_reason == choice["finish_reason"]
        assert whole[index].completion_tokens == len(ids[index])
        assert whole[index].prompt_tokens == expected["usage"]["prompt_tokens"]
    assert '"id":"from-gateway"' in server.find(r'(\{"id":"from-gateway".*)')


def test_an_answer_without_a_limit_may_fill_the_context_and_is_ended_by_its_id(
    server: Served, stub: Any
) -> None:
    sampling = pb.SamplingParams(ignore_eos=True, seed=1)
    asked = pb.GenerateRequest(
        request_id="endless", tokenized=prompt_of(server, "Hi"), sampling_params=sampling,
        stream=True,
    )  # fmt: skip
    stream = stub.Generate(asked)
    for _ in range(20):
        next(stream)
    stub.Abort(pb.AbortRequest(request_ids=["endless"]))
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_a_constraint_and_a_stop_string_hold(server: Served, stub: Any) -> None:
    sampling = pb.SamplingParams(
        temperature=0, max_tokens=8, choice=pb.ChoiceConstraint(choices=["blue"])
    )
    asked = pb.GenerateRequest(tokenized=prompt_of(server, "Hi"), sampling_params=sampling)
    (message,) = stub.Generate(asked)
    ids = list(message.complete.output_ids)
    assert server.post("/detokenize", {"tokens": ids})[1]["prompt"].startswith("blue")
    del sampling.stop[:]
    sampling.ClearField("constraint")
    sampling.stop.append("e")
    sampling.max_tokens = 200
    asked.sampling_params.CopyFrom(sampling)
    (message,) = stub.Generate(asked)
    assert message.complete.matched_stop_str == "e"
    assert message.complete.finish_reason == "stop"


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("mm_inputs", pb.GenerateRequest(mm_inputs=pb.Unsupported())),
        ("kv_transfer_params_json", pb.GenerateRequest(kv_transfer_params_json="{}")),
        ("data_parallel_rank", pb.GenerateRequest(data_parallel_rank=0)),
        (
            "structural_tag",
            pb.GenerateRequest(sampling_params=pb.SamplingParams(structural_tag="{}")),
        ),
        ("prompt", pb.GenerateRequest()),
        ("logprobs", pb.GenerateRequest(sampling_params=pb.SamplingParams(logprobs=-1))),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    stub: Any, field: str, asked: pb.GenerateRequest
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(asked))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == field


def test_a_gateway_learns_what_it_needs_to_know(server: Served, stub: Any) -> None:
    model = stub.GetModelInfo(pb.GetModelInfoRequest())
    listed = server.post("/tokenize", {"prompt": "Hi"})[1]
    assert model.served_model_name == "penstock-demo"
    assert model.is_generation
    assert model.max_context_length == listed["max_model_len"]
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.max_num_seqs > 0
    (load,) = stub.GetLoads(pb.GetLoadsRequest()).loads
    assert load.max_running_requests == info.max_num_seqs
    assert load.max_total_num_tokens > model.max_context_length
    assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
    assert not stub.FlushCache(common_pb2.FlushCacheRequest()).success
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_gateway_fetches_the_tokenizer(server: Served, stub: Any) -> None:
    pieces = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    packed = b"".join(piece.data for piece in pieces)
    digests = [piece.sha256 for piece in pieces]
    assert digests == [""] * (len(pieces) - 1) + [hashlib.sha256(packed).hexdigest()]
    folder = Path(stub.GetModelInfo(pb.GetModelInfoRequest()).tokenizer_path)
    with zipfile.ZipFile(io.BytesIO(packed)) as files:
        assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= set(files.namelist())
        assert not [name for name in files.namelist() if "safetensors" in name]
        for name in files.namelist():
            assert files.read(name) == (folder / name).read_bytes()


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_large_archive_comes_in_pieces_whose_last_one_has_the_digest(size: int) -> None:
    packed = bytes(size)
    found = list(pieces(archive_of(packed)))
    assert b"".join(one.data for one in found) == packed
    assert all(0 < len(one.data) <= PIECE_BYTES for one in found)
    digest = hashlib.sha256(packed).hexdigest()
    assert [one.sha256 for one in found] == [""] * (len(found) - 1) + [digest]

"""What tests do with the generated stubs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import grpc
from google.rpc import error_details_pb2, status_pb2
from support.pipeline.served import Served

from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.grpc import penstock_pb2_grpc


def address_of(server: Served) -> str:
    return server.find(r'"grpc": "([^"]+)"')


def stub_of(channel: grpc.Channel) -> Any:
    return penstock_pb2_grpc.PenstockStub(channel)


class Gathered(NamedTuple):
    """What came of a stream, by choice."""

    id: str
    model: str
    texts: list[str]
    thoughts: list[str]
    token_ids: list[list[int]]
    calls: list[dict[int, tuple[str, str, str]]]
    finishes: list[str]
    logprobs: list[list[Any]]
    usage: pb.Usage
    messages: int
    prompt_token_ids: list[int]
    prompt_logprobs: list[Any]


def gathered(messages: Iterable[Any], choices: int = 1) -> Gathered:
    found = Gathered(
        "", "", *([""] * choices for _ in range(2)), [[] for _ in range(choices)],
        [{} for _ in range(choices)], [""] * choices, [[] for _ in range(choices)],
        pb.Usage(), 0, [], [],
    )  # fmt: skip
    for message in messages:
        found = found._replace(
            id=found.id + message.id,
            model=found.model + message.model,
            messages=found.messages + 1,
        )
        found.prompt_token_ids.extend(message.prompt_token_ids)
        found.prompt_logprobs.extend(message.prompt_logprobs)
        found.usage.MergeFrom(message.usage)
        for delta in message.deltas:
            n = delta.index
            found.texts[n] += delta.text
            found.thoughts[n] += delta.reasoning
            found.token_ids[n].extend(delta.token_ids)
            found.logprobs[n].extend(delta.logprobs)
            for call in delta.tool_calls:
                old = found.calls[n].get(call.index, ("", "", ""))
                new = (old[0] + call.id, old[1] + call.name, old[2] + call.arguments)
                found.calls[n][call.index] = new
            if delta.HasField("finish"):
                found.finishes[n] += pb.Finish.Reason.Name(delta.finish.reason)
    return found


def details_of(error: grpc.RpcError) -> dict[str, Any]:
    """The details behind an error, by the names of their types."""
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(packed)
    assert status.message == error.details()
    assert status.code == error.code().value[0]
    found = {}
    for one in status.details:
        name = one.type_url.rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert one.Unpack(found[name])
    return found

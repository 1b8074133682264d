"""What a gRPC message asks for beside its prompt and its sampling."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc")

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.services.frontend.grpc.requests import generate_request


@pytest.mark.parametrize("asked", [True, False, None])
def test_an_answer_that_repeats_is_asked_for_by_an_option(asked: bool | None) -> None:
    options = pb.Options() if asked is None else pb.Options(deterministic=asked)
    message = pb.GenerateRequest(text="Hi", options=options)
    made = generate_request(message, [ServedModel("m", [], 64, 100)], None)
    assert made.terms.deterministic is bool(asked)

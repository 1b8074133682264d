"""gRPC with keys, TLS and several frontends; readers that do not read; a server that goes down."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.pipeline.grpc_client import address_of, details_of, gathered, stub_of
from support.pipeline.in_process import called
from support.pipeline.served import Served, served

from penstock.protocol.grpc import penstock_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NAME = "localhost"
KEYS = [("authorization", "Bearer a-key")], [("x-api-key", "a-key")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key)."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(folder: Path) -> tuple[Path, Path]:
    files = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={NAME}", "-addext"),
            *(f"subjectAltName=DNS:{NAME}", "-out", str(files[0]), "-keyout", str(files[1])),
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


def add_key(keys: Path, name: str, *limits: str) -> str:
    done = called("keys", "add", name, *limits, "--keys-file", str(keys))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def limited(keys: Path) -> str:
    """A key that may begin one request a minute."""
    return add_key(keys, "somebody", "--requests-per-minute", "1")


@pytest.fixture(scope="module")
def another(keys: Path) -> str:
    return add_key(keys, "another")


@pytest.fixture(scope="module")
def server(
    certificate: tuple[Path, Path], keys: Path, limited: str, another: str
) -> Iterator[Served]:
    cert, key = map(str, certificate)
    tls = ("--tls-cert", cert, "--tls-key", key)
    with served(
        *("--device", "null", "--grpc-port", "0", "--frontends", "2", "--max-num-seqs", "256"),
        *("--num-kv-blocks", "40000", "--null-step-ms", "2", *tls),
        environment={"PENSTOCK_API_KEY": '["a-key"]', "PENSTOCK_KEYS_FILE": str(keys)},
    ) as server:
        yield server


def connect(server: Served, certificate: tuple[Path, Path]) -> grpc.Channel:
    """Each has a connection of its own, so that they spread over the frontends."""
    port = address_of(server).rpartition(":")[2]
    trusted = grpc.ssl_channel_credentials(certificate[0].read_bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"{NAME}:{port}", trusted, options)


def test_a_key_is_wanted_over_tls_and_health_wants_none(
    server: Served, certificate: tuple[Path, Path]
) -> None:
    with connect(server, certificate) as channel:
        stub = stub_of(channel)
        for metadata in KEYS:
            assert stub.Models(pb.ModelsRequest(), metadata=metadata).models[0].ready
        for wrong in ([], [("x-api-key", "another")]):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Models(pb.ModelsRequest(), metadata=wrong)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert details_of(caught.value)["ErrorInfo"].reason == "invalid_api_key"
        health = health_pb2_grpc.HealthStub(channel)
        while health.Check(health_pb2.HealthCheckRequest()).status != SERVING:
            time.sleep(0.02)  # one frontend may be ready a moment before the other
    plain = grpc.insecure_channel(address_of(server))
    with plain, pytest.raises(grpc.RpcError) as caught:
        stub_of(plain).Models(pb.ModelsRequest(), metadata=KEYS[0])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_nothing_is_read_of_a_call_without_a_key(
    server: Served, certificate: tuple[Path, Path]
) -> None:
    done = threading.Event()

    def never() -> Iterator[bytes]:
        done.wait(60)
        yield from ()

    with connect(server, certificate) as channel:
        call = channel.stream_unary("/penstock.v1.Penstock/Models")
        with pytest.raises(grpc.RpcError) as caught:
            call(never(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        done.set()


def test_the_limits_of_a_key_hold(
    server: Served, certificate: tuple[Path, Path], limited: str
) -> None:
    asked = pb.GenerateRequest(text="Hi", sampling=pb.Sampling(max_tokens=2))
    metadata = [("x-api-key", limited)]
    with connect(server, certificate) as channel:
        stub = stub_of(channel)
        first = stub.Generate(asked, metadata=metadata)
        assert gathered(first).usage
        assert dict(first.trailing_metadata())["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(asked, metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "The key somebody has begun 1 requests in the last minute" in caught.value.details()
    details = details_of(caught.value)
    assert details["ErrorInfo"].reason == "rate_limit_exceeded"
    assert 0 < details["RetryInfo"].retry_delay.ToMilliseconds() <= 61_000


def test_a_request_of_another_key_is_not_ended(
    server: Served, certificate: tuple[Path, Path], another: str
) -> None:
    other = [("x-api-key", another)]
    mine = [*KEYS[0], ("x-request-id", "mine-1")]
    sampling = pb.Sampling(max_tokens=1500, ignore_eos=True)
    with connect(server, certificate) as channel:
        stub = stub_of(channel)
        stream = stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling), metadata=mine)
        next(stream)
        asked = pb.AbortRequest(ids=["mine-1"])
        assert list(stub.Abort(asked, metadata=other).aborted) == []
        assert list(stub.Abort(asked, metadata=KEYS[0]).aborted) == ["mine-1"]
        with pytest.raises(grpc.RpcError):
            list(stream)


def test_a_request_is_ended_by_its_id_in_whatever_frontend_it_runs(
    server: Served, certificate: tuple[Path, Path]
) -> None:
    sampling = pb.Sampling(max_tokens=1500, ignore_eos=True)
    with connect(server, certificate) as channel:
        for number in range(6):
            name = f"anywhere-{number}"
            metadata = [*KEYS[0], ("x-request-id", name)]
            asked = pb.GenerateRequest(text="Hi", sampling=sampling)
            stream = stub_of(channel).Generate(asked, metadata=metadata)
            next(stream)
            with connect(server, certificate) as other:
                ended = stub_of(other).Abort(pb.AbortRequest(ids=[name]), metadata=KEYS[0])
            assert list(ended.aborted) == [name]
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_connections_spread_over_the_frontends(
    server: Served, certificate: tuple[Path, Path]
) -> None:
    asked = pb.GenerateRequest(text="Hi", sampling=pb.Sampling(max_tokens=2, ignore_eos=True))
    for number in range(16):
        with connect(server, certificate) as channel:
            metadata = [*KEYS[0], ("x-request-id", f"spread-{number}")]
            assert gathered(stub_of(channel).Generate(asked, metadata=metadata)).usage
    server.find(r'("id":"spread-15")')
    lines = [line for line in server.lines if '"id":"spread-' in line]
    pids = {line.partition('"pid":')[2].partition(",")[0] for line in lines}
    assert len(pids) == 2


def test_a_changed_certificate_holds_for_who_connects_from_then_on(
    server: Served, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    def listed(channel: grpc.Channel) -> Any:
        return stub_of(channel).Models(pb.ModelsRequest(), metadata=KEYS[0], timeout=60).models

    with connect(server, certificate) as old:
        assert listed(old)
        for mine, new in zip(certificate, make_certificate(tmp_path), strict=True):
            new.replace(mine)
        with connect(server, certificate) as new_one:
            assert listed(new_one)
        assert listed(old)


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    """The last test ends it."""
    with served("--device", "null", "--grpc-port", "0", "--null-step-ms", "5") as server:
        yield server


def test_a_client_that_does_not_read_is_given_up(plain: Served) -> None:
    server = plain
    sampling = pb.Sampling(max_tokens=2000, n=32, ignore_eos=True, logprobs=20)
    with grpc.insecure_channel(address_of(server)) as channel:
        asked = pb.GenerateRequest(text="Hi", sampling=sampling)
        stream = stub_of(channel).Generate(asked, metadata=[("x-request-id", "slow-1")])
        next(stream)
        assert "bytes wait for it" in server.find(r"(a reader is cut off: [^\"]*)")
        assert '"error":"slow_reader"' in server.find(r'(\{"id":"slow-1","route".*)')
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code().name in ("RESOURCE_EXHAUSTED", "CANCELLED")
    assert server.settled()["penstock_kv_blocks_used"] == 0


def test_a_frontend_that_is_started_by_hand_shares_the_port_and_no_stranger_does(
    plain: Served,
) -> None:
    port = address_of(plain).rpartition(":")[2]
    code = "import sys; from penstock.services.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "frontend", "--port", "0", "--grpc-port"]
    router = ("--router", plain.router)
    with subprocess.Popen([*command, port, *router], stderr=subprocess.PIPE, text=True) as joined:
        assert joined.stderr is not None
        lines = iter(joined.stderr)
        assert any("gRPC listens" in line for line in lines)
        joined.send_signal(signal.SIGTERM)
        joined.communicate(timeout=60)
        assert joined.returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*command, port, *router], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "for gRPC" in done.stderr and "choose another --grpc-port" in done.stderr


def test_a_server_that_goes_down_says_so_and_lets_streams_finish(plain: Served) -> None:
    server = plain
    with grpc.insecure_channel(address_of(server)) as channel:
        stub, health = stub_of(channel), health_pb2_grpc.HealthStub(channel)
        watched = health.Watch(health_pb2.HealthCheckRequest(service="penstock.v1.Penstock"))
        assert next(watched).status == SERVING
        sampling = pb.Sampling(max_tokens=400, ignore_eos=True)
        stream = stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value)["RetryInfo"].retry_delay.seconds == 1
        assert gathered(stream).usage.completion_tokens == 400
        assert server.process.wait(60) == 0


def start(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    run = code or "from penstock.services.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {run}", "serve", "--device", "null", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PENSTOCK_PORT": "0"},
    )


def test_a_port_that_somebody_else_has_is_refused_at_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start("--grpc-port", str(port))
    assert done.returncode == 4
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "choose another --grpc-port" in done.stderr


def test_without_its_packages_the_start_says_how_to_install_them() -> None:
    hidden: Any = "sys.modules['grpc_health'] = None; "
    run = "from penstock.services.cli import main; sys.exit(main(sys.argv[1:]))"
    done = start("--grpc-port", "0", code=hidden + run)
    assert done.returncode == 2
    assert "pip install 'penstock[grpc]'" in done.stderr
    assert "grpc_health" in done.stderr

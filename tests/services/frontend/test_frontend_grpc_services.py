"""Calls of gRPC that give files and end requests."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import stat
import zipfile
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from support.frontend.frontend_scripted import forever
from support.frontend.grpc_scripted import Scripted, run
from support.frontend.key_files import Keys

from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.grpc import penstock_pb2_grpc
from penstock.protocol.grpc.engine import common_pb2, vllm_engine_pb2_grpc
from penstock.protocol.grpc.engine import vllm_engine_pb2 as engine
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.messages.administration import Ask, RequestNames
from penstock.services.frontend.grpc.engine import tokenizer_files
from penstock.services.frontend.grpc.server import GrpcServer
from penstock.services.frontend.requests.routes import answer

ASKED = common_pb2.GetTokenizerRequest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    (found / "tokenizer.json").write_text("{}")
    (found / "weights.safetensors").write_text("no file of a tokenizer")
    return found


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of files in each archive that is made."""
    found: list[int] = []
    pack = tokenizer_files._packed

    def counted(files: Any) -> bytes:
        found.append(len(files))
        return pack(files)

    monkeypatch.setattr(tokenizer_files, "_packed", counted)
    return found


def test_a_unix_socket_takes_the_place_of_one_that_was_left_and_is_its_users_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    async def use(one: Scripted) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = penstock_pb2_grpc.PenstockStub(channel)
            assert (await stub.Models(pb.ModelsRequest())).models
            assert [m async for m in stub.Generate(pb.GenerateRequest(text="Hi"))]
        assert [work.head.tenant for work in one.gateway.works] == [""]
        with pytest.raises(AddressError, match=r"--grpc-uds \S+: another process listens there"):
            await GrpcServer(one.context).start()

    run(use, config=ServerConfig(grpc_uds=str(path)))
    assert not path.exists()


async def fetched(channel: grpc.aio.Channel, **asked: Any) -> dict[str, bytes]:
    """The files by their names. Raises ``AioRpcError``."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    data = b"".join([piece.data async for piece in stub.GetTokenizer(ASKED, **asked)])
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        return {name: files.read(name) for name in files.namelist()}


async def all_of(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


def test_a_tokenizer_is_packed_once_until_its_folder_changes(
    folder: Path, packed: list[int]
) -> None:
    async def use(one: Scripted) -> None:
        async with one.channel() as channel:
            await asyncio.gather(*(fetched(channel) for _ in range(5)))
            assert await fetched(channel) == {"tokenizer.json": b"{}"}
            assert packed == [1]
            (folder / "tokenizer.json").write_text('{"changed": true}')
            assert await fetched(channel) == {"tokenizer.json": b'{"changed": true}'}
            (folder / "chat_template.jinja").write_text("{{ messages }}")
            assert len(await fetched(channel)) == 2
            os.utime(folder / "tokenizer.json", (0, 0))  # older than an archive can say
            assert len(await fetched(channel)) == 2
            assert packed == [1, 1, 2, 2]

    run(use, config=ServerConfig(grpc_port=0, grpc_tokenizer=str(folder)))


def test_no_files_and_too_many_bytes_are_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_BYTES", 1)

    async def use(one: Scripted) -> None:
        async with one.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="2 bytes; 1 are sent") as caught:
                await fetched(channel)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            (folder / "tokenizer.json").unlink()
            with pytest.raises(grpc.aio.AioRpcError, match="no tokenizer files") as caught:
                await fetched(channel)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(use, config=ServerConfig(grpc_port=0, grpc_tokenizer=str(folder)))


def test_who_may_not_use_the_model_gets_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    mine = keys.add("mine", models=["org/model"])
    other = keys.add("other", models=["org/other"])

    async def use(one: Scripted) -> None:
        async with one.channel() as channel:
            for key, code in ((mine, None), (other, grpc.StatusCode.NOT_FOUND)):
                metadata = [("authorization", key["Authorization"])]
                if code is None:
                    assert await fetched(channel, metadata=metadata)
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await fetched(channel, metadata=metadata)
                assert caught.value.code() is code

    config = msgspec.structs.replace(keys.config, grpc_port=0, grpc_tokenizer=str(folder))
    run(use, config=config)


def test_a_gateway_that_takes_nothing_of_the_tokenizer_is_given_up(folder: Path) -> None:
    async def use(one: Scripted) -> None:
        async with one.raw(window=0) as silent:
            silent.call("/vllm.grpc.engine.VllmEngine/GetTokenizer", b"")
            while not one.server.running.count:
                await asyncio.sleep(0.01)
            while one.server.running.count:
                await asyncio.sleep(0.01)

    run(use, config=ServerConfig(grpc_port=0, grpc_tokenizer=str(folder)), stall_s=0.3)


def test_many_requests_are_ended_with_one_question_to_the_other_frontends() -> None:
    asked: list[tuple[str, RequestNames]] = []

    def told(what: str, about: bytes) -> bytes:
        names = msgspec.msgpack.decode(about, type=RequestNames)
        asked.append((what, names))
        return msgspec.msgpack.encode([int(name == "elsewhere") for name in names.ids])

    async def use(one: Scripted) -> None:
        one.gateway.others_answer = [told, lambda what, about: b""]
        async with one.channel() as channel:
            stub = penstock_pb2_grpc.PenstockStub(channel)
            streams = []
            for name in ("one", "two"):
                metadata = [("x-request-id", name)]
                streams.append(stub.Generate(pb.GenerateRequest(text="Hi"), metadata=metadata))
                await streams[-1].read()
            ids = ["one", "nowhere", "elsewhere", "two", "one", "no\nid"]
            ended = await stub.Abort(pb.AbortRequest(ids=ids))
            assert list(ended.aborted) == ["one", "elsewhere", "two"]
            ((what, names),) = asked
            assert (what, names.ids) == ("abort_requests", ["one", "nowhere", "elsewhere", "two"])
            assert names.owner == "at 127.0.0.1"
            for stream in streams:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await all_of(stream)
                assert caught.value.code() is grpc.StatusCode.CANCELLED
            gateway = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            await gateway.Abort(engine.AbortRequest(request_ids=["a", "b"]))
            assert len(asked) == 2
            await gateway.Abort(engine.AbortRequest())
            assert len(asked) == 2

    run(use, forever)


def test_another_frontend_ends_those_of_the_owner_and_says_how_many() -> None:
    async def use(one: Scripted) -> None:
        def told(about: bytes) -> bytes:
            return answer(one.context, Ask("", 1, "abort_requests", about)).answer

        async with one.channel() as channel:
            stub = penstock_pb2_grpc.PenstockStub(channel)
            metadata = [("x-request-id", "mine")]
            stream = stub.Generate(pb.GenerateRequest(text="Hi"), metadata=metadata)
            await stream.read()
            names = RequestNames(["other", "mine"], "somebody")
            assert told(msgspec.msgpack.encode(names)) == b""
            assert told(b"\xc1") == b""
            names = RequestNames(["other", "mine"], "at 127.0.0.1")
            assert msgspec.msgpack.decode(told(msgspec.msgpack.encode(names))) == [0, 1]

    run(use, forever)

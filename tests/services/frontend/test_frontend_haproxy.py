"""Frontends behind HAProxy, with the files in deploy/ but for addresses."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import grpc
import pytest
from support.frontend.frontend_scripted import JSON, Script, ScriptedGateway, forever, say
from support.frontend.grpc_scripted import RawClient
from support.polling import async_until

from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.grpc import penstock_pb2_grpc
from penstock.services.frontend.app import make_app, start
from penstock.services.frontend.connection import Runner
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.grpc.server import GrpcServer

DEPLOY = Path(__file__).parents[3] / "deploy"
ASKED = pb.GenerateRequest(text="Hi")
pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed here"
)


class Frontend(NamedTuple):
    gateway: ScriptedGateway
    http: int
    grpc: int
    runner: Runner


@contextlib.asynccontextmanager
async def frontend(script: Script) -> AsyncIterator[Frontend]:
    gateway = ScriptedGateway(script)
    config = ServerConfig(grpc_port=0, trusted_proxies=["127.0.0.1"])
    app = make_app(config, gateway, gateway.registry)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    runner = await start(app, listener)
    server = GrpcServer(app[CONTEXT])
    try:
        yield Frontend(gateway, listener.getsockname()[1], await server.start(), runner)
    finally:
        await server.stop(0)
        await runner.cleanup()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def configured(name: str, frontends: list[Frontend], port: int) -> str:
    """The file with these frontends in place of those that DNS names, and clients' addresses."""
    text = (DEPLOY / name).read_text()
    servers = []
    for number, one in enumerate(frontends):
        serves = one.grpc if "grpc" in name else one.http
        servers.append(f"server {number} 127.0.0.1:{serves} check port {one.http}")
    text, found = re.subn(r"server-template .*", "\n    ".join(servers), text)
    assert found == 1
    text, found = re.subn(r"bind :\d+", f"bind 127.0.0.1:{port}", text)
    assert found == 1
    text = re.sub(r"bind 127.0.0.1:8405", f"bind 127.0.0.1:{free_port()}", text)
    return text.replace("    mode http\n", "    mode http\n    option forwardfor\n")


Use = Callable[[int, list[Frontend]], Awaitable[None]]


def run(name: str, folder: Path, use: Use, script: Script | None = None) -> None:
    """Two frontends behind HAProxy at a port, as the file says."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            made = [frontend(script or say("a", "b")) for _ in range(2)]
            frontends = [await stack.enter_async_context(one) for one in made]
            port, path = free_port(), folder / name
            path.write_text(configured(name, frontends, port))
            balancer = await asyncio.create_subprocess_exec("haproxy", "-db", "-f", str(path))
            try:
                async with asyncio.timeout(60):
                    await use(port, frontends)
            finally:
                balancer.kill()
                await balancer.wait()

    asyncio.run(main())


async def answer(stub: penstock_pb2_grpc.PenstockStub) -> str:
    messages = [one async for one in stub.Generate(ASKED, wait_for_ready=True, timeout=30)]
    return "".join(delta.text for one in messages for delta in one.deltas)


def test_calls_of_one_channel_go_to_all_frontends_and_to_those_that_live(tmp_path: Path) -> None:
    async def use(port: int, frontends: list[Frontend]) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = penstock_pb2_grpc.PenstockStub(channel)
            for _ in range(8):
                assert await answer(stub) == "ab"
            first, second = (one.gateway for one in frontends)
            assert len(first.works) + len(second.works) == 8
            assert first.works and second.works
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(pb.TokenizeRequest(text="Hi", model="none"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            await frontends[0].runner.cleanup()  # its health check fails from now on
            served = len(first.works)
            for _ in range(1000):
                before = len(second.works)
                await asyncio.gather(*(answer(stub) for _ in range(4)))
                if len(second.works) == before + 4:
                    break
                served = len(first.works)
                await asyncio.sleep(0.02)
            assert len(first.works) == served

    run("haproxy-grpc.cfg", tmp_path, use)


def test_a_call_that_its_client_cancels_ends_behind_the_balancer(tmp_path: Path) -> None:
    async def use(port: int, frontends: list[Frontend]) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = penstock_pb2_grpc.PenstockStub(channel)
            call = stub.Generate(ASKED, wait_for_ready=True)
            assert (await call.read()).deltas
            call.cancel()
            await async_until(lambda: any(one.gateway.cancelled for one in frontends))

    run("haproxy-grpc.cfg", tmp_path, use, forever)


def test_clients_without_a_key_are_told_apart_by_the_address_that_it_forwards(
    tmp_path: Path,
) -> None:
    def tenants(frontends: list[Frontend]) -> set[str]:
        return {work.head.tenant for one in frontends for work in one.gateway.works}

    async def over_grpc(port: int, frontends: list[Frontend]) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await answer(penstock_pb2_grpc.PenstockStub(channel))
        for source in ("127.0.0.2", "127.0.0.3"):
            address = (source, 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address)
            client = RawClient(reader, writer, 65535)
            raw = ASKED.SerializeToString()
            await client.head(client.call("/penstock.v1.Penstock/Generate", raw))
            writer.close()
        assert tenants(frontends) == {"at 127.0.0.1", "at 127.0.0.2", "at 127.0.0.3"}

    async def over_http(port: int, frontends: list[Frontend]) -> None:
        for source in ("127.0.0.2", "127.0.0.3"):
            connector = aiohttp.TCPConnector(local_addr=(source, 0))
            async with aiohttp.ClientSession(connector=connector, headers=JSON) as session:
                url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "x"}
                status = 0
                while status != 200:  # it starts
                    with contextlib.suppress(aiohttp.ClientConnectorError):
                        async with session.post(url, json=body) as response:
                            status = response.status
                    await asyncio.sleep(0.1)
        assert tenants(frontends) == {"at 127.0.0.2", "at 127.0.0.3"}

    run("haproxy-grpc.cfg", tmp_path, over_grpc)
    run("haproxy.cfg", tmp_path, over_http)

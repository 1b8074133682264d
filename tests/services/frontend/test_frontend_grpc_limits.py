"""What a client of gRPC may hold of a process: calls, messages, memory, time."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.frontend.frontend_scripted import forever, say, waiting
from support.frontend.grpc_scripted import SETTINGS, Scripted, run
from support.polling import async_until

from penstock.client.gateway_interface import Readiness
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.grpc import penstock_pb2_grpc
from penstock.services.frontend.grpc import health, reflection, running_calls, sending, server
from penstock.services.frontend.grpc.receiving import UNCOUNTED_BYTES, Receiving, places_for

WATCH = "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MODELS = "/penstock.v1.Penstock/Models"
GENERATE = "/penstock.v1.Penstock/Generate"
TEXT = pb.GenerateRequest(text="Hi").SerializeToString()
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
LONG = b"\x7a" + struct.pack("<B", 120) + b"x" * 120
"""A field 15 that no message of ours has, 122 bytes in all."""


def reason_of(error: grpc.aio.AioRpcError) -> str:
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    (first, *_) = status_pb2.Status.FromString(packed).details
    found = error_details_pb2.ErrorInfo()
    assert first.Unpack(found)
    return str(found.reason)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """How a call is refused that has one answer or many."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return caught.value


def ended(one: Scripted, method: str, code: str) -> Callable[[], bool]:
    """Says whether a call of this method has ended so."""
    wanted = [f"/penstock.v1.Penstock/{method}", code]

    def so() -> bool:
        samples = one.context.registry.report().samples
        return any(s.name == "grpc_requests_total" and s.labels == wanted for s in samples)

    return so


# --- health


def test_a_watcher_that_takes_nothing_is_given_up_and_holds_up_no_other() -> None:
    async def use(one: Scripted) -> None:
        health_ = one.server.health
        async with one.channel() as channel, one.raw(window=0) as silent:
            silent.call(WATCH, b"")
            await async_until(lambda: health_.watches.count == 1)
            stub = health_pb2_grpc.HealthStub(channel)
            watched = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watched.read()).status == SERVING
            one.gateway.readiness = Readiness(False, {})
            health_.look()
            assert (await watched.read()).status == NOT_SERVING
            await async_until(lambda: health_.watches.count == 1)
            one.gateway.readiness = Readiness(True, {})
            health_.look()
            assert (await watched.read()).status == SERVING
            watched.cancel()
            await async_until(lambda: health_.watches.count == 0)

    run(use, stall_s=0.3)


def test_so_many_watch_and_one_more_is_refused_while_requests_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES", 6)

    async def use(one: Scripted) -> None:
        async with one.channel() as channel, one.raw(source="127.0.0.2") as other:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service="no such service")
            watched = [stub.Watch(asked) for _ in range(3)]
            for call in watched:
                assert (await call.read()).status == UNKNOWN
            error = await refused(stub.Watch(asked))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "too_many_open_calls"
            details = error.details() or ""
            assert "3 of at most 6 calls of Watch" in details and "3 of them from this" in details
            for count in (4, 5, 5):  # the last one of another address leaves a place free
                await other.head(other.call(WATCH, b""))
                assert one.server.health.watches.count == count
            checked = await stub.Check(health_pb2.HealthCheckRequest())
            assert checked.status == SERVING
            assert (await penstock_pb2_grpc.PenstockStub(channel).Models(pb.ModelsRequest())).models
            for call in watched[:2]:
                call.cancel()
            await async_until(lambda: one.server.health.watches.count == 3)
            assert (await stub.Watch(asked).read()).status == UNKNOWN

    run(use)


def test_a_model_that_is_served_no_more_is_unknown_to_those_who_watch_it() -> None:
    async def use(one: Scripted) -> None:
        async with one.channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watched = stub.Watch(health_pb2.HealthCheckRequest(service="alias"))
            assert (await watched.read()).status == SERVING
            one.gateway.served = []
            one.server.health.look()
            assert (await watched.read()).status == UNKNOWN
            error = await refused(stub.Check(health_pb2.HealthCheckRequest(service="alias")))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            one.gateway.is_draining = True
            one.server.health.look()
            checked = await stub.Check(health_pb2.HealthCheckRequest())
            assert checked.status == NOT_SERVING

    run(use)


def test_questions_about_health_that_do_not_come_hold_up_none_that_come() -> None:
    async def use(one: Scripted) -> None:
        async with one.channel() as channel, one.raw() as silent:
            for _ in range(3 * health.places_for(one.context.config.max_body_bytes)):
                silent.call("/grpc.health.v1.Health/Check")
            await asyncio.sleep(0.1)
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status == SERVING
            error = await refused(stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "4096 are allowed" in (error.details() or "")

    run(use)


# --- reflection


def test_few_reflect_at_a_time_and_one_that_asks_nothing_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflection, "MAX_CALLS", 4)
    monkeypatch.setattr(reflection, "READ_TIMEOUT_S", 1.0)

    async def use(one: Scripted) -> None:
        async with one.channel() as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            held = [stub.ServerReflectionInfo() for _ in range(2)]
            for call in held:
                await call.write(asked)
                names = (await call.read()).list_services_response.service
                assert len(names) == 5
            for name in reflection.NAMES:
                further = channel.stream_stream(f"/{name}/ServerReflectionInfo")
                error = await refused(further(iter([asked.SerializeToString()])))
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert reason_of(error) == "too_many_open_calls"
            for call in held:
                assert await call.read() is grpc.aio.EOF
                assert await call.code() is grpc.StatusCode.OK
            answers = [one async for one in stub.ServerReflectionInfo(iter([asked, asked]))]
            assert len(answers) == 2
            long = reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 5000)
            error = await refused(stub.ServerReflectionInfo(iter([long])))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(use)


def test_reflection_is_found_by_its_stable_name_as_by_the_former_one() -> None:
    services = {
        *("penstock.v1.Penstock", "vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"),
        *("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"),
    }

    async def use(one: Scripted) -> None:
        async with one.channel() as channel:

            async def answered(version: str, **asked: str) -> Any:
                raw = reflection_pb2.ServerReflectionRequest(**asked).SerializeToString()
                call = channel.stream_stream(
                    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
                )
                (answer,) = [given async for given in call(iter([raw]))]
                return reflection_pb2.ServerReflectionResponse.FromString(answer)

            for version in ("v1", "v1alpha"):
                listed = (await answered(version, list_services="")).list_services_response
                assert {service.name for service in listed.service} == services
                pool = DescriptorPool()
                for name in sorted(services):
                    found = await answered(version, file_containing_symbol=name)
                    for raw in reversed(found.file_descriptor_response.file_descriptor_proto):
                        pool.AddSerializedFile(raw)
                    assert pool.FindServiceByName(name).methods
                told = pool.FindMessageTypeByName(f"grpc.reflection.{version}.ErrorResponse")
                assert [field.number for field in told.fields] == [1, 2]

    run(use)


# --- messages


def test_every_message_is_counted_until_it_has_been_read() -> None:
    async def use(one: Scripted) -> None:
        bodies = one.context.bodies
        async with one.channel() as channel:
            for path in (MODELS, "/vllm.grpc.engine.VllmEngine/HealthCheck"):
                bodies.limit = 100
                error = await refused(channel.unary_unary(path)(LONG))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert "100 bytes" in (error.details() or "")
                bodies.limit = 1000
                await channel.unary_unary(path)(LONG)
                assert bodies.used == 0
            running = channel.unary_stream(GENERATE)(TEXT + LONG)
            reading = asyncio.create_task(running.read())
            await async_until(lambda: len(one.gateway.works) == 1)
            assert bodies.used == 0  # the request runs, its message is no more
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    run(use, waiting)


def test_clients_that_send_no_message_lose_their_place_to_those_who_do() -> None:
    async def use(one: Scripted) -> None:
        one.server.running.receiving = Receiving(2, patience_s=0.3)
        async with one.channel() as channel, one.raw() as silent, one.raw() as partial:
            for _ in range(4):
                silent.call(MODELS)
            half = partial.call(MODELS)
            partial.send(half, b"\0\0\0\x10\0" + b"x" * 1000)  # of a message of 4096
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await channel.unary_unary(MODELS)(b"", timeout=20)
            assert time.monotonic() - began < 15  # and not READ_TIMEOUT_S
            await async_until(lambda: not one.server.running.receiving._waiting)
            for client in (silent, partial):
                client._writer.close()
            await async_until(lambda: not one.server.running.count)
            assert one.context.bodies.used == 0
            assert not one.server.running.receiving._places.locked()

    run(use)


def test_what_may_come_uncounted_is_bounded_by_the_longest_message() -> None:
    assert places_for(8 * 1024 * 1024) == 32
    for longest in (1024, 8 * 1024 * 1024, 200 * 1024 * 1024):
        assert places_for(longest) * longest <= UNCOUNTED_BYTES
    assert places_for(2**31 - 1) == 1


def test_what_a_client_may_send_ahead_stays_small_however_fast_it_is() -> None:
    async def use(one: Scripted) -> None:
        async with one.raw() as client:
            kind, _, _, payload = await client.frame()
            assert kind == SETTINGS
            settings = dict(struct.iter_unpack(">HI", payload))
            assert settings.get(4, 65535) <= 65536

    run(use)


# --- answers


def test_an_answer_of_one_message_that_nobody_takes_is_given_up() -> None:
    async def use(one: Scripted) -> None:
        async with one.raw(window=0) as silent:
            silent.call(MODELS, b"")
            await async_until(ended(one, "Models", "RESOURCE_EXHAUSTED"))
            await async_until(lambda: not one.server.running.count)

    run(use, stall_s=0.3)


def test_a_caller_that_leaves_many_answers_untaken_is_refused_until_he_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_calls, "MAX_UNTAKEN", 2)

    async def use(one: Scripted) -> None:
        untaken = one.server.running.untaken
        async with one.raw(window=0) as silent, one.channel() as channel:
            for _ in range(2):
                silent.call(MODELS, b"")
            await async_until(lambda: untaken.count("at 127.0.0.1") == 2)
            error = await refused(channel.unary_unary(MODELS)(b"", timeout=20))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2 answers of this caller" in (error.details() or "")
            await async_until(lambda: not one.server.running.count)  # what goes down waits for none
        await async_until(lambda: not untaken.count("at 127.0.0.1"))
        assert not one.server.running.count
        async with one.channel() as channel:
            await channel.unary_unary(MODELS)(b"", timeout=20)

    run(use, stall_s=0.1)


def test_an_answer_that_is_too_large_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_SENT_BYTES", 1000)

    async def use(one: Scripted) -> None:
        async with one.channel() as channel:
            stub = penstock_pb2_grpc.PenstockStub(channel)
            asked = pb.GenerateRequest(text="Hi", options=pb.Options(stream=False))
            error = await refused(stub.Generate(asked))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "answer_too_large"

    run(use, say("x" * 2000))


def test_a_client_that_leaves_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def use(one: Scripted) -> None:
        for _ in range(5):
            async with one.raw(window=200) as client:
                client.call(GENERATE, TEXT)
                await async_until(lambda: one.server.running.count == 1)
                await asyncio.sleep(0.05)  # it writes, and waits
            await async_until(lambda: one.server.running.count == 0)
        assert len(one.gateway.cancelled) == 5

    with caplog.at_level(logging.WARNING):
        run(use, forever)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


# --- connections


def test_a_connection_too_many_is_closed_and_one_that_says_nothing_is_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 2.0)

    async def use(one: Scripted) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(3)]
        for other, _ in silent:
            await other.readexactly(9)  # the server's first frame: it has counted them
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        assert await reader.read() == b""
        assert not any(other.at_eof() for other, _ in silent)
        for other, _ in silent:
            await other.read()
        async with one.channel() as channel:
            await channel.unary_unary(MODELS)(b"", timeout=20)
        for mine in (writer, *(one for _, one in silent)):
            mine.close()

    run(use, connections=3)


def test_a_call_is_over_when_its_status_has_gone_out() -> None:
    async def use(one: Scripted) -> None:
        async with one.channel() as channel:
            stub = penstock_pb2_grpc.PenstockStub(channel)
            for _ in range(3):
                assert [m async for m in stub.Generate(pb.GenerateRequest(text="Hi"))]
            await refused(stub.Generate(pb.GenerateRequest()))
            await async_until(lambda: not one.server.running.count)
            one.server.drain(5)
            await async_until(lambda: one.server.drained)

    run(use)

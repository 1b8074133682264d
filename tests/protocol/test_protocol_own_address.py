"""Where a process listens and what it tells the others, from its settings."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from penstock.protocol.config import ClusterConfig
from penstock.protocol.wire import advertised_address as own_address
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.advertised_address import OwnAddress, find_own_address

HERE = "tcp://127.0.0.1:5570"


def found(service: str, router: str, bind: str = "", advertise: str = "") -> OwnAddress:
    config = ClusterConfig(router=router, bind=bind, advertise=advertise)
    return find_own_address(config, service, pytest.fail)


@pytest.mark.parametrize(
    ("router", "bind", "advertise", "expected"),
    [
        ("ipc:///run/x/router.sock", "", "", OwnAddress("ipc:///run/x")),
        (HERE, "", "", OwnAddress("tcp://127.0.0.1", "127.0.0.1")),
        (HERE, "tcp://0.0.0.0", "", OwnAddress("tcp://0.0.0.0", "127.0.0.1")),
        (HERE, "tcp://*", "", OwnAddress("tcp://*", "127.0.0.1")),
        (HERE, "tcp://0.0.0.0:7000", "", OwnAddress("tcp://0.0.0.0:7000", "127.0.0.1")),
        (HERE, "tcp://0.0.0.0", "gpu7", OwnAddress("tcp://0.0.0.0", "gpu7")),
        (HERE, "tcp://0.0.0.0", "fd00::7", OwnAddress("tcp://0.0.0.0", "[fd00::7]")),
        (HERE, "", "gpu7", OwnAddress("tcp://127.0.0.1", "gpu7")),
        (HERE, "tcp://127.0.0.9", "", OwnAddress("tcp://127.0.0.9:*")),
        (HERE, "tcp://localhost:81", "", OwnAddress("tcp://127.0.0.1:81")),
        ("tcp://localhost:5570", "", "", OwnAddress("tcp://127.0.0.1", "127.0.0.1")),
    ],
)
def test_a_service_advertises_what_the_router_can_reach(
    router: str, bind: str, advertise: str, expected: OwnAddress
) -> None:
    assert found("worker", router, bind, advertise) == expected


@pytest.mark.parametrize(
    ("router", "bind", "expected"),
    [
        ("ipc:///run/x/router.sock", "", OwnAddress("ipc:///run/x/router.sock")),
        (HERE, "", OwnAddress("tcp://127.0.0.1:5570", "127.0.0.1")),
        ("tcp://localhost:5570", "", OwnAddress("tcp://127.0.0.1:5570", "localhost")),
        ("tcp://router:5570", "tcp://0.0.0.0", OwnAddress("tcp://0.0.0.0:5570", "router")),
        ("tcp://router:5570", "tcp://0.0.0.0:5570", OwnAddress("tcp://0.0.0.0:5570", "router")),
        ("tcp://[::1]:5570", "", OwnAddress("tcp://[::1]:5570", "[::1]")),
    ],
)
def test_the_router_listens_at_its_known_port_and_keeps_its_known_name(
    router: str, bind: str, expected: OwnAddress
) -> None:
    assert found("router", router, bind) == expected


@pytest.mark.parametrize(
    ("service", "router", "bind", "words"),
    [
        ("worker", "tcp://router", "", ("--router tcp://router", "port")),
        ("worker", "tcp://router:99999", "", ("99999",)),
        ("router", HERE, "tcp://0.0.0.0:6000", ("--bind tcp://0.0.0.0:6000", "5570")),
        ("worker", "ipc:///run/router.sock", "tcp://0.0.0.0", ("--advertise", "ipc")),
    ],
)
def test_settings_that_contradict_each_other_are_refused_at_once(
    service: str, router: str, bind: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(AddressError) as refusal:
        found(service, router, bind)
    assert all(word in str(refusal.value) for word in words)


def test_a_name_that_does_not_resolve_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo
    asked = []

    def later(host: str, *rest: int) -> object:
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *rest)

    monkeypatch.setattr(own_address, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", later)
    complaints: list[str] = []
    config = ClusterConfig(router="tcp://router:5570")
    address = find_own_address(config, "worker", complaints.append)
    assert address == OwnAddress("tcp://127.0.0.1", "127.0.0.1")
    (complaint,) = complaints
    assert "--router tcp://router:5570" in complaint
    assert "Name or service not known" in complaint


def test_a_process_that_waits_ends_with_code_0_when_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    before = signal.getsignal(signal.SIGTERM)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(SystemExit) as end:
        find_own_address(ClusterConfig(router="tcp://router:5570"), "worker", print)
    assert end.value.code == 0
    assert time.monotonic() - began < 20  # it would wait for ever
    assert signal.getsignal(signal.SIGTERM) is before

"""Where a process listens, and the host at which the others reach it.

On ipc the inbox lies beside the router's. On tcp the bound address is not always the reachable
one (in a container it is ``0.0.0.0``), so the others are told the advertised host: by default the
source address of the route to the router, which is the one that the router's network knows.

The router's name need not resolve yet: in a cluster that starts, it may come last.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import msgspec

from penstock.protocol.config import ClusterConfig
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.mailbox import split_tcp

RETRY_SECONDS = 0.25
COMPLAINT_SECONDS = 30.0
"""How often a name or a route that is not there is complained of."""
_ANY = frozenset({"*", "0.0.0.0", "[::]"})


class OwnAddress(msgspec.Struct, frozen=True):
    """What ``Mailbox`` is told: where to bind, and the host to advertise ("": the bound one)."""

    bind: str
    advertise: str = ""


def find_own_address(
    cluster: ClusterConfig, service: str, complain: Callable[[str], None]
) -> OwnAddress:
    """The address of a service's inbox, from ``--router``, ``--bind`` and ``--advertise``.

    Waits as long as the router's name does not resolve or no route leads there, and ends the
    process with code 0 when it is told to end meanwhile. Raises ``AddressError`` for what no
    waiting repairs.
    """
    router, bind, advertise = cluster.router, cluster.bind, _bracketed(cluster.advertise)
    if not router.startswith("tcp://"):
        if _is_anywhere(bind) and not advertise:
            raise AddressError(
                f"--bind {bind} with --router {router}: on which address others reach this process "
                "cannot be found out; set --advertise"
            )
        beside = router if service == "router" else router.rpartition("/")[0]
        return OwnAddress(bind or beside, advertise)
    router_host, router_port = split_tcp(router)
    if not router_port:
        raise AddressError(f"--router {router}: the port is missing, as in {router}:5570")
    if service == "router":
        return _of_the_router(bind, router_host, router_port, complain)
    if bind and not _is_anywhere(bind):
        return OwnAddress(_numeric(bind, "--bind", complain), advertise)
    if bind and advertise:
        return OwnAddress(bind, advertise)
    route = _patiently(
        lambda: _bracketed(_route_to(router_host, router_port)), f"--router {router}", complain
    )
    return OwnAddress(bind or f"tcp://{route}", advertise or route)


def _of_the_router(bind: str, host: str, port: int, complain: Callable[[str], None]) -> OwnAddress:
    """The router listens at its known port, and everybody knows it by its known name."""
    if not bind:
        return OwnAddress(_numeric(f"tcp://{host}:{port}", "--router", complain), host)
    bound_host, bound_port = split_tcp(bind)
    if bound_port not in (0, port):
        raise AddressError(
            f"--bind {bind}: the router listens at port {port} of --router; leave the port of "
            "--bind out"
        )
    return OwnAddress(_numeric(f"tcp://{bound_host}:{port}", "--bind", complain), host)


def _is_anywhere(bind: str) -> bool:
    return bind.startswith("tcp://") and split_tcp(bind)[0] in _ANY


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _numeric(address: str, setting: str, complain: Callable[[str], None]) -> str:
    """``address`` with its host as a number: ZeroMQ binds no names but those of interfaces."""
    if not address.startswith("tcp://"):
        return address
    host, port = split_tcp(address)
    if host not in _ANY and not host.startswith("["):
        host = _patiently(lambda: _resolve(host, port)[0], f"{setting} {address}", complain)
    return f"tcp://{host}:{port or '*'}"


def _resolve(host: str, port: int) -> tuple[str, int]:
    """The first IPv4 address of a name; IPv6 only where the address itself says so."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    found = socket.getaddrinfo(host.strip("[]"), port, family, socket.SOCK_DGRAM)
    number, known_port = found[0][4][:2]
    return str(number), int(known_port)


def _route_to(host: str, port: int) -> str:
    """The address that this host has on its way to ``host``. Nothing is sent."""
    target = _resolve(host, port)
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def _patiently(attempt: Callable[[], str], what: str, complain: Callable[[str], None]) -> str:
    """Try until it works. A signal to end ends the process: nobody waits for it yet."""
    complained_at = -COMPLAINT_SECONDS
    with _ending_on_signals():
        while True:
            try:
                return attempt()
            except OSError as error:
                now = time.monotonic()
                if now - complained_at >= COMPLAINT_SECONDS:
                    complained_at = now
                    complain(f"{what}: {error.strerror or error}; still trying")
            time.sleep(RETRY_SECONDS)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise ``SystemExit(0)``, in the only thread that may ask for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, _end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)

"""Several hosts on one machine: network namespaces, or loopback addresses where there are none.

A namespace is a host as far as sockets can tell: it has interfaces, addresses, ports, routes and a
hosts file (``/etc/netns/NAME/hosts``, which ``ip netns exec`` puts in place) of its own. The
namespaces hang on bridges inside one more namespace, so nothing of the machine's own network is
touched. They need root and iproute2.

With loopback addresses each host is one address of 127.0.0.0/8; names and ``0.0.0.0`` in commands
and settings are replaced by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
ETH_P_ALL = 3
HOSTS_FILES = Path("/etc/netns")


class Host:
    """One host: its addresses by network, and how a process is started on it."""

    def __init__(self, name: str, addresses: Mapping[str, str], namespace: str = "") -> None:
        self.name = name
        self.addresses = dict(addresses)
        self.namespace = namespace

    @property
    def address(self) -> str:
        return next(iter(self.addresses.values()))

    def command(self, arguments: Sequence[str]) -> list[str]:
        prefix = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*prefix, *arguments]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets and threads made in the block are the host's; only this thread moves."""
        if not self.namespace:
            yield
            return
        with open("/proc/thread-self/ns/net") as home:
            _set_namespace(f"/run/netns/{self.namespace}")
            try:
                yield
            finally:
                _set_namespace(home.name, home.fileno())


def _set_namespace(path: str, descriptor: int | None = None) -> None:
    with contextlib.ExitStack() as stack:
        if descriptor is None:
            descriptor = stack.enter_context(open(path)).fileno()
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


class LoopbackHosts:
    """Hosts that are addresses of 127.0.0.0/8."""

    isolated = False

    def __init__(self) -> None:
        self._prefix = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
        self._names: dict[str, str] = {}
        self._count = 0

    def add(self, name: str, networks: Sequence[str]) -> Host:
        self._count += 1
        address = f"{self._prefix}.{self._count}"
        self._names.setdefault(name, address)
        return Host(name, dict.fromkeys(networks, address))

    def announce(self, *names: str) -> None:
        """Names are replaced, so all are known from the start."""

    def settings(self, host: Host, text: str) -> str:
        """``text`` as it must read on ``host``."""
        text = text.replace("0.0.0.0", host.address)
        for name, address in self._names.items():
            text = re.sub(rf"(?<=//){re.escape(name)}(?=:|$)", address, text)
        return text

    def close(self) -> None: ...


class NamespaceHosts:
    """Hosts that are network namespaces."""

    isolated = True

    def __init__(self) -> None:
        self._tag = f"pst{secrets.token_hex(3)}"
        self._hosts: list[Host] = []
        self._networks: dict[str, int] = {}
        self._announced: set[str] = set()
        self._unplugged: set[str] = set()
        self._links = 0
        self.switch = Host("switch", {"": ""}, f"{self._tag}-switch")
        _ip("netns", "add", self.switch.namespace)

    def add(self, name: str, networks: Sequence[str]) -> Host:
        namespace = f"{self._tag}-{name}-{len(self._hosts)}"
        _ip("netns", "add", namespace)
        addresses = {}
        on_switch, on_host = [], ["link set lo up"]
        for number, network in enumerate(networks):
            bridge = self._bridge(network)
            self._links += 1
            addresses[network] = f"10.77.{bridge}.{self._links}"
            port, card = f"port{self._links}", f"eth{number}"
            on_switch += [
                f"link add {port} type veth peer name {card} netns {namespace}",
                f"link set {port} master bridge{bridge} up",
            ]
            on_host += [
                f"address add {addresses[network]}/24 dev {card}",
                f"link set {card} up",
            ]
        _ip_batch(self.switch.namespace, on_switch)
        _ip_batch(namespace, on_host)
        host = Host(name, addresses, namespace)
        self._hosts.append(host)
        (HOSTS_FILES / namespace).mkdir(parents=True)
        self.announce()
        return host

    def _bridge(self, network: str) -> int:
        number = self._networks.get(network)
        if number is None:
            number = self._networks[network] = len(self._networks) + 1
            _ip_batch(
                self.switch.namespace,
                [f"link add bridge{number} type bridge", f"link set bridge{number} up"],
            )
        return number

    def announce(self, *names: str) -> None:
        """From now on these names resolve, on the hosts that share a network with theirs."""
        self._announced.update(names)
        for host in self._hosts:
            self._write_hosts_file(host)

    def found_by(self, asker: Host, name: str) -> list[str]:
        """The addresses of a name, as the engine's name service would answer."""
        return [
            address
            for host in self._hosts
            if host.name == name and name in self._announced
            if host.namespace not in self._unplugged
            for network, address in host.addresses.items()
            if network in asker.addresses
        ]

    def _write_hosts_file(self, asker: Host) -> None:
        names = sorted({host.name for host in self._hosts})
        lines = [f"{a} {name}" for name in names for a in self.found_by(asker, name)]
        text = "\n".join(["127.0.0.1 localhost", *lines, ""])
        # In place: the file is mounted under /etc/hosts of processes that run.
        (HOSTS_FILES / asker.namespace / "hosts").write_text(text)

    def settings(self, host: Host, text: str) -> str:
        return text

    def unplug(self, host: Host) -> None:
        """The host is off the network, as one that lost power; its name is free for another."""
        _ip_batch(host.namespace, [f"link set eth{n} down" for n in range(len(host.addresses))])
        self._unplugged.add(host.namespace)
        self.announce()

    @contextlib.contextmanager
    def cut_off(self, host: Host) -> Iterator[None]:
        """The host is off the network for a while, without a word to anybody."""
        cards = [f"eth{number}" for number in range(len(host.addresses))]
        _ip_batch(host.namespace, [f"link set {card} down" for card in cards])
        try:
            yield
        finally:
            _ip_batch(host.namespace, [f"link set {card} up" for card in cards])

    @contextlib.contextmanager
    def deaf(self, listener: Host, speaker: Host) -> Iterator[None]:
        """What one host sends to another is lost, but not what comes the other way."""
        where = f"{listener.address} dev eth0"
        nobody = "lladdr 02:00:00:00:00:01"  # no card has this address
        _ip_batch(speaker.namespace, [f"neigh replace {where} {nobody} nud permanent"])
        try:
            yield
        finally:
            _ip_batch(speaker.namespace, [f"neigh del {where}"])

    def close(self) -> None:
        for host in (*self._hosts, self.switch):
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False)
            shutil.rmtree(HOSTS_FILES / host.namespace, ignore_errors=True)
        with contextlib.suppress(OSError):
            HOSTS_FILES.rmdir()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _ip_batch(namespace: str, commands: Sequence[str]) -> None:
    subprocess.run(
        ["ip", "-netns", namespace, "-batch", "-"],
        input="\n".join([*commands, ""]),
        check=True,
        capture_output=True,
        text=True,
    )


def why_no_namespaces() -> str:
    """Empty when network namespaces can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    try:
        trial = NamespaceHosts()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}"
    try:
        host = trial.add("trial", ["trial"])
        done = subprocess.run(host.command(["true"]), capture_output=True, text=True)
        return f"ip netns exec: {done.stderr}" if done.returncode else ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}"
    finally:
        trial.close()


@contextlib.contextmanager
def simulated_hosts() -> Iterator[LoopbackHosts | NamespaceHosts]:
    """Namespaces where they can be had, loopback addresses elsewhere."""
    hosts = LoopbackHosts() if why_no_namespaces() else NamespaceHosts()
    try:
        yield hosts
    finally:
        hosts.close()


class Sniffer:
    """Records every frame that passes between the namespaces."""

    def __init__(self, hosts: NamespaceHosts) -> None:
        with hosts.switch.entered():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.settimeout(0.1)
        self._frames: list[bytes] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(TimeoutError):
                self._frames.append(self._socket.recv(65536))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close()

    def payloads(self, *ports: int) -> bytes:
        """What was said over TCP to and from any of ``ports``, in order of passing."""
        wanted = set(ports)
        return b"".join(
            data
            for _, _, from_port, to_port, data in self._segments()
            if {from_port, to_port} & wanted
        )

    def posts(self, client: str, server: str) -> int:
        """How many HTTP requests of the method POST went from one address to another."""
        return sum(
            data.startswith(b"POST ")
            for source, target, _, _, data in self._segments()
            if (source, target) == (client, server)
        )

    def _segments(self) -> Iterator[tuple[str, str, int, int, bytes]]:
        """TCP over IPv4: both addresses, both ports, what was said."""
        for frame in list(self._frames):
            packet = frame[14:]
            if frame[12:14] != b"\x08\x00" or packet[9] != socket.IPPROTO_TCP:
                continue
            segment = packet[(packet[0] & 15) * 4 : int.from_bytes(packet[2:4], "big")]
            yield (
                socket.inet_ntoa(packet[12:16]),
                socket.inet_ntoa(packet[16:20]),
                int.from_bytes(segment[0:2], "big"),
                int.from_bytes(segment[2:4], "big"),
                segment[(segment[12] >> 4) * 4 :],
            )

"""Which host starts what, and what is said where it cannot be."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.config import Config, ConfigError, resolve
from penstock.protocol.config.checks import contradictions
from penstock.protocol.config.fields import DeviceConfig, ModelConfig
from penstock.protocol.config.machine import read_machine
from penstock.protocol.config.process_fields import ClusterConfig, LaunchConfig
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.model_info import fingerprint
from penstock.protocol.process import logs
from penstock.protocol.wire.messages.administration import JOIN_HOST, Ask, HostOffer, HostPart
from penstock.services.cli import COMMANDS
from penstock.services.launcher.children import children_of_model
from penstock.services.launcher.first_host import FirstHost
from penstock.services.launcher.host_places import NoPlace, divided
from penstock.services.launcher.joined_host import check_flags
from penstock.services.launcher.processes import Child
from penstock.services.launcher.ray_hosts import RayHosts, connect
from penstock.services.launcher.supervisor import StartFailed

ROUTER = "tcp://10.0.0.5:5570"
SECRET = "a secret of all the hosts"


@pytest.mark.parametrize(
    ("workers", "together", "devices", "expected"),
    [
        (4, 2, [8, 8], [(0, 2), (2, 4)]),
        (2, 2, [8, 8], [(0, 1), (1, 2)]),
        (8, 8, [4, 4], [(0, 4), (4, 8)]),
        (12, 4, [8, 4], [(0, 8), (8, 12)]),
        (12, 2, [8, 2, 2], [(0, 8), (8, 10), (10, 12)]),
        (6, 2, [3, 3], [(0, 3), (3, 6)]),
        (3, 1, [8, 8], [(0, 2), (2, 3)]),
    ],
)
def test_workers_are_spread_over_hosts_by_their_devices_and_ranks_of_a_layer_stay_together(
    workers: int, together: int, devices: list[int], expected: list[tuple[int, int]]
) -> None:
    found = divided(workers, together, devices)
    assert [(each.start, each.stop) for each in found] == expected


@pytest.mark.parametrize("devices", [[1, 2], [4, 0]])
def test_too_few_devices_are_refused_with_the_numbers(devices: list[int]) -> None:
    sum_of = " + ".join(map(str, devices))
    with pytest.raises(
        NoPlace, match=rf"4 workers .* 2 hosts have {sum_of.replace('+', '.')}: use"
    ):
        divided(4, 2, devices)


class Server:
    """The first host of two or more."""

    def __init__(self, folder: Path, *, nodes: int, engines: int, devices: int = 0) -> None:
        config = Config(
            model=ModelConfig(model=str(folder)),
            cluster=ClusterConfig(router=ROUTER, secret=SECRET, tensor_parallel_size=2),
            server=ServerConfig(api_key=["a-key-of-a-client"]),
            launch=LaunchConfig(nodes=nodes, data_parallel_size=engines),
            device=DeviceConfig(device="cuda" if devices else "null"),
        )
        self.living: set[str] = set()
        self.started: list[Child] = []
        engines_here = children_of_model(config, {}, 0, named=False).engines
        log = logs.set_up("launcher", "error", "json")
        self.first = FirstHost(config, engines_here, devices, lambda: self.living, log)
        self.first.add = self.started.extend

    def offer(self, name: str, devices: int = 0) -> HostPart:
        self.living.add(name)
        about = msgspec.msgpack.encode(HostOffer(name, devices))
        told = self.first.answer(Ask(name, 7, JOIN_HOST, about))
        assert told.number == 7
        return msgspec.msgpack.decode(told.answer, type=HostPart)

    def started_here(self) -> list[str]:
        return names(self.started)


def names(processes: Sequence[Child]) -> list[str]:
    return [f"{each.service} {each.number}" for each in processes]


def told(part: HostPart) -> list[str]:
    return [f"{each.service} {each.number}" for each in part.processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(tmp_path_factory.mktemp("models") / "m")
    return made


def test_nothing_is_placed_before_all_hosts_are_there(folder: Path) -> None:
    server = Server(folder, nodes=3, engines=3)
    assert server.first.missing() == "2 of 3 hosts have not joined"
    assert server.offer("b").waiting == "1 of 3 hosts has not joined"
    assert not server.first.placed and not server.started
    part = server.offer("c")
    assert server.first.placed and server.first.missing() == ""
    assert server.started_here() == ["worker 0", "worker 1", "scheduler 0"]
    assert told(server.offer("b")) == ["worker 2", "worker 3", "scheduler 1"]
    assert told(part) == told(server.offer("c")) == ["worker 4", "worker 5", "scheduler 2"]
    assert (part.folder, part.fingerprint) == (str(folder), fingerprint(folder))


def test_an_engine_between_two_hosts_has_its_scheduler_beside_rank_0(folder: Path) -> None:
    server = Server(folder, nodes=2, engines=1)
    assert told(server.offer("b")) == ["worker 1"]
    assert server.started_here() == ["worker 0", "scheduler 0"]


def test_a_host_that_went_before_the_others_came_is_awaited_again(folder: Path) -> None:
    server = Server(folder, nodes=3, engines=3)
    server.offer("b")
    server.living.clear()
    assert server.offer("c").waiting and not server.first.placed


def test_the_part_of_a_lost_host_goes_to_one_with_as_many_devices(folder: Path) -> None:
    server = Server(folder, nodes=2, engines=2, devices=2)
    part = server.offer("b", 4)
    assert told(part) == ["worker 2", "worker 3", "scheduler 1"]
    assert "has its 2 hosts" in server.offer("c", 4).refused
    server.living.discard("b")
    assert server.first.missing() == "host b is gone"
    assert (
        "(a host that is gone leaves its part to one with as many" in server.offer("d", 1).refused
    )
    assert told(server.offer("c", 2)) == told(part)
    assert "has its 2 hosts" in server.offer("b", 4).refused


def test_a_host_with_too_few_devices_is_refused_and_another_may_come(folder: Path) -> None:
    server = Server(folder, nodes=2, engines=2, devices=2)
    assert "4 workers need a device each" in server.offer("b", 1).refused
    assert not server.first.placed
    assert told(server.offer("c", 2))


def test_another_host_is_told_settings_but_no_key_of_clients_and_nothing_of_its_own(
    folder: Path,
) -> None:
    server = Server(folder, nodes=2, engines=2, devices=2)
    for process in server.offer("b", 2).processes:
        told_of = process.environment
        assert told_of["PENSTOCK_TENSOR_PARALLEL_SIZE"] == "2"
        assert told_of["PENSTOCK_MODEL"] == str(folder)
        assert not told_of.keys() & {"PENSTOCK_ROUTER", "PENSTOCK_DEVICE_INDEX", "PATH"}
        assert not {SECRET, "a-key-of-a-client"} & set(told_of.values())


def test_a_joining_host_refuses_flags_that_the_first_host_decides() -> None:
    given = {"join": ROUTER, "secret": SECRET, "log_level": "debug", "device_index": "1"}
    check_flags(resolve(COMMANDS["serve"].groups, given, {}, several=True)[1])
    more = {**given, "tensor_parallel_size": "2", "port": "9000"}
    with pytest.raises(ConfigError, match=r"--join takes no --port, --tensor-parallel-size: the f"):
        check_flags(resolve(COMMANDS["serve"].groups, more, {}, several=True)[1])
    in_the_environment = {"PENSTOCK_TENSOR_PARALLEL_SIZE": "2"}
    check_flags(resolve(COMMANDS["serve"].groups, given, in_the_environment, several=True)[1])


def test_without_ray_its_executor_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs the package ray.*pip install 'penstock\[ray\]'"):
        connect(Config())


def test_a_server_that_ray_has_given_up_ends_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = types.ModuleType("ray.util.placement_group")
    groups.placement_group = lambda bundles, strategy: bundles  # type: ignore[attr-defined]
    groups.placement_group_table = lambda group: {"state": "REMOVED"}  # type: ignore[attr-defined]
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, groups.__name__, groups)
    hosts = RayHosts(Config(), logs.set_up("launcher", "info", "json"))
    with pytest.raises(StartFailed, match=r"lost its node on this host; run `ray start`") as ended:
        hosts.look(math.inf)
    assert ended.value.code == 5


GIVEN = {"router": ROUTER, "secret": SECRET, "nodes": "2", "tensor_parallel_size": "2"}

ON_RAY = {"executor": "ray", "nodes": "1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"router": ""}, "--nodes 2 needs an address at which the other hosts find this one"),
        ({"router": "tcp://0.0.0.0:5570"}, "HOST is this host's address.*, not tcp://0.0.0.0:5570"),
        ({"router": "", "secret": ""}, "(?s)needs an address.*needs a --secret that all hosts"),
        ({"join_timeout_s": "9"}, "--join-timeout-s 9 needs --join or .*--startup-timeout-s"),
        ({**ON_RAY, "device": "cuda", "device_index": "1"}, "--device-index 1 do not go together"),
        ({**ON_RAY, "nodes": "2"}, "--executor ray and --nodes 2 do not go together"),
        ({**ON_RAY, "join": ROUTER, "router": ""}, "--executor ray and --join .* do not go"),
        ({**ON_RAY, "router": "ipc:///tmp/x"}, "--executor ray needs --router tcp://HOST:PORT"),
        ({**ON_RAY, "model": ["a", "b"]}, "--executor ray places the workers of one model"),
        ({"secret": ""}, "--nodes 2 needs a --secret that all hosts have: openssl rand"),
        ({"nodes": "3"}, "--nodes 3 has nothing for each host to do: .* 2 workers; use --nodes 2"),
        ({"device": "cuda"}, "NCCL sends what they compute unencrypted.*--rank-traffic plain"),
        ({"model": ["a", "b"]}, "--nodes 2 and 2 models do not go together"),
        ({"nodes": "1", "router": "", "join": "here"}, "--join here: expected tcp://HOST:PORT"),
        ({"nodes": "1", "join": ROUTER}, "--join .* and --router .* both name the router"),
        ({"nodes": "1", "router": "", "secret": "", "join": ROUTER}, "needs the --secret of the"),
        ({"router": "", "join": ROUTER}, "--join .* and --nodes 2 do not go together"),
    ],
)
def test_settings_of_hosts_that_contradict_each_other(
    changed: dict[str, str], message: str
) -> None:
    given = {name: value for name, value in {**GIVEN, **changed}.items() if value}
    with pytest.raises(ConfigError, match=message):
        resolve(COMMANDS["serve"].groups, given, {}, several=True)


@pytest.mark.parametrize("changed", [{}, {**ON_RAY, "router": "", "secret": ""}])
def test_without_a_device_the_first_host_is_told_where_to_start_the_server(
    changed: dict[str, str],
) -> None:
    given = {**GIVEN, "device": "cuda", "rank_traffic": "plain", **changed}
    given = {name: value for name, value in given.items() if value}
    config, sources = resolve(COMMANDS["serve"].groups, given, {}, several=True)
    machine = read_machine(environment={})
    told = contradictions(config, sources, msgspec.structs.replace(machine, gpus=0))
    assert any("start the server on a host that has one" in line for line in told), told
    assert not any("use --device cpu" in line and "on all" not in line for line in told)


def test_settings_of_hosts_that_go_together() -> None:
    for given in (
        GIVEN,
        {**GIVEN, "device": "cuda", "rank_traffic": "plain"},
        {**GIVEN, "device": "cuda", "data_parallel_size": "2"},
        {"join": ROUTER, "secret": SECRET},
    ):
        resolve(COMMANDS["serve"].groups, given, {}, several=True)

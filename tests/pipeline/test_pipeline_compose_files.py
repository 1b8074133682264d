"""docker-compose.yml, the Dockerfile, the dependency groups: what one names, the other has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from support.pipeline import install_set
from support.pipeline.compose_file import (
    ROOT,
    SECRETS,
    copies,
    dependency_group,
    in_build_context,
    interpolate,
    make_secret,
    read_compose,
    read_dockerfile,
)
from support.pipeline.in_process import called

from penstock.protocol.config import Config, ConfigError, resolve
from penstock.services.cli import COMMANDS

ROLES = ("router", "worker", "scheduler", "tokenizer", "frontend")
OBSERVERS = ("prometheus", "grafana", "jaeger")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_a_plain_up_needs_nothing_from_the_shell() -> None:
    services = read_compose({})
    started = [name for name, service in services.items() if not service.profiles]
    assert sorted(started) == sorted([*ROLES, "secret", "load-balancer"])
    assert services["load-balancer"].ports == ["127.0.0.1:8000:8000"]
    assert services["worker"].environment["PENSTOCK_MODEL"] == ""


def test_a_model_folder_keeps_its_path_and_so_its_name() -> None:
    services = read_compose({"PENSTOCK_MODEL": "/models/Qwen3-0.6B", "PENSTOCK_PORT": "9000"})
    for name in ("worker", "worker-gpu", "scheduler", "tokenizer"):
        service = services[name]
        assert service.environment["PENSTOCK_MODEL"] == "/models/Qwen3-0.6B"
        mounts = [m for m in service.mounts if m.target == "/models/Qwen3-0.6B"]
        assert [(m.source, m.read_only) for m in mounts] == [("/models/Qwen3-0.6B", True)]
    assert services["load-balancer"].ports == ["127.0.0.1:9000:8000"]
    assert services["frontend"].environment["PENSTOCK_PORT"] == "8000"


def test_the_secret_is_made_once_and_only_its_maker_may_write_it(tmp_path: Path) -> None:
    services = read_compose({})
    make_secret(services["secret"], tmp_path / "secrets")
    path = tmp_path / "secrets" / "penstock"
    secret = path.read_text()
    assert len(secret.strip()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    make_secret(services["secret"], tmp_path / "secrets")
    assert path.read_text() == secret
    assert os.listdir(tmp_path / "secrets") == ["penstock"]
    for name, service in services.items():
        for mount in service.mounts:
            if mount.target == SECRETS:
                assert mount.read_only == (name != "secret"), name


def test_no_service_needs_root_or_a_writable_image() -> None:
    for name, service in read_compose({}).items():
        raw = service.raw
        assert raw["read_only"], name
        assert raw["cap_drop"] == ["ALL"], name
        assert raw["security_opt"] == ["no-new-privileges:true"], name
        assert raw["init"], name
        assert int(raw["stop_grace_period"].removesuffix("s")) > 30, name  # --drain-timeout-s
        assert not service.ports or name in ("load-balancer", "load-balancer-grpc", *OBSERVERS)
    for stage in read_dockerfile().values():
        if stage.name == "runtime" or stage.base == "runtime":
            users = stage.all("USER")
            assert not users or users[-1] == "penstock", stage.name


def test_the_gpu_worker_asks_for_one_gpu_and_starts_only_on_demand() -> None:
    service = read_compose({})["worker-gpu"]
    assert service.profiles == ["gpu"]
    (device,) = service.raw["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert service.command[-2:] == ["--device", "cuda"]


def test_grpc_is_published_on_demand_by_frontends_that_have_its_packages() -> None:
    services = read_compose({"GRPC_PORT": "6000"})
    frontend, plain = services["frontend-grpc"], services["frontend"]
    balancer = services["load-balancer-grpc"]
    assert frontend.profiles == balancer.profiles == ["grpc"]
    assert balancer.ports == ["127.0.0.1:6000:50051"]
    assert read_compose({})["load-balancer-grpc"].ports == ["127.0.0.1:50051:50051"]
    assert "PENSTOCK_GRPC_PORT" not in plain.environment
    assert frontend.environment == {**plain.environment, "PENSTOCK_GRPC_PORT": "50051"}
    assert (frontend.networks, frontend.command) == (plain.networks, plain.command)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=]", one)[0] for one in project["optional-dependencies"]["grpc"]}
    packages = set(frontend.raw["build"]["args"]["FRONTEND_PACKAGES"].split())
    assert packages <= wanted
    assert wanted - packages <= {"protobuf"}  # what the others bring
    balancing = (ROOT / "deploy/haproxy-grpc.cfg").read_text()
    assert "bind :50051 proto h2" in balancing
    assert "server-template frontend 1-32 frontend-grpc:50051 " in balancing


def test_foreign_images_are_pinned_to_a_version() -> None:
    for name, service in read_compose({}).items():
        if not service.target:
            assert re.search(r":v?\d+\.\d+(\.\d+)?(-alpine)?$", service.raw["image"]), name
            assert service.raw["env_file"] == [], name  # the settings of Penstock, and its keys


def test_settings_that_compose_writes_exist() -> None:
    """Each service starts with what compose gives it; a misspelt setting would be refused."""
    plain = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    for name, service in read_compose({}).items():
        if service.command[:1] == ["penstock"]:
            # No GPU is needed to read settings, but to ask for one.
            arguments = ["cpu" if part == "cuda" else part for part in service.command[1:]]
            environment = {**plain, **service.environment}
            done = called(*arguments, "--show-config", environment=environment)
            assert done.returncode == 0, (name, done.stderr)
            assert 'router = "tcp://router:5570"' in done.stdout


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("${A:-b}", {}, "b"),
        ("${A:-b}", {"A": ""}, "b"),
        ("${A-b}", {"A": ""}, ""),
        ("${A:+b}", {"A": "x"}, "b"),
        ("${A:+b}", {"A": ""}, ""),
        ("$A and $$A", {"A": "x"}, "x and $A"),
        ("${A}", {}, ""),
    ],
)
def test_variables_are_filled_in_as_compose_does(
    text: str, variables: dict[str, str], expected: str
) -> None:
    """The rules are those of docs.docker.com/reference/compose-file/interpolation."""
    assert interpolate(text, variables) == expected


def test_the_dockerfile_copies_only_what_exists() -> None:
    stages = read_dockerfile()
    for stage in stages.values():
        for copy in copies(stage):
            if copy.stage:
                assert copy.stage in stages, f"{stage.name} copies from {copy.stage}"
                continue
            for source in copy.sources:
                assert in_build_context(source.removeprefix("./")), f"{stage.name}: {source}"


def test_every_target_is_there_and_its_command_is_a_list() -> None:
    stages = read_dockerfile()
    targets = {service.target for service in read_compose({}).values() if service.target}
    assert targets == {"router", "worker-cpu", "worker-cuda", "scheduler", "tokenizer", "frontend"}
    for service in read_compose({}).values():
        if service.target:
            (command,) = stages[service.target].all("CMD")
            parts = json.loads(command)  # a list, so that no shell stands before the process
            assert parts[0] == "penstock"
            if service.name != "secret":
                assert parts == service.command


def test_the_torch_of_the_images_is_the_torch_of_the_makefile() -> None:
    makefile = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    dockerfile = re.search(r"^ARG TORCH=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert makefile is not None
    assert dockerfile is not None
    assert makefile[1] == dockerfile[1]


def test_the_groups_of_the_roles_are_together_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = install_set.groups().keys() - {"otel"}
    together = {line for group in groups for line in install_set.requirements(group)}
    assert together == set(project["dependencies"])


NOT_IN_GROUPS = {"triton"} | {
    canonicalize_name(re.split("[<>=;[]", line)[0])
    for extra in ("grpc", "valkey")
    for line in EXTRAS[extra]
}
"""torch's CUDA builds bring the first; the others are those of extras."""


def test_each_role_imports_only_what_its_group_installs() -> None:
    """Also within functions, where nothing is missed before the function is called."""
    owners = install_set.module_owners()
    for role in ROLES:
        installed = install_set.distributions(role) | {"penstock"} | NOT_IN_GROUPS
        for path in (ROOT / "services" / role).rglob("*.py"):
            for module in runtime_imports(path.read_text()):
                brought_by = {canonicalize_name(owner) for owner in owners.get(module, ())}
                assert module in sys.stdlib_module_names or brought_by & installed, (path, module)


def runtime_imports(text: str) -> set[str]:
    """Top-level packages that a module imports anywhere but for types alone."""
    text = re.sub(r"^if TYPE_CHECKING:\n(?:(?: {4}.*)?\n)*", "", text, flags=re.MULTILINE)
    return set(re.findall(r"^ *(?:import|from(?=.* import )) (\w+)", text, re.MULTILINE))


HEAVY = {"torch", "transformers", "tokenizers", "numpy", "llguidance"}


@pytest.mark.parametrize("role", ["router", "scheduler", "frontend"])
def test_a_light_image_holds_no_torch_no_transformers_and_no_tokenizers(
    role: str, tmp_path: Path
) -> None:
    group = dependency_group(read_dockerfile(), role)
    assert not install_set.distributions(group) & HEAVY
    environment = {"PATH": os.environ["PATH"], **install_set.environment(group, tmp_path)}
    code = (
        f"import sys, penstock.services.{role}.service\n"
        "from penstock.services.cli import main\n"
        f"sys.exit(main([{role!r}, '--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--router" in done.stdout


def test_a_role_that_is_not_installed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        **install_set.environment("frontend", tmp_path / "site"),
    }
    for role in ("tokenizer", "worker"):
        done = subprocess.run(
            [sys.executable, "-m", "penstock.services", role],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert "pip install" in line
        assert role in line


def test_what_no_image_holds_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.loadtest", None)
    monkeypatch.delitem(sys.modules, "penstock.loadtest.bench", raising=False)
    done = called("bench", "serve")
    assert done.returncode == 2
    assert "`penstock bench` is not in this installation" in done.stderr
    assert "pip install penstock" in done.stderr


def frontend_settings(variables: dict[str, str]) -> Config:
    """What a frontend of the compose file makes of these variables of the shell or of ``.env``."""
    service = read_compose(variables)["frontend"]
    return resolve(COMMANDS["frontend"].groups, {}, service.environment)[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_no_frontend_starts_without_a_key_where_the_port_is_published_to_others(host: str) -> None:
    with pytest.raises(ConfigError, match=f"published-host {host} .*no --api-key"):
        frontend_settings({"PENSTOCK_HOST": host})
    with pytest.raises(ConfigError, match=f"published-host {host} .*no --api-key"):
        frontend_settings({"PENSTOCK_HOST": host, "PENSTOCK_API_KEY": ""})
    with_keys = frontend_settings({"PENSTOCK_HOST": host, "PENSTOCK_API_KEY": "one,two"})
    assert with_keys.server.api_key == ["one", "two"]
    assert not frontend_settings(
        {"PENSTOCK_HOST": host, "PENSTOCK_INSECURE": "true"}
    ).server.api_key


@pytest.mark.parametrize("variables", [{}, {"PENSTOCK_HOST": "127.0.0.1"}])
def test_a_frontend_whose_port_is_published_on_loopback_needs_no_key(
    variables: dict[str, str],
) -> None:
    assert frontend_settings(variables).server.host == "0.0.0.0"  # within its own network
    assert frontend_settings({**variables, "PENSTOCK_API_KEY": "k"}).server.api_key == ["k"]

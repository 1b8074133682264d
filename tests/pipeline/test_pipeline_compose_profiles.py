"""The profiles of docker-compose.yml that start more than Penstock: what they name exists, and who
reaches it."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from support.pipeline.compose_file import ROOT, SECRETS, read_compose, read_dockerfile

from penstock.protocol.config import resolve
from penstock.services.cli import COMMANDS

OBSERVERS = ("prometheus", "grafana", "jaeger")
PROVISIONING = ROOT / "deploy/grafana/provisioning"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_what_observes_starts_on_demand_and_is_published_on_loopback_alone() -> None:
    services = read_compose({"PENSTOCK_HOST": "0.0.0.0", "GRAFANA_PORT": "3100"})
    for name in OBSERVERS:
        service = services[name]
        assert service.profiles == ["observability"]
        assert [port.rpartition(":")[0].partition(":")[0] for port in service.ports] == [
            "127.0.0.1"
        ]
        for mount in service.mounts:
            assert mount.target != SECRETS
            if mount.source.startswith("."):
                assert mount.read_only
                assert (ROOT / mount.source).is_dir()
    assert services["grafana"].ports == ["127.0.0.1:3100:3000"]
    anonymous = services["grafana"].environment
    assert anonymous["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert anonymous["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_grafana_finds_its_dashboards_metrics_and_traces() -> None:
    services = read_compose({})
    grafana = services["grafana"]
    mounted = {mount.target: ROOT / mount.source for mount in grafana.mounts}
    assert mounted["/etc/grafana/provisioning"] == PROVISIONING
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/penstock.yml").read_text())[
        "providers"
    ]
    dashboards = mounted[provider["options"]["path"]]
    assert len(list(dashboards.glob("*.json"))) == 4
    home = Path(grafana.environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).is_file()
    found = yaml.safe_load((PROVISIONING / "datasources/penstock.yml").read_text())["datasources"]
    metrics, traces = found
    for source in found:
        host, port = source["url"].removeprefix("http://").split(":")
        assert set(services[host].networks) & set(grafana.networks)
        assert services[host].ports[0].endswith(f":{port}")
    assert metrics["isDefault"]
    (link,) = metrics["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "trace_id", "datasourceUid": traces["uid"]}


def test_prometheus_asks_every_frontend_with_the_key_that_it_was_given(tmp_path: Path) -> None:
    services = read_compose({"METRICS_KEY": "sk-penstock-1"})
    prometheus = services["prometheus"]
    config = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())
    for rules in config["rule_files"]:
        assert (ROOT / "deploy/prometheus" / rules).is_file()
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "penstock"  # the alerts' word for it
    (names,) = job["dns_sd_configs"]
    (name,) = names["names"]
    frontend = services[name]
    assert set(frontend.networks) & set(prometheus.networks)
    assert frontend.environment["PENSTOCK_PORT"] == str(names["port"])
    # Its command, with a stand-in for Prometheus.
    (tmp_path / "prometheus").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "prometheus").chmod(0o755)
    key = job["authorization"]["credentials_file"]
    done = subprocess.run(
        [*prometheus.raw["entrypoint"], prometheus.command[0].replace(key, f"{tmp_path}/key")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **prometheus.environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "key").read_text() == "sk-penstock-1"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert done.stdout.startswith("--config.file=/etc/prometheus/compose.yml ")


def test_traces_go_to_the_collector_where_they_are_switched_on() -> None:
    plain, traced = read_compose({}), read_compose({"PENSTOCK_OTEL_TRACES": "true"})
    for name, service in traced.items():
        if not service.target or name == "secret":
            continue
        assert service.environment["PENSTOCK_OTEL_TRACES"] == "true"
        assert plain[name].environment["PENSTOCK_OTEL_TRACES"] == "false"
        endpoint = service.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert endpoint == "http://jaeger:4318"
        assert set(service.networks) & set(traced["jaeger"].networks)
        assert service.raw["build"]["args"]["OTEL_TRACES"] == "true"
        assert plain[name].raw["build"]["args"]["OTEL_TRACES"] == "false"


@pytest.mark.parametrize(("said", "wanted"), [("true", True), ("1", True), ("false", False)])
def test_images_have_what_traces_need_where_they_are_switched_on(
    said: str, wanted: bool, tmp_path: Path
) -> None:
    """What pip is called with, as the setting of the processes is said."""
    assert (
        PROJECT["dependency-groups"]["otel"] == PROJECT["project"]["optional-dependencies"]["otel"]
    )
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    stages = [one for one in read_dockerfile().values() if one.name.endswith("-packages")]
    assert len(stages) == 6
    for stage in stages:
        assert "OTEL_TRACES=false" in stage.all("ARG")
        commands = [re.sub(r"--mount=\S+ ", "", one) for one in stage.all("RUN")]
        done = subprocess.run(
            ["sh", "-ec", "\n".join(commands)],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "OTEL_TRACES": said},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert ("--group otel" in done.stdout) == wanted, stage.name


def test_valkey_starts_on_demand_and_only_the_pipeline_reaches_it() -> None:
    services = read_compose({"FRONTEND_PACKAGES": "valkey"})
    valkey = services["valkey"]
    assert (valkey.profiles, valkey.networks, valkey.ports) == (["valkey"], ["pipeline"], [])
    assert "pipeline" in services["frontend"].networks
    assert services["frontend"].raw["build"]["args"]["FRONTEND_PACKAGES"] == "valkey"


@pytest.mark.parametrize("name", ["frontend", "frontend-grpc"])
def test_frontends_use_the_valkey_that_the_shell_names(name: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.touch(0o600)
    keys.write_text("#\n")
    valkey = "valkey://valkey:6379"
    given = {
        "FRONTEND_PACKAGES": "valkey",
        "PENSTOCK_KEYS_FILE": str(keys),
        "PENSTOCK_LIMITS_URL": valkey,
        "PENSTOCK_RESPONSE_STORE": valkey,
    }
    service = read_compose(given)[name]
    assert "valkey" in service.raw["build"]["args"]["FRONTEND_PACKAGES"].split()
    server = resolve(COMMANDS["frontend"].groups, {}, service.environment)[0].server
    assert (server.limits_url, server.response_store) == (valkey, valkey)
    plain = resolve(COMMANDS["frontend"].groups, {}, read_compose({})[name].environment)[0].server
    assert (plain.limits_url, plain.response_store) == ("", "memory")

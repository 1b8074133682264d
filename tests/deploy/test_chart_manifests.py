"""What the chart renders to fits together, fits Penstock, and asks for no rights.

Of two cases the renderings are kept beside their values; a third one is rendered where Helm is.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helm_chart import (
    HELMS,
    RENDERED,
    Container,
    Manifest,
    Pod,
    kept_manifests,
    manifests,
    of_kind,
    pods,
    render,
    templates,
    values_of,
)
from support.pipeline.compose_file import read_dockerfile

from penstock.protocol.config import resolve
from penstock.protocol.process.metric_declarations import METRICS, PREFIX
from penstock.services.command_table import COMMANDS

NO_HELM = pytest.mark.skipif(not HELMS, reason="there is no Helm: make chart fetches it")
USER = 10001
FILES = {"api-keys": "a-key\n", "keys.jsonl": "# none yet\n", "tls.crt": "", "tls.key": ""}
"""What the Secrets hold."""


@pytest.fixture(scope="module", params=[*RENDERED, pytest.param("everything", marks=NO_HELM)])
def found(request: pytest.FixtureRequest) -> list[Manifest]:
    case = str(request.param)
    if case in RENDERED:
        return kept_manifests(case)
    return manifests(render(HELMS[-1], values_of(case)))


def containers(found: list[Manifest]) -> list[Container]:
    return [container for pod in pods(found) for container in pod.containers]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def chosen(found: list[Manifest], selector: dict[str, str]) -> set[str]:
    """Controllers of the pods that a selector chooses."""
    return {pod.controller for pod in pods(found) if matches(selector, pod.labels)}


def test_every_object_belongs_to_the_release(found: list[Manifest]) -> None:
    for manifest in found:
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert len(manifest["metadata"]["name"]) <= 52
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(names) == len(set(names))


def test_every_role_runs_with_the_image_of_its_target(found: list[Manifest]) -> None:
    targets = read_dockerfile()
    for container in containers(found):
        image = container.raw["image"].rpartition("/")[2].partition(":")[0]
        assert image.startswith(container.role)
        assert image in targets or image == "frontend-grpc"
    assert {container.role for container in containers(found)} == COMMANDS.keys() - {
        "serve",
        "keeper",
        "holder",
    }


def test_a_variable_is_a_setting_that_its_command_reads(
    found: list[Manifest], tmp_path: Any
) -> None:
    """Also those of files, which are written as the ConfigMap holds them."""
    (settings,) = of_kind(found, "ConfigMap")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    for container in containers(found):
        environment = container.environment()
        name = environment["PENSTOCK_CONFIG"].rpartition("/")[2]
        (tmp_path / name).write_text(settings["data"][name])
        environment = {
            variable: re.sub(r"/etc/penstock/[a-z]+/", f"{tmp_path}/", value)
            for variable, value in environment.items()
        }
        groups = COMMANDS[container.role].groups
        arguments = dict(zip(*[iter(container.raw["command"][2:])] * 2, strict=True))
        given = {flag.removeprefix("--"): value for flag, value in arguments.items()}
        config, _ = resolve(groups, given, environment)
        assert config.launch.drain_timeout_s in (30, 120)
        assert config.cluster.router.endswith("-router:5570")
        if container.role == "frontend":
            assert config.server.has_keys != config.server.insecure
            assert config.server.host == "0.0.0.0"
            tokenizers = [c.environment() for c in containers(found) if c.role == "tokenizer"]
            served = {json.loads(one["PENSTOCK_SERVED_MODEL_NAME"])[0] for one in tokenizers}
            assert set(config.server.expected_models) == served


def test_no_pod_has_rights_or_can_write_its_image(found: list[Manifest]) -> None:
    for pod in pods(found):
        spec = pod.spec
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == USER
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            security = container.raw["securityContext"]
            assert security == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            written = [m for m in container.raw["volumeMounts"] if not m.get("readOnly")]
            allowed = {"/tmp", "/dev/shm", "/var/cache/penstock"}
            assert {mount["mountPath"] for mount in written} <= allowed
    assert f"--uid {USER}" in str(read_dockerfile()["runtime"].all("RUN"))


def test_kubernetes_adds_no_variables_that_penstock_would_take_for_settings(
    found: list[Manifest],
) -> None:
    """A Service named penstock-router would bring PENSTOCK_ROUTER_PORT and more."""
    for pod in pods(found):
        assert pod.spec["enableServiceLinks"] is False


def test_no_process_of_penstock_is_process_1(found: list[Manifest]) -> None:
    """Which gets no signal that it has no handler for yet, and would have to reap orphans."""
    for pod in pods(found):
        assert pod.spec["shareProcessNamespace"] is True


def test_every_volume_is_mounted_and_every_mount_has_a_volume(found: list[Manifest]) -> None:
    for pod in pods(found):
        volumes = [volume["name"] for volume in pod.spec["volumes"]]
        mounted = {m["name"] for c in pod.containers for m in c.raw["volumeMounts"]}
        assert len(volumes) == len(set(volumes))
        if pod.labels["app.kubernetes.io/component"] == "engine":
            mounted |= {"shared-memory", "kernels"}
        assert set(volumes) == mounted
        temporary = [c.mounted("/tmp")["name"] for c in pod.containers]
        assert len(temporary) == len(set(temporary)), "each container has its own state file"


def test_a_pod_stays_until_its_requests_have_ended(found: list[Manifest]) -> None:
    for pod in pods(found):
        grace = pod.spec["terminationGracePeriodSeconds"]
        for container in pod.containers:
            if container.role == "router":
                continue  # nothing waits for its end
            drain = float(container.environment()["PENSTOCK_DRAIN_TIMEOUT_S"])
            stop = container.raw.get("lifecycle", {}).get("preStop", {}).get("exec", {})
            waits = float(stop["command"][1]) if stop else 0.0
            alone = container.role == "worker" and not container.is_sidecar
            assert grace > (max(waits, drain) if alone else waits + drain) + 5
            if container.role == "frontend":
                assert waits > 0
            if alone:  # its scheduler is in another pod that ends at the same time
                assert waits >= drain


def test_workers_end_after_the_scheduler_in_their_pod(found: list[Manifest]) -> None:
    for pod in pods(found):
        roles = [(container.role, container.is_sidecar) for container in pod.containers]
        if ("scheduler", False) in roles:
            assert roles[:-1] == [("worker", True)] * (len(roles) - 1)
            assert len(roles) > 1


def test_the_processes_of_an_engine_and_no_others_share_its_name(found: list[Manifest]) -> None:
    engines: dict[str, list[tuple[str, str]]] = {}
    for container in containers(found):
        environment = container.environment()
        if container.role in ("scheduler", "worker"):
            rank = environment.get("PENSTOCK_RANK", "")
            world = int(environment["PENSTOCK_TENSOR_PARALLEL_SIZE"])
            members = engines.setdefault(environment["PENSTOCK_ENGINE"], [])
            members.append((container.role, rank))
            assert len(members) <= world + 1
            if len(members) == world + 1:
                ranks = sorted(rank for role, rank in members if role == "worker")
                assert ranks == [str(number) for number in range(world)]
                assert ("scheduler", "") in members
    assert engines


def test_each_process_listens_at_ports_that_the_policy_opens(found: list[Manifest]) -> None:
    ranges = {c.environment()["PENSTOCK_PORT_RANGE"] for c in containers(found)}
    (pipeline,) = [
        one
        for one in of_kind(found, "NetworkPolicy")
        if one["metadata"]["name"].endswith("pipeline")
    ]
    for rule in (pipeline["spec"]["ingress"][0], pipeline["spec"]["egress"][0]):
        router, others = rule["ports"]
        assert router == {"protocol": "TCP", "port": 5570}
        assert ranges == {f"{others['port']}-{others['endPort']}"}


def test_services_budgets_and_policies_choose_the_pods_that_they_are_for(
    found: list[Manifest],
) -> None:
    for manifest in of_kind(found, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec, name = manifest["spec"], manifest["metadata"]["name"]
        selector = spec.get("podSelector", spec.get("selector"))
        selector = selector.get("matchLabels", selector)
        controllers = chosen(found, selector)
        everybody = {pod.controller for pod in pods(found)}
        if name.endswith("-pipeline"):
            assert controllers == everybody
        elif name.endswith("-metrics"):
            assert controllers == {f"Deployment {name.removesuffix('metrics')}frontend"}
        else:
            assert {controller.split()[1] for controller in controllers} == {name}
        if manifest["kind"] == "Service":
            named = {p["name"] for pod in pods(found) if matches(selector, pod.labels)
                     for c in pod.containers for p in c.raw["ports"]}  # fmt: skip
            assert {port["targetPort"] for port in spec["ports"]} <= named


def test_every_workload_but_the_router_has_a_budget_that_lets_a_node_be_emptied(
    found: list[Manifest],
) -> None:
    budgets = {
        one["metadata"]["name"]: one["spec"] for one in of_kind(found, "PodDisruptionBudget")
    }
    workloads = {one["metadata"]["name"] for one in found if templates(one)}
    assert workloads - budgets.keys() == {name for name in workloads if name.endswith("-router")}
    for spec in budgets.values():
        assert spec.get("maxUnavailable") == 1 or spec.get("minAvailable") == 0


def test_everybody_finds_the_router_at_its_service(found: list[Manifest]) -> None:
    addresses = {c.environment()["PENSTOCK_ROUTER"] for c in containers(found)}
    (address,) = addresses
    name, port = address.removeprefix("tcp://").split(":")
    (service,) = [s for s in of_kind(found, "Service") if s["metadata"]["name"] == name]
    assert [p["port"] for p in service["spec"]["ports"]] == [int(port)]
    (router,) = [pod for pod in pods(found) if pod.controller == f"Deployment {name}"]
    assert router.spec["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": [name]}]


def test_two_routers_are_never_there_at_once(found: list[Manifest]) -> None:
    (router,) = [
        d for d in of_kind(found, "Deployment") if d["metadata"]["name"].endswith("router")
    ]
    assert router["spec"]["replicas"] == 1
    assert router["spec"]["strategy"] == {"type": "Recreate"}


def test_what_is_scaled_has_no_number_of_its_own_and_is_scaled_by_a_metric_that_is_served(
    found: list[Manifest],
) -> None:
    workloads = {(one["kind"], one["metadata"]["name"]): one for one in found if templates(one)}
    scaled = set()
    for manifest in of_kind(found, "ScaledObject"):
        target = manifest["spec"]["scaleTargetRef"]
        key = target["kind"], target["name"]
        scaled.add(key)
        assert workloads[key]["apiVersion"] == target["apiVersion"]
        trigger = manifest["spec"]["triggers"][0]["metadata"]
        series = trigger.get("valueLocation") or trigger["query"]
        name, labels = re.fullmatch(r"(?:max\()?([\w:]+)\{(.*?)\}\)?", series).groups()  # type: ignore[union-attr]
        metric = METRICS[name.removeprefix(PREFIX)]
        assert metric.largest
        assert {label.split("=")[0] for label in labels.split(",")} <= set(metric.labels)
    for key, workload in workloads.items():
        assert ("replicas" in workload["spec"]) == (key not in scaled)


def test_a_change_of_settings_starts_the_pods_that_read_them_anew(found: list[Manifest]) -> None:
    marks: dict[str, str] = {}
    (settings,) = of_kind(found, "ConfigMap")
    for manifest in found:
        for _, template in templates(manifest):
            pod = Pod("", "", {}, template["spec"])
            mark = template["metadata"]["annotations"]["penstock/settings"]
            for container in pod.containers:
                path = {v["name"]: v.get("value") for v in container.raw["env"]}["PENSTOCK_CONFIG"]
                assert path is not None
                text = settings["data"][path.rpartition("/")[2]]
                assert marks.setdefault(text, mark) == mark
    assert len(set(marks.values())) == len(marks)


def test_a_new_version_of_the_chart_alone_starts_no_pod_anew(found: list[Manifest]) -> None:
    for manifest in found:
        for _, template in templates(manifest):
            assert (
                not {"helm.sh/chart", "app.kubernetes.io/version"}
                & template["metadata"]["labels"].keys()
            )

"""The Helm chart as the tests see it: its files, what Helm makes of them, the containers in that.

`make chart` fetches Helm. What it renders of two cases lies beside their values, so that most tests
need no Helm; run this file to render them anew.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/penstock"
CASES = Path(__file__).parent / "cases"
TOOLS = ROOT / "build/chart"
HELMS = [path for path in (TOOLS / "helm3", TOOLS / "helm4") if os.access(path, os.X_OK)]
RENDERED = ("plain", "groups")
"""Cases that are kept as rendered."""
RELEASE, NAMESPACE = "demo", "serving"
Manifest = dict[str, Any]
_REFERENCE = re.compile(r"\$\((\w+)\)")


class HelmFailed(Exception):
    """What Helm says of a chart or values that it does not take."""


def run_helm(helm: Path, *arguments: str) -> str:
    """Raises ``HelmFailed``."""
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise HelmFailed(done.stderr)
    return done.stdout


def render(helm: Path, values: Path | None = None, *sets: str) -> str:
    """The chart as Helm renders it. Raises ``HelmFailed``."""
    files = ["--values", str(values)] if values is not None else []
    changed = [word for one in sets for word in ("--set", one)]
    return run_helm(
        helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *files, *changed
    )


def values_of(case: str) -> Path:
    return CASES / f"{case}.values.yaml"


def kept(case: str) -> Path:
    return CASES / f"{case}.rendered.yaml"


def manifests(text: str) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(text) if one]


@functools.cache
def _kept(case: str) -> list[Manifest]:
    return manifests(kept(case).read_text())


def kept_manifests(case: str) -> list[Manifest]:
    """What the chart was rendered to for a case."""
    return copy.deepcopy(_kept(case))


def of_kind(found: list[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in found if one["kind"] in kinds]


def named(found: list[Manifest], kind: str, name: str) -> Manifest:
    (one,) = [one for one in of_kind(found, kind) if one["metadata"]["name"] == name]
    return one


@dataclass
class Container:
    """One container of a pod, with the fields of Kubernetes."""

    pod: Pod
    raw: Manifest = field(repr=False)
    is_sidecar: bool

    @property
    def name(self) -> str:
        return str(self.raw["name"])

    @property
    def role(self) -> str:
        """As `penstock ROLE`."""
        assert self.raw["command"][0] == "penstock"
        return str(self.raw["command"][1])

    def environment(self) -> dict[str, str]:
        """The variables, with what only the pod knows and references filled in."""
        found: dict[str, str] = {}
        for variable in self.raw["env"]:
            if "value" in variable:
                text = _REFERENCE.sub(lambda match: found[match[1]], variable["value"])
            else:
                text = self.pod.field(variable["valueFrom"]["fieldRef"]["fieldPath"])
            assert variable["name"] not in found
            found[variable["name"]] = text
        return found

    def mounted(self, path: str) -> Manifest:
        """The volume in which a path of the container lies."""
        mounts = [
            mount
            for mount in self.raw["volumeMounts"]
            if f"{path}/".startswith(f"{mount['mountPath']}/")
        ]
        (mount,) = mounts
        (volume,) = [one for one in self.pod.spec["volumes"] if one["name"] == mount["name"]]
        return dict(volume)


@dataclass
class Pod:
    """A pod that a controller would make of its template."""

    controller: str
    """Kind and name."""
    name: str
    labels: dict[str, str]
    spec: Manifest = field(repr=False)

    def field(self, path: str) -> str:
        """What the downward API gives for a path."""
        if path == "metadata.name":
            return self.name
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        assert label, path
        return self.labels[label[1]]

    @property
    def containers(self) -> list[Container]:
        """In the order of their start: sidecars first."""
        sidecars = self.spec.get("initContainers", [])
        assert all(one["restartPolicy"] == "Always" for one in sidecars)
        rest = [Container(self, one, is_sidecar=False) for one in self.spec["containers"]]
        return [Container(self, one, is_sidecar=True) for one in sidecars] + rest


def templates(manifest: Manifest) -> list[tuple[str, Manifest]]:
    """The pods' templates of a workload, each with what it is for; none of anything else."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        return [("leader", group["leaderTemplate"]), ("worker", group["workerTemplate"])]
    if manifest["kind"] in ("Deployment", "StatefulSet"):
        return [("", spec["template"])]
    return []


def pods(found: list[Manifest]) -> Iterator[Pod]:
    """The pods that controllers would make, with names and labels as they give them."""
    for manifest in found:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        for role, template in templates(manifest):
            for replica in range(manifest["spec"].get("replicas", 1)):
                group = manifest["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
                for place in range(1, group) if role == "worker" else (0,):
                    labels: Mapping[str, str] = template["metadata"]["labels"]
                    own = {} if not role else {
                        "leaderworkerset.sigs.k8s.io/name": name,
                        "leaderworkerset.sigs.k8s.io/group-index": str(replica),
                        "leaderworkerset.sigs.k8s.io/worker-index": str(place),
                    }  # fmt: skip
                    suffix = f"-{place}" if place else ""
                    yield Pod(
                        f"{kind} {name}",
                        f"{name}-{replica}{suffix}",
                        {**labels, **own},
                        template["spec"],
                    )


def origin(case: str) -> str:
    """The first line of what is kept: of which chart and values it was made."""
    files = [path for path in sorted(CHART.rglob("*")) if path.is_file()]
    digest = hashlib.sha256()
    for path in (*files, values_of(case)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"# tests/deploy/helm_chart.py made this of {digest.hexdigest()[:32]}\n"


def main() -> None:
    """Render the kept cases anew."""
    if not HELMS:
        sys.exit("there is no Helm: make chart fetches it")
    for case in RENDERED:
        kept(case).write_text(origin(case) + render(HELMS[-1], values_of(case)))


if __name__ == "__main__":
    main()

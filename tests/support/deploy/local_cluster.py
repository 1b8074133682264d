"""The pods of a rendered chart as processes: one simulated host a pod, one process a container.

What Kubernetes does to them is done by hand: variables, files, probes and the order of the end.
What it would refuse or limit (user, read-only root, memory, network policy) is not.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helm_chart import Container, Manifest, Pod, of_kind, pods
from support.pipeline import install_set
from support.pipeline.compose_file import dependency_group, read_dockerfile
from support.pipeline.host_process import HostProcess
from support.pipeline.simulated_hosts import Host, LoopbackHosts, NamespaceHosts

NETWORK = "cluster"
REPORT_SECONDS = 20
START_SECONDS = 90.0
LOOK_SECONDS = 0.5
"""Between two looks, each of which starts a process for each container."""


@dataclass
class Started:
    """A container that runs."""

    container: Container
    process: HostProcess
    folder: Path
    """What it may write."""

    @property
    def name(self) -> str:
        return f"{self.container.pod.name} {self.container.name}"


@dataclass
class Cluster:
    """Everything that a chart renders to."""

    hosts: LoopbackHosts | NamespaceHosts
    manifests: list[Manifest]
    secrets: dict[str, dict[str, str]]
    """What the Secrets hold that the chart only names."""
    folder: Path
    client: Host = field(init=False)
    """A host that runs nothing of ours."""
    started: list[Started] = field(default_factory=list)
    ready_seen: list[set[str]] = field(default_factory=list)
    """Names of the containers that were ready, as often as that was looked at during the start."""

    def __post_init__(self) -> None:
        self.client = self.hosts.add("client", [NETWORK])
        (self.folder / "files").mkdir()

    def start(self) -> None:
        """All pods, each at the Service that chooses it."""
        waiting = [(pod, self._host(pod)) for pod in pods(self.manifests)]
        for pod, host in waiting:
            for container in pod.containers:
                self.started.append(self._launch(container, host))
            self.hosts.announce(host.name)

    def _host(self, pod: Pod) -> Host:
        names = [
            service["metadata"]["name"]
            for service in of_kind(self.manifests, "Service")
            if service["spec"]["selector"].items() <= pod.labels.items()
        ]
        return self.hosts.add(names[0] if names else pod.name, [NETWORK])

    def _launch(self, container: Container, host: Host) -> Started:
        folder = self.folder / f"{container.pod.name}-{container.name}"
        folder.mkdir()
        image = container.raw["image"].rpartition("/")[2].partition(":")[0]
        group = dependency_group(read_dockerfile(), image)
        own = {
            name: self.hosts.settings(host, self.local(container, folder, value))
            for name, value in container.environment().items()
        }
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "OMP_NUM_THREADS": "2",
            **install_set.environment(group, self.folder / "site"),
            **own,
        }
        arguments = [sys.executable, "-m", "penstock.services", *container.raw["command"][1:]]
        process = HostProcess(container.role, host, arguments, environment)
        return Started(container, process, folder)

    def local(self, container: Container, folder: Path, text: str) -> str:
        """A text in which paths of the container are those of this machine."""
        text = text.replace("/tmp/", f"{folder}/")
        return re.sub(
            r"/etc/penstock/[\w./-]+", lambda match: str(self._file(container, match[0])), text
        )

    def _file(self, container: Container, path: str) -> Path:
        """A file of a volume, as Kubernetes would put it there."""
        volume, name = container.mounted(path), path.rpartition("/")[2]
        if "configMap" in volume:
            kind, source = "ConfigMap", volume["configMap"]["name"]
            (settings,) = of_kind(self.manifests, kind)
            assert settings["metadata"]["name"] == source
            text = settings["data"][name]
        else:
            source = volume["secret"]["secretName"]
            items = volume["secret"].get("items", [{"key": name, "path": name}])
            (key,) = [item["key"] for item in items if item["path"] == name]
            text = self.secrets[source][key]
        found = self.folder / "files" / f"{source}-{name}"
        found.write_text(text)
        found.chmod(0o600)
        return found

    # --- what Kubernetes does

    def passes(self, one: Started, probe: str) -> bool:
        """Whether a container passes one of its probes, once."""
        raw = one.container.raw[f"{probe}Probe"]
        if "httpGet" in raw:
            try:
                status, _ = self.ask(one.process.host.address, raw["httpGet"]["path"])
            except OSError:
                return False
            return 200 <= status < 400
        command = [self.local(one.container, one.folder, p) for p in raw["exec"]["command"]]
        done = subprocess.run(
            one.process.host.command(command), capture_output=True, text=True, timeout=20
        )
        assert done.stderr == "" or "No such file" in done.stderr, shlex.join(command) + done.stderr
        return done.returncode == 0

    def wait_until_up(self) -> None:
        """Until all containers are ready; ``ready_seen`` tells of the way there."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            for one in self.started:
                assert one.process.process.poll() is None, one.process.output
            # A scheduler is looked at before its workers, whose weights it waits for.
            ready = {one.name for one in reversed(self.started) if self.passes(one, "readiness")}
            self.ready_seen.append(ready)
            if len(ready) == len(self.started):
                return
            assert time.monotonic() < deadline, self.output()
            time.sleep(LOOK_SECONDS)

    def of(self, role: str) -> list[Started]:
        return [one for one in self.started if one.container.role == role]

    def delete_all(self) -> Callable[[], dict[str, int]]:
        """All pods are told to end at the same time, in each the sidecars after the others. What is
        returned waits for the ends and gives the exit codes. The pauses before the signal are left
        out."""
        codes: dict[str, int] = {}

        def delete(members: list[Started]) -> None:
            for sidecars in (False, True):
                group = [one for one in members if one.container.is_sidecar == sidecars]
                for one in group:
                    one.process.process.terminate()
                for one in group:
                    codes[one.name] = one.process.wait(40)

        by_pod: dict[str, list[Started]] = {}
        for one in self.started:
            by_pod.setdefault(one.container.pod.name, []).append(one)
        threads = [threading.Thread(target=delete, args=(one,)) for one in by_pod.values()]
        for thread in threads:
            thread.start()

        def ended() -> dict[str, int]:
            for thread in threads:
                thread.join()
            return codes

        return ended

    def kill(self) -> None:
        for one in self.started:
            one.process.kill()

    def output(self) -> str:
        return "\n".join(one.process.output for one in self.started)

    # --- what clients do

    def connect(self, address: str) -> http.client.HTTPConnection:
        with self.client.entered():
            connection = http.client.HTTPConnection(address, 8000, timeout=60)
            connection.connect()
        return connection

    def ask(
        self, address: str, path: str, body: dict[str, Any] | None = None, key: str = ""
    ) -> tuple[int, str]:
        """One request to a frontend; status and body."""
        connection = self.connect(address)
        try:
            send(connection, path, body, key)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metric(self, address: str, series: str, key: str = "") -> float:
        """The first series that a selector chooses, as KEDA reads it. A process that has just
        become ready has not reported yet: waits for it."""
        name, _, labels = series.rstrip("}").partition("{")
        wanted = set(labels.split(",")) - {""}
        deadline = time.monotonic() + REPORT_SECONDS
        while True:
            status, text = self.ask(address, "/metrics", key=key)
            assert status == 200, text
            for line in text.splitlines():
                found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
                if found and wanted <= set((found[1] or "").split(",")):
                    return float(found[2])
            assert time.monotonic() < deadline, f"nothing is served for {series}:\n{text}"
            time.sleep(0.1)


def send(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | None, key: str = ""
) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        headers["content-type"] = "application/json"
        connection.request("POST", path, json.dumps(body), headers)

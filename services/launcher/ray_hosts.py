"""``--executor ray``: Ray chooses where the workers of a server run, and starts them there.

A placement group has a bundle for each worker, with the device that it needs. In each bundle an
actor runs ``penstock serve --join``, which starts the ordinary worker and keeps it alive, so that
all that holds for a server on several hosts holds here. When a node is lost, Ray places its bundles
elsewhere and starts their actors again, and the new hosts take the parts of those that are gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.resolve import ENVIRONMENT_PREFIX
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.security import secret_text
from penstock.services.launcher.supervisor import STARTUP_TIMED_OUT, StartFailed

LOOK_SECONDS = 2.0
LOST = 5
"""Exit code: the server cannot go on; it may be started again."""
CREATED = "CREATED"
"""A placement group whose bundles all have a place."""
REMOVED = "REMOVED"
"""One that Ray has taken back, which it does when it has lost the node of its creator."""


def connect(config: Config) -> None:
    """Join the Ray cluster of this host. Raises ``ConfigError`` where there is none, or no ray."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(
            "--executor ray needs the package ray, which is not installed: pip install "
            "'penstock[ray]'"
        ) from None
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(
            f"--executor ray: this host is in no Ray cluster ({error}); start one with `ray "
            "start --head` here and `ray start --address=HOST:6379` on the others, or leave "
            "--executor out"
        ) from None


def on_ray(config: Config) -> Config:
    """With what the workers need to find this host: the router's address in Ray's network and a
    secret, where none were given, and as many hosts as there are workers beside this one."""
    import ray

    cluster = config.cluster
    router = cluster.router
    if not router:
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            router = f"tcp://{host}:{free.getsockname()[1]}"
    secret = secret_text(cluster.secret) if cluster.secret else secrets.token_hex(32)
    cluster = msgspec.structs.replace(cluster, router=router, secret=secret)
    workers = cluster.world_size * config.launch.data_parallel_size
    launch = msgspec.structs.replace(config.launch, nodes=1 + workers)
    return msgspec.structs.replace(config, cluster=cluster, launch=launch)


class RayHosts:
    """The bundles of a server's workers, and the actors in them."""

    def __init__(self, config: Config, log: Logger) -> None:
        """config: as of ``on_ray``."""
        import ray
        from ray.util.placement_group import placement_group

        self._log = log
        self._limit = config.launch.join_timeout_s
        self._count = config.launch.nodes - 1
        self._resource = "GPU" if config.device.device == "cuda" else "CPU"
        self._config = config
        self._ray: Any = ray
        self._group = placement_group([{self._resource: 1}] * self._count, strategy="PACK")
        self._actors: list[Any] = []
        self._began = self._looked_at = time.monotonic()
        self._said = False

    def look(self, now: float) -> None:
        """Start the actors when there is room for them; say what is missing. Raises
        ``StartFailed`` when there was none in time, and when Ray has given this server up."""
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        state = self._state()
        if state == REMOVED:
            raise StartFailed(
                "Ray has ended the workers and will start no others, for it has lost its node on "
                "this host; run `ray start` here again where `ray status` does not name this host, "
                "then start the server again",
                LOST,
            )
        if state == CREATED:
            self._began, self._said = now, False
            if not self._actors:
                self._start()
        elif not self._actors and now - self._began > self._limit:
            raise StartFailed(
                f"Ray has not placed the workers within {self._limit:g} s (--join-timeout-s): "
                f"{self._missing()}; add nodes with `ray start --address=HOST:6379`, or use "
                "smaller --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size",
                STARTUP_TIMED_OUT,
            )
        elif not self._said and now - self._began > 2 * LOOK_SECONDS:
            self._said = True
            self._log.warning(f"Ray has no place for all workers: {self._missing()}")

    def _state(self) -> str:
        from ray.util.placement_group import placement_group_table

        found: str = placement_group_table(self._group)["state"]
        return found

    def _missing(self) -> str:
        """What is wanted and what there is."""
        free = self._ray.available_resources().get(self._resource, 0.0)
        there = self._ray.cluster_resources().get(self._resource, 0.0)
        return (
            f"{self._count} workers need {self._count} {self._resource} (1 each), and the cluster "
            f"has {there:g}, of which {free:g} are free"
        )

    def _start(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cluster = self._config.cluster
        words = ["serve", "--join", cluster.router, "--join-timeout-s", f"{self._limit:g}"]
        environment = {ENVIRONMENT_PREFIX + "SECRET": cluster.secret}
        amount = {"num_gpus": 1} if self._resource == "GPU" else {"num_cpus": 1}
        for bundle in range(self._count):
            actor = self._ray.remote(RankHost).options(
                **amount,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            )
            self._actors.append(actor.remote(words, environment))
        self._log.info(f"Ray has placed {self._count} workers")

    def close(self) -> None:
        """Give the bundles back; what runs in them ends."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)
        self._ray.shutdown()


class RankHost:
    """The actor in a bundle. It ends with the process that it has started, which ends with it."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """words: of the command ``penstock``."""
        inherited = {
            name: value for name, value in os.environ.items()
            if not name.startswith(ENVIRONMENT_PREFIX)
        }  # fmt: skip
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "penstock.services"),
                *(*words, "--parent-pid", str(os.getpid())),
            ],
            env={**inherited, **environment},
        )
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        """Ray starts an actor again whose process has ended badly."""
        if code := self._process.wait():
            os._exit(code % 256)

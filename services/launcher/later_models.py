"""What models are made with that join a running server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from penstock.protocol.config import Config
from penstock.protocol.config.complete import AnotherModel
from penstock.protocol.process.running_servers import Registration
from penstock.services.launcher.children import (
    EXPECTED_MODELS,
    ServerChildren,
    children_of_model,
    expected,
)
from penstock.services.launcher.processes import Child
from penstock.services.launcher.running_model import RunningModel

Configure = Callable[[AnotherModel, list[Config]], Config]


class LaterModels:
    """Makes configurations and processes of further models, and tells what serves now."""

    def __init__(
        self,
        configs: Sequence[Config],
        children: ServerChildren,
        configure: Configure,
        registration: Registration,
    ) -> None:
        """``configs``, ``children``: of the models that the server is started with."""
        self._server = configs[0]
        self._expected = [one.model.names()[0] for one in configs]
        self._frontends = children.frontends
        self._configure = configure
        self._registration = registration

    def configure(self, another: AnotherModel, running: list[Config]) -> Config:
        """Raises ``ConfigError`` and ``BadModelFolder``."""
        config = self._configure(another, running)
        cluster, server = self._server.cluster, self._server.server
        return msgspec.structs.replace(config, cluster=cluster, server=server)

    def children(self, config: Config, place: int) -> Sequence[Child]:
        return children_of_model(config, os.environ, place, named=True).all

    def changed(self, models: Sequence[RunningModel]) -> None:
        """A frontend that is started again expects none that was unloaded."""
        self._registration.serve([(one.name, one.config.model.model) for one in models])
        names = {one.name for one in models}
        self._expected = [name for name in self._expected if name in names]
        for frontend in self._frontends:
            frontend.change_environment(EXPECTED_MODELS, expected(self._expected))

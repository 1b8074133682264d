"""Tensor × pipeline × data parallel layouts, as configurations of an engine's workers."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.protocol.config import Config
from penstock.services.worker.models.rank_shares import RankPlace

HOST_GPUS = 8
"""GPUs of a host: a layer is divided among those alone."""


class Layout(msgspec.Struct, frozen=True):
    tensor: int
    """GPUs that divide each layer."""
    pipeline: int
    """Stages that the layers are cut into."""
    data: int
    """Engines: copies of the model."""

    @property
    def engine_gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def sizes(self) -> dict[str, int]:
        """By the names of their settings."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        return {f"{name}_parallel_size": size for name, size in sizes.items()}

    @property
    def flags(self) -> list[str]:
        """Of ``penstock serve``; those that are 1 are left out."""
        return [
            word
            for name, size in self.sizes.items()
            if size > 1
            for word in ("--" + name.replace("_", "-"), str(size))
        ]

    def places(self) -> list[RankPlace]:
        """Of one rank of each stage; the others of a stage have as much."""
        return [RankPlace(0, self.tensor, stage, self.pipeline) for stage in range(self.pipeline)]

    def config(self, config: Config, place: RankPlace) -> Config:
        """That of the worker at this place."""
        cluster = replace(
            config.cluster,
            tensor_parallel_size=self.tensor,
            pipeline_parallel_size=self.pipeline,
            rank=place.rank,
        )
        return replace(config, cluster=cluster)

    def __str__(self) -> str:
        return f"TP {self.tensor} × PP {self.pipeline} × DP {self.data}"


def layouts(gpus: int) -> list[Layout]:
    """All that use so many GPUs, those that divide the model least first."""
    return [
        Layout(tensor, engine // tensor, gpus // engine)
        for engine in _divisors(gpus)
        for tensor in reversed(_divisors(engine))
    ]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]

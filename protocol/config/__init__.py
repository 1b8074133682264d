"""Configuration: declared in ``fields`` and the modules that end in it, resolved once by
``resolve``, completed by ``derive``."""

from penstock.protocol.config.cache_fields import CacheConfig
from penstock.protocol.config.fields import (
    AdmissionConfig,
    Config,
    DeviceConfig,
    LoadingConfig,
    ModelConfig,
    SchedulerConfig,
    TestConfig,
)
from penstock.protocol.config.flags import build_parser
from penstock.protocol.config.process_fields import (
    ClusterConfig,
    LaunchConfig,
    ObservabilityConfig,
)
from penstock.protocol.config.resolve import resolve
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.config.sources import ConfigError, Provenance
from penstock.protocol.config.speculation_fields import SpeculationConfig

__all__ = [
    "AdmissionConfig",
    "CacheConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DeviceConfig",
    "LaunchConfig",
    "LoadingConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "Provenance",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculationConfig",
    "TestConfig",
    "build_parser",
    "resolve",
]

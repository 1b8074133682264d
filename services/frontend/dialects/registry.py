"""Which dialects are served: those built in, and those that installed packages bring."""

from __future__ import annotations

from penstock.protocol.config import ConfigError
from penstock.protocol.extensions import extensions
from penstock.services.frontend.dialects.anthropic.messages import (
    CountTokensDialect,
    MessagesDialect,
)
from penstock.services.frontend.dialects.chat import ChatDialect
from penstock.services.frontend.dialects.completions import CompletionsDialect
from penstock.services.frontend.dialects.embeddings import EmbeddingsDialect
from penstock.services.frontend.dialects.interface import Dialect, paths_of
from penstock.services.frontend.dialects.kobold.dialect import KoboldDialect, KoboldStreamDialect
from penstock.services.frontend.dialects.kobold.extra import TokenCountDialect
from penstock.services.frontend.dialects.multiplex.dialect import MultiplexDialect
from penstock.services.frontend.dialects.ollama.chat import OllamaChatDialect
from penstock.services.frontend.dialects.ollama.completions import OllamaGenerateDialect
from penstock.services.frontend.dialects.responses.dialect import ResponsesDialect
from penstock.services.frontend.dialects.scores import (
    ClassifyDialect,
    PlainRerankDialect,
    RerankDialect,
    ScoreDialect,
)
from penstock.services.frontend.dialects.tokens import DetokenizeDialect, TokenizeDialect

ENTRY_POINT_GROUP = "penstock.dialects"
MEMBERS = ("name", "routes", "parse", "renderer", "error")
BUILT_IN: tuple[Dialect, ...] = (
    ChatDialect(),
    CompletionsDialect(),
    EmbeddingsDialect(),
    RerankDialect(),
    PlainRerankDialect(),
    ScoreDialect(),
    ClassifyDialect(),
    MessagesDialect(),
    CountTokensDialect(),
    ResponsesDialect(),
    MultiplexDialect(),
    OllamaChatDialect(),
    OllamaGenerateDialect(),
    KoboldDialect(),
    KoboldStreamDialect(),
    TokenCountDialect(),
    TokenizeDialect(),
    DetokenizeDialect(),
)


def load_dialects() -> tuple[Dialect, ...]:
    """All of them. Raises ``ConfigError`` for a package that does not deliver a dialect, or one
    whose routes another one has."""
    found = list(BUILT_IN)
    owners = {path: dialect.name for dialect in found for path in paths_of(dialect)}
    for extension in extensions(ENTRY_POINT_GROUP, "the dialect"):
        dialect: Dialect = extension.make(MEMBERS, f"{Dialect.__module__}.Dialect", "")
        for route in paths_of(dialect):
            if route in owners:
                raise ConfigError(
                    f"the dialect {dialect.name!r} of {extension} takes {route}, which the dialect "
                    f"{owners[route]!r} has; uninstall one of them"
                )
            owners[route] = dialect.name
        found.append(dialect)
    return tuple(found)

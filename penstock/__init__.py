"""Penstock: an LLM inference server made of small processes.

    from penstock import LLM, SamplingParams

    llm = LLM("/path/to/hf-folder")
    outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))

The folders of the repository are exposed below this name: ``penstock.protocol`` (what the
processes say to each other), ``penstock.services`` (the processes), ``penstock.kernels`` and
``penstock.loadtest``.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from penstock.protocol.config.sources import ConfigError
    from penstock.protocol.sampling import SamplingParams
    from penstock.services.library.async_llm import AsyncLLM
    from penstock.services.library.beam_search import (
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
    )
    from penstock.services.library.engine import LLMEngine, ModelLimits
    from penstock.services.library.llm import LLM
    from penstock.services.library.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestError,
        RequestOutput,
        RequestRefused,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from penstock.services.library.server_process import ServerFailed

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "Logprob",
    "ModelLimits",
    "RequestError",
    "RequestOutput",
    "RequestRefused",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ServerFailed",
]

_root = _Path(__file__).resolve().parent.parent
if not (_root / "penstock" / "services").is_dir() and (_root / "services").is_dir():
    __path__ = [*__path__, str(_root)]  # a checkout without symbolic links

_HOMES = {
    "AsyncLLM": "penstock.services.library.async_llm",
    "ModelLimits": "penstock.services.library.engine",
    "LLMEngine": "penstock.services.library.engine",
    "LLM": "penstock.services.library.llm",
    "SamplingParams": "penstock.protocol.sampling",
    "CompletionOutput": "penstock.services.library.outputs",
    "Logprob": "penstock.services.library.outputs",
    "RequestOutput": "penstock.services.library.outputs",
    **dict.fromkeys(
        (
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ),
        "penstock.services.library.outputs",
    ),
    **dict.fromkeys(
        ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
        "penstock.services.library.beam_search",
    ),
    "RequestError": "penstock.services.library.outputs",
    "RequestRefused": "penstock.services.library.outputs",
    "ServerFailed": "penstock.services.library.server_process",
    "ConfigError": "penstock.protocol.config.sources",
}


def __getattr__(name: str) -> object:
    """Import the public names at their first use: the command line must start at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

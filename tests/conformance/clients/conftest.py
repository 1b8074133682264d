"""The server that a client's cases run against.

PENSTOCK_URL (without /v1), PENSTOCK_MODEL and PENSTOCK_KEY name it, PENSTOCK_ENCODER and
PENSTOCK_RERANKER the models that it has beside.
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def base_url() -> str:
    return os.environ["PENSTOCK_URL"]


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["PENSTOCK_MODEL"]


@pytest.fixture(scope="session")
def api_key() -> str:
    return os.environ.get("PENSTOCK_KEY", "none")


@pytest.fixture(scope="session")
def encoder() -> str:
    """A model that makes vectors."""
    return _beside("PENSTOCK_ENCODER")


@pytest.fixture(scope="session")
def reranker() -> str:
    """A model that scores pairs."""
    return _beside("PENSTOCK_RERANKER")


def _beside(variable: str) -> str:
    if variable not in os.environ:
        pytest.skip(f"the server has no such model ({variable})")
    return os.environ[variable]


@pytest.fixture(scope="session")
def demo(model: str) -> bool:
    """Whether answers are known: those of another model need only keep to the form."""
    return model == "penstock-demo"


@pytest.fixture(autouse=True)
def calls_tools(request: pytest.FixtureRequest, demo: bool) -> None:
    """A small model calls tools only where it must."""
    if request.node.get_closest_marker("calls") and not demo:
        pytest.skip("needs a model that calls tools of its own accord")

"""Which of the served models a request means, as far as its key may know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.shown_values import show
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.parse import NoModel, UnknownModel, find_model

Found = TypeVar("Found")


def of_its_own(
    key: KnownKey, models: list[ServedModel], find: Callable[[list[ServedModel]], Found]
) -> Found:
    """What ``find`` makes of the models that the key may use: errors list no others, and a request
    without a model means the only one of these.

    Raises ``ApiError``: what ``find`` raises, and 403 for a served model that the key may not use.
    """
    own = key.of_its_own(models)
    try:
        return find(own)
    except (UnknownModel, NoModel) as error:
        if error.name is not None and len(own) < len(models):
            _check_hidden(key, error.name, models)
        if own or not models:
            raise
        if error.name is None:
            error.message = f"{key.none_is_served}; try again"
            raise
        message = f"{show(error.name)} does not exist; {key.none_is_served}"
        raise UnknownModel(error.name, message) from None


def _check_hidden(key: KnownKey, name: str, models: list[ServedModel]) -> None:
    """Raises ``ApiError`` 403."""
    try:
        model, _ = find_model(name, models)
    except ApiError:
        return
    key.check_model(model, name)

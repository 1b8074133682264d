"""A key that was recognised: whose it is, what it may ask for and how much of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.keys.record import KeyLimits, KeyRecord, Role
from penstock.protocol.shown_values import show
from penstock.services.frontend.errors import ApiError

Right = Literal["user", "metrics", "admin", "any"]
"""What a route asks for: a role, or no more than a valid key."""
MAX_NAMED = 8
"""Models that an error lists."""


class KnownKey(msgspec.Struct, frozen=True):
    """Who calls. Without configured keys it is always ``ANYBODY``."""

    tenant: str = ""
    """By which requests, stored responses and limits of one key belong together."""
    name: str = ""
    """For logs and errors."""
    rights: frozenset[str] = frozenset({"user", "metrics", "any"})
    limits: KeyLimits = KeyLimits()
    models: frozenset[str] = frozenset()
    """Names of the models that it may use; empty: all."""
    id: str = ""
    """Public id of a key of a file; empty for any other."""

    def may_use(self, model: ServedModel) -> bool:
        """A model is meant by any of its names."""
        return not self.models or not self.models.isdisjoint((model.name, *model.aliases))

    def may_know(self, name: str) -> bool:
        """Whether it may read of a model of which no more is known than this name."""
        return not self.models or name in self.models

    def of_its_own(self, models: list[ServedModel]) -> list[ServedModel]:
        """Those of the served models that it may use."""
        return [model for model in models if self.may_use(model)] if self.models else models

    def check_right(self, right: Right) -> None:
        """Raises ``ApiError`` 403."""
        if right in self.rights:
            return
        if not self.name:
            raise _forbidden(
                "This server has no keys, and admin routes want one of the role admin "
                "(`penstock keys add NAME --role admin`, --keys-file)"
            )
        has = " and ".join(sorted(self.rights - {"any"}))
        raise _forbidden(
            f"The key {self.name} has the role {has}, and this route is for the role {right}: "
            f"`penstock keys add NAME --role {right}` makes such a key"
        )

    def check_model(self, model: ServedModel, name: str) -> None:
        """name: as the client has called it. Raises ``ApiError`` 403."""
        if not self.may_use(model):
            raise self._refusal(name)

    def check_name(self, served: str, name: str) -> None:
        """The same for a model of which no more is known than two of its names."""
        if self.models and self.models.isdisjoint((served, name)):
            raise self._refusal(name)

    @property
    def none_is_served(self) -> str:
        """For errors."""
        return f"None of the models that the key {self.name} may use is served: {self._allowed}"

    @property
    def _allowed(self) -> str:
        return ", ".join(map(show, sorted(self.models)[:MAX_NAMED]))

    def _refusal(self, name: str) -> ApiError:
        error = _forbidden(
            f"The key {self.name} may not use the model {show(name)}; it may use {self._allowed}"
        )
        error.param, error.code = "model", "model_not_allowed"
        return error


ANYBODY = KnownKey()
_RIGHTS: dict[Role, frozenset[str]] = {
    "user": frozenset({"user", "any"}),
    "metrics": frozenset({"metrics", "any"}),
    "admin": frozenset({"user", "metrics", "admin", "any"}),
}


def key_of_flag(digest: str, number: int) -> KnownKey:
    """A key of ``--api-key``, the n-th one: it may all but administrate."""
    return KnownKey(f"key-{digest[:16]}", f"api-key-{number}")


def key_of_record(record: KeyRecord) -> KnownKey:
    """A key of a file."""
    limits = KeyLimits(
        requests_per_minute=record.requests_per_minute,
        tokens_per_minute=record.tokens_per_minute,
        tokens_per_day=record.tokens_per_day,
        concurrent=record.concurrent,
    )
    return KnownKey(
        f"key-{record.id}",
        record.name,
        _RIGHTS[record.role],
        limits,
        frozenset(record.models),
        record.id,
    )


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="forbidden")

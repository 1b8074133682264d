"""The one place that lets a request with a prompt in, whatever API it came by."""

from __future__ import annotations

from penstock.client.gateway_interface import Gateway
from penstock.services.frontend.access import ApiKeys
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.limits import Admission, Limits
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.requests.history import History

UNKNOWN_CONTEXT = 131_072
"""Tokens, of a model that has just gone."""


class Gate:
    """Knows the keys, what each may ask for, and what it has used of its limits."""

    def __init__(self, keys: ApiKeys, gateway: Gateway, limits: Limits, history: History) -> None:
        self.history = history
        """Of what has asked to be let in."""
        self._keys = keys
        self._gateway = gateway
        self._limits = limits

    async def admit(self, key: KnownKey, asked: GenerateRequest) -> Admission | None:
        """Let a request of this key in; ``None``: nothing of it is limited. ``settle`` what is
        returned when the request has ended.

        Raises ``ApiError``: 401 where the key has ceased to be valid since it was recognised, 403
        where it may not use the model, and ``LimitReached`` 429.
        """
        key = self._keys.current(key)
        if not key.models and key.limits.are_none:
            return None
        model = next((one for one in self._gateway.models() if one.name == asked.served), None)
        if model is None:  # it has just gone
            key.check_name(asked.served, asked.model)
        else:
            key.check_model(model, asked.model)
        context = UNKNOWN_CONTEXT if model is None else model.max_model_len
        return await self._limits.admit(key, asked, context)

    def settle(self, admission: Admission, used: int, *, took_place: bool) -> None:
        """The request has ended with so many tokens. took_place: else it costs nothing at all."""
        self._limits.settle(admission, used, took_place=took_place)

"""What the engines of each model do together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Sleeper

_log = logging.getLogger("penstock.client")


class ServedEngines:
    """What the engines of each model do, those included that are away for a while.

    An engine that is lost or leaves is most often started again: what only it did is still done by
    its model until it is back (as whatever it is then), or ``wait_s`` have passed while nothing of
    the model was starting or loading.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait = wait_s
        self._known: dict[int, tuple[Identity, Capacity]] = {}
        """Incarnation → what a scheduler said last."""
        self._absent: dict[int, float] = {}
        """Incarnation → since when a known one is not there."""

    def look(self, engines: Iterable[Peer], now: float) -> None:
        """Take in who is there. An engine that still loads does not know what it will do."""
        there, awaited = set(), set()
        places = {}
        for peer in engines:
            there.add(peer.incarnation)
            if peer.identity.model and peer.capacity.max_model_len:
                self._known[peer.incarnation] = (peer.identity, peer.capacity)
                places[_place(peer.identity)] = peer.incarnation
            else:
                awaited.add(peer.identity.model)
        for incarnation, (identity, _) in list(self._known.items()):
            if incarnation in there:
                self._absent.pop(incarnation, None)
                continue
            since = self._absent.setdefault(incarnation, now)
            if identity.model in awaited:
                self._absent[incarnation] = now
            elif now - since > self._wait or _place(identity) in places:
                del self._known[incarnation], self._absent[incarnation]

    def models(self) -> dict[str, ServedModel]:
        """By name, each as all of its engines together are."""
        found: dict[str, ServedModel] = {}
        order = sorted(self._known, key=lambda one: one in self._absent)
        for incarnation in order:
            identity, capacity = self._known[incarnation]
            found[identity.model] = with_engine(found.get(identity.model), identity, capacity)
        return found


def asleep_models(sleepers: Mapping[str, Sleeper]) -> dict[str, ServedModel]:
    """Models that sleep, by what their launcher says of them."""
    return {
        name: with_engine(None, Identity(0, "", model=name, aliases=one.aliases), one.capacity)
        for name, one in sleepers.items()
    }


def _place(identity: Identity) -> tuple[str, str, str]:
    """The same for an engine and for the one that is started in its place."""
    return identity.host, identity.engine, identity.model


def with_engine(known: ServedModel | None, identity: Identity, capacity: Capacity) -> ServedModel:
    """The model as ``known`` by its engines so far, with one more of them. A request that generates
    may be as long as the largest of those engines holds, which gets it; prompts of tasks fit every
    engine that has any."""
    more = ServedModel(
        identity.model,
        identity.aliases,
        capacity.max_model_len,
        capacity.vocab_size,
        capacity.tasks,
        capacity.generates,
        capacity.labels,
        capacity.longest_task_prompt,
        [one for one in capacity.adapters if one.name],
        ends=capacity.ends,
        repeats=capacity.repeats,
    )
    if known is None:
        return more
    if known.generates == more.generates:
        context = max(known.max_model_len, more.max_model_len)
    else:
        context = known.max_model_len if known.generates else more.max_model_len
    longest = known.longest_task_prompt
    if more.tasks:
        longest = (
            min(longest, more.longest_task_prompt) if known.tasks else more.longest_task_prompt
        )
    return msgspec.structs.replace(
        known,
        max_model_len=context,
        tasks=list(dict.fromkeys([*known.tasks, *more.tasks])),
        generates=known.generates or more.generates,
        labels=known.labels or more.labels,
        longest_task_prompt=longest,
        adapters=_joined(known.adapters, more.adapters),
        repeats=known.repeats or more.repeats,
    )


def _joined(known: list[Adapter], more: list[Adapter]) -> list[Adapter]:
    """Of each name the one that was known first."""
    names = {one.name for one in known}
    return [*known, *(one for one in more if one.name not in names)]


def adapter_models(base: ServedModel) -> list[ServedModel]:
    """The adapters of a model as clients see them: they generate, and do nothing else. What stands
    ahead of each prompt leaves a client less of the model's positions."""
    return [
        msgspec.structs.replace(
            base,
            name=one.name,
            aliases=[],
            max_model_len=max(1, base.max_model_len - one.virtual_tokens),
            tasks=[],
            labels=[],
            adapters=[one],
            parent=base.name,
        )
        for one in base.adapters
    ]


class ServedAdapters(dict[str, ServedModel]):
    """The adapters of all models, as models by name. A model's own name comes first, and of two
    adapters of one name that of the first model; the others are told in the log, once."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[tuple[str, str]] = set()
        """(adapter, model) of those that are not served."""

    def look(self, models: Iterable[ServedModel]) -> None:
        """These are the models, in their order."""
        bases = list(models)
        owners = {name: one.name for one in bases for name in (one.name, *one.aliases)}
        hidden: set[tuple[str, str]] = set()
        self.clear()
        for adapter in (one for base in bases for one in adapter_models(base)):
            name, parent = adapter.name, adapter.parent
            if name not in owners:
                owners[name] = parent
                self[name] = adapter
                continue
            hidden.add((name, parent))
            if (name, parent) not in self._told:
                _log.warning(
                    "the adapter %s of the model %s is not served: the model %s has the name",
                    *map(show, (name, parent, owners[name])),
                )
        self._told = hidden

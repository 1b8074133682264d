"""Which models this server serves, and what is asked of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from penstock.protocol.wire.messages.membership import Demand, Identity, is_among

MAX_ABSENT = 256
"""Models without a process that count as served, and models that are known to be withdrawn."""


class ServedModels:
    """Models that have been ready, and those of them that have been withdrawn since.

    A model whose processes were lost counts as served, since they are being started again. So that
    names that come and go for ever do not add up, of those without a process only the
    ``MAX_ABSENT`` that were ready last are kept, and as many of the latest withdrawn ones.
    """

    def __init__(self) -> None:
        self._served: dict[str, None] = {}
        """In the order in which they were first ready."""
        self._withdrawn: dict[str, None] = {}
        self._names_of: dict[str, dict[str, None]] = {}
        """Fingerprint of a model's files → under which names schedulers serve them."""
        self._tasks: dict[str, dict[str, None]] = {}
        """Model → what engines of it have done, those that are away included."""

    @property
    def served(self) -> list[str]:
        return list(self._served)

    @property
    def withdrawn(self) -> list[str]:
        return list(self._withdrawn)

    @property
    def names_known(self) -> int:
        """Names that schedulers have given to files."""
        return sum(map(len, self._names_of.values()))

    def __len__(self) -> int:
        return len(self._served)

    def __contains__(self, model: str) -> bool:
        """Whether the model was ready once; an empty name stands for any."""
        return is_among(model, self._served)

    def engine_named(self, identity: Identity) -> None:
        """A scheduler says under which name it serves which files."""
        self._names_of.setdefault(identity.fingerprint, {})[identity.model] = None

    def does(self, model: str, tasks: Iterable[str]) -> None:
        """An engine of the model is ready, and does these tasks."""
        self._tasks.setdefault(model, {}).update(dict.fromkeys(tasks))

    def tasks(self, model: str) -> list[str]:
        """What engines of a model have done; an empty name stands for any model. Empty: nobody
        knows."""
        some = self._tasks if not model else [one for one in (model, "") if one in self._tasks]
        return list(dict.fromkeys(task for one in some for task in self._tasks[one]))

    def named(self, identity: Identity) -> Identity:
        """The same process under the name of the model whose files it has: schedulers decide on
        that, and on another host the folder may be called otherwise."""
        names = self._names_of.get(identity.fingerprint, {}) if identity.fingerprint else {}
        if not names or identity.model in names:
            return identity
        return msgspec.structs.replace(identity, model=next(iter(names)))

    def unloads(self, models: Iterable[str]) -> bool:
        """A launcher ends them: they are served no more, while their processes finish what they
        have. Returns whether one is withdrawn."""
        news = [name for name in models if name in self._served or name not in self._withdrawn]
        for name in news:
            self._withdraw(name)
        return bool(news)

    def sleeps(self, models: Iterable[str]) -> bool:
        """A launcher has put them to sleep: one that was withdrawn with the last of its processes,
        since nobody had heard of its sleep, is served. Returns whether there is one."""
        news = [name for name in models if name in self._withdrawn]
        for name in news:
            self.is_ready(name)
        return bool(news)

    def is_ready(self, model: str) -> bool:
        """A tokenizer and an engine of it are ready. Returns whether that is news."""
        is_news = model not in self._served
        self._withdrawn.pop(model, None)
        self._served[model] = None
        return is_news

    def told(self, models: Iterable[str]) -> bool:
        """A member knew of them before this router did. Returns whether one is news. One that was
        withdrawn is not: the member has not heard of it yet."""
        known = self._served.keys() | self._withdrawn.keys()
        news = [name for name in models if name not in known]
        self._served.update(dict.fromkeys(news))
        return bool(news)

    def has_nobody(self, model: str) -> bool:
        """Its last process has left as it was told to: with it a model is served no more, unless it
        is the only one, since then the whole server is being started again. Returns whether it is
        withdrawn."""
        if model not in self._served or len(self._served) == 1:
            return False
        self._withdraw(model)
        return True

    def forget(self, present: Collection[str]) -> bool:
        """Drop what is known of models beyond what is kept of those that no member has. Call it
        when a member has gone or models were told of. Returns whether one is withdrawn."""
        absent = [name for name in self._served if name not in present]
        too_many = absent[: max(0, len(absent) - MAX_ABSENT)]
        for name in too_many:
            self._withdraw(name)
        for fingerprint, names in list(self._names_of.items()):
            kept = {name: None for name in names if name in present or name in self._served}
            if kept:
                self._names_of[fingerprint] = kept
            else:
                del self._names_of[fingerprint]
        for name in self._tasks.keys() - self._served.keys() - set(present):
            del self._tasks[name]
        return bool(too_many)

    def _withdraw(self, model: str) -> None:
        self._served.pop(model, None)
        self._withdrawn.pop(model, None)
        self._withdrawn[model] = None  # the latest
        if len(self._withdrawn) > MAX_ABSENT:
            del self._withdrawn[next(iter(self._withdrawn))]


def total(demands: Iterable[Demand]) -> list[Demand]:
    """The sums by model."""
    by_model: dict[str, list[Demand]] = {}
    for demand in demands:
        by_model.setdefault(demand.model, []).append(demand)
    return [
        Demand(
            sum(demand.open for demand in same),
            sum(demand.waiting for demand in same),
            sum(demand.waiting_tokens for demand in same),
            sum(demand.ended for demand in same),
            sum(demand.slots for demand in same),
            model,
            sum(demand.held for demand in same),
        )
        for model, same in by_model.items()
    ]

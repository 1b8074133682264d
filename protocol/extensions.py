"""Parts of Penstock that other packages bring, by Python entry points."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock.protocol.config import ConfigError


def extensions(group: str, kind: str, name: str | None = None) -> list[Extension]:
    """What installed packages offer in a group, or of it under one name; nothing is loaded.

    ``kind``: what each of them is, for messages: "the scheduling policy". A path that is searched
    twice offers everything twice; it counts once.
    """
    points = entry_points(group=group) if name is None else entry_points(group=group, name=name)
    return sorted(dict.fromkeys(Extension(point, kind) for point in points), key=str)


class Extension:
    """One entry point."""

    def __init__(self, point: EntryPoint, kind: str) -> None:
        self.name = point.name
        self._point = point
        self._kind = kind
        distribution = point.dist
        self._source = (
            "an unknown distribution"
            if distribution is None
            else f"distribution {distribution.name} {distribution.version}"
        )

    def __str__(self) -> str:
        return f"{self._source} ({self._point.value})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extension) and (self.name, str(self)) == (other.name, str(other))

    def __hash__(self) -> int:
        return hash((self.name, str(self)))

    def make(self, members: Iterable[str], base: str, instead: str) -> Any:
        """What the package delivers: its entry point, called without arguments.

        Raises ``ConfigError`` that names the package, whatever its code does, and where the result
        lacks one of the ``members`` of ``base``. ``instead``: what else may be done about it.
        """
        try:
            made = self._point.load()()
        except Exception as error:
            raise self._broken(f"{type(error).__name__}: {error}", instead) from error
        missing = [member for member in members if not hasattr(made, member)]
        if missing:
            cause = f"it makes a {type(made).__name__} without {', '.join(missing)}; see {base}"
            raise self._broken(cause, instead)
        return made

    def _broken(self, cause: str, instead: str) -> ConfigError:
        return ConfigError(
            f"{self._kind} {self.name!r} of {self} cannot be used: {cause}; repair or uninstall "
            f"that package{instead}"
        )

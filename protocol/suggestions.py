"""What a wrong name was probably meant to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

LIKENESS = 0.7
"""How alike a name and its suggestion must be, at least; 1 is the same (``difflib``)."""
MAX_COMPARED = 64
"""Characters of a name that are compared: it may come from a client."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that is most like ``name``; ``None``: none is like it."""
    import difflib  # costs a command that goes right a few milliseconds

    folded = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name[:MAX_COMPARED].lower(), folded, 1, LIKENESS)
    return folded[found[0]] if found else None


class ForeignNames:
    """Names of other servers, with what to do about each here."""

    def __init__(self, renamed: Mapping[str, str], explained: Mapping[str, str]) -> None:
        """``renamed``: the name here; ``explained``: a sentence. Names have underscores."""
        self.renamed = renamed
        self.explained = explained

    def advice(self, name: str, known: Iterable[str], written: Callable[[str], str] = str) -> str:
        """How to go on from an unknown ``name``: ``": use --max-model-len"``, say, or nothing.

        ``known``: the names that there are, with underscores. ``written``: such a name as the
        reader must write it.
        """
        plain = name.lower().replace("-", "_")
        if plain in self.renamed:
            return f": use {written(self.renamed[plain])}"
        if plain in self.explained:
            return f": {self.explained[plain]}"
        found = closest(plain, known)
        return f": did you mean {written(found)}?" if found else ""

"""What a wrong name was probably meant to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

SHORTEST_BEGINNING = 4
"""Characters of a name that is taken for the beginning of another one, at least."""
LIKENESS = 0.7
"""How alike a name and its suggestion must be, at least; 1 is the same (``difflib``)."""
MAX_COMPARED = 64
"""Characters of a name that are compared: it may come from a client."""
_USED = re.compile(r"use (\w+)(?:[:.]|$)")
"""Of ``use chat_template_kwargs: {…}`` and ``use text.format`` the parameter."""


def closest(name: str, known: Collection[str]) -> str | None:
    """The only one of ``known`` that begins with ``name``, or the one that is most like it;
    ``None``: none is."""
    import difflib  # costs a command that goes right a few milliseconds

    folded = {one.lower(): one for one in known}
    wanted = name[:MAX_COMPARED].lower()
    found = []
    if len(wanted) >= SHORTEST_BEGINNING:
        found = [one for one in folded if one.startswith(wanted)]
    if len(found) != 1:
        found = difflib.get_close_matches(wanted, folded, 1, LIKENESS)
    return folded[found[0]] if found else None


class ForeignNames:
    """Names of other servers, with what to do about each here."""

    def __init__(self, renamed: Mapping[str, str], explained: Mapping[str, str]) -> None:
        """``renamed``: the name here; ``explained``: a sentence. Names have underscores."""
        self.renamed = renamed
        self.explained = explained

    def renamed_to(self, **names: str) -> dict[str, str]:
        """The table of new names where some are called otherwise: ``names`` by those here."""
        found = {name: names[here] for name, here in self.renamed.items() if here in names}
        return found | {here: name for here, name in names.items() if here != name}

    def advice(
        self,
        name: str,
        known: Collection[str],
        written: Callable[[str], str] = str,
        *,
        guesses: bool = True,
    ) -> str:
        """How to go on from a wrong ``name``: ``": use --max-model-len"``, say, or nothing.

        ``known``: the names that there are, with underscores; no others are advised. ``written``:
        such a name as the reader must write it. ``guesses``: of a name without advice say which of
        the known ones it is like.
        """
        plain = name.lower().replace("-", "_")
        here = self.renamed.get(plain)
        if here is not None and here in known:
            return f": use {written(here)}"
        explained = self.explained.get(plain)
        if explained is not None and _is_for(explained, known):
            return f": {explained}"
        found = closest(plain, known) if guesses else None
        return f": did you mean {written(found)}?" if found else ""


def _is_for(explanation: str, known: Collection[str]) -> bool:
    """Whether there is the parameter that an explanation tells how to use, if it names one."""
    used = _USED.match(explanation)
    return used is None or used[1] in known

"""Columns of text, for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Aligned by the widest cell. ``right``: columns of numbers. Empty columns are left out."""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows) or not rows]
    lines = []
    widths = {place: max(len(row[place]) for row in (head, *rows)) for place in kept}
    for row in (head, *rows):
        cells = [
            row[place].rjust(widths[place])
            if head[place] in right
            else row[place].ljust(widths[place])
            for place in kept
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

"""A package as an installer leaves it, for a server whose PYTHONPATH names its folder."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, name: str, source: str, entry_points: dict[str, str]) -> dict[str, str]:
    """Write a package of one module, ``name``, into the folder ``site``.

    entry_points: by group, ``entry = module:object``. Returns the environment that finds it.
    """
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = [f"[{group}]\n{entry}\n" for group, entry in entry_points.items()]
    (info / "entry_points.txt").write_text("".join(groups))
    return {"PYTHONPATH": str(site)}

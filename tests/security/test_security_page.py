"""docs/security.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([a-z0-9_]+)::([a-z0-9_]+)`")


def test_every_test_that_the_page_names_exists() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(NAMED.findall((ROOT / "docs" / "security.md").read_text()))
    assert len(named) > 80
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not re.search(rf"^(async )?def test_{name}\(", files.get(f"test_{file}", ""), re.M)
    ]
    assert missing == []


def test_every_attack_has_its_place_on_the_page() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    for path in sorted(Path(__file__).parent.glob("test_security_*.py")):
        if path == Path(__file__):
            continue
        for name in re.findall(r"^def test_(\w+)\(", path.read_text(), re.M):
            assert f"`{path.stem.removeprefix('test_')}::{name}`" in page

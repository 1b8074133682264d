"""A file that is longer is two things: whoever reads a folder gets through each in one go."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("client", "demo", "kernels", "loadtest", "penstock", "protocol", "services")
MOST_LINES = 400
GENERATED = "protocol/grpc/"


def test_no_source_file_has_more_than_400_lines() -> None:
    paths = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in paths
    }
    assert len(lengths) > 500
    long = {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
    assert {name for name in long if not name.startswith(GENERATED)} == set()

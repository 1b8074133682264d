"""docs/metrics.md says what the declarations say."""

from __future__ import annotations

from support import metrics_page


def test_the_page_of_the_metrics_is_made_from_their_declarations() -> None:
    text = metrics_page.PAGE.read_text()
    assert metrics_page.MARKS[0] in text
    assert text == metrics_page.page(text), "run .venv/bin/python tests/support/metrics_page.py"

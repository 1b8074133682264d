"""The table of docs/api.md is what the declarations say."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.services.frontend.api_page import described
from penstock.services.frontend.bodies.field_table import table
from penstock.services.frontend.dialects.registry import BUILT_IN

PAGE = Path(__file__).resolve().parent.parent / "docs/api.md"


def test_the_page_says_what_becomes_of_each_field_of_each_route() -> None:
    (shown,) = re.findall(r"<!-- fields -->\n(.*?)<!-- end of fields -->", PAGE.read_text(), re.S)
    made = table(described(BUILT_IN))
    assert shown == made, "python -m penstock.services.frontend.bodies.field_table prints the table"

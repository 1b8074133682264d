"""The values of ``format`` that are enforced, and what the compiler gets for each.

The compiler's own expressions for dates know no leap years (February 29 in any year) and take a
leap second at any minute; those for host names know no limit of length.
"""

from __future__ import annotations

from typing import Any

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{LEAP_YEAR}-02-29)"
)
"""RFC 3339 ``full-date`` of the years 0001 to 9999."""
TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
"""RFC 3339 ``full-time`` without leap seconds."""

OWN: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{DATE}$"},
    "time": {"pattern": f"^{TIME}$"},
    "date-time": {"pattern": f"^{DATE}T{TIME}$"},
    "hostname": {
        "format": "hostname",
        "pattern": "^[0-9A-Za-z]+(?:[.-][0-9A-Za-z]+)*$",
        "maxLength": 253,
    },
}
"""Formats that the compiler gets as other keywords."""
OWN |= {
    f"uuid{version}": {"format": "uuid", "pattern": f"^.{{14}}{version}"} for version in range(1, 9)
}
FORMATS = frozenset({*OWN, "duration", "email", "ipv4", "ipv6", "uri", "uuid"})

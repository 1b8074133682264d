"""structlog without rich.

structlog imports rich, where it is installed (transformers brings it), for tracebacks that nobody
asks it for here: 60 ms of 190 that the router takes to import all it needs, in every process.
Import structlog from here, so that it is so whoever comes first.
"""

from __future__ import annotations

import sys

_absent = "rich" not in sys.modules
if _absent:
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it fails then
try:
    import structlog
finally:
    if _absent:
        del sys.modules["rich"]

Logger = structlog.typing.FilteringBoundLogger
__all__ = ["Logger", "structlog"]

"""What an engine counts of the blocks that are kept outside of its memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """Only ever grow."""

    queried: int = 0
    """Blocks of prompts that KV memory did not have, each time that a prompt looked for them: anew
    where it was put off and found a part."""
    hits: int = 0
    """How many of them were loaded."""
    stored: int = 0
    missed_stores: int = 0
    """Blocks that were to be stored, but there was no room."""
    corrupted: int = 0
    loads: int = 0
    slow: int = 0
    """Prefixes that were there and computed all the same, since that is quicker."""
    failed_loads: int = 0
    load_seconds: float = 0.0

"""What processes report of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.process.metrics import Registry

if TYPE_CHECKING:
    from penstock.services.worker.speculation.drafting import DraftCounts


def report_drafts(counts: DraftCounts, metrics: Registry) -> None:
    """Take over the counts of an executor, by source and place."""
    for name, sources in (
        ("spec_decode_draft_tokens_total", counts.drafted),
        ("spec_decode_accepted_tokens_total", counts.accepted),
    ):
        for source, by_place in sources.items():
            for place, number in enumerate(by_place):
                if number:
                    metrics.counter(name, source, str(place)).value = number
    metrics.set("spec_decode_saved_seconds", counts.saved_seconds)

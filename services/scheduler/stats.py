"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.services.scheduler.block_manager import BlockManager
    from penstock.services.scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Only ever grow, over all epochs of one scheduler process."""

    steps: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of accepted requests, once for each request; continuations count none."""
    generated_tokens: int = 0
    """Tokens sent to owners."""
    prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    ignored_results: int = 0
    """Results and failures of another epoch or of a step that nobody waits for."""
    rejected_requests: int = 0
    cut_retentions: int = 0
    """Retained blocks that went before their time, for want of room."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot: gauges and the counters."""

    running: int
    """Sequences that hold a slot."""
    waiting: int
    """Sequences that wait for one."""
    waiting_for: dict[str, int]
    """The same by reason; see ``WaitingQueue.by_reason``."""
    waiting_requests: int
    waiting_tokens: int
    """Tokens of their prompts."""
    open_requests: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    """Nobody holds them, but the prefix cache can find them."""
    blocks_free: int
    blocks_retained: int
    """Requests have asked to retain them; cached or used."""
    counters: Counters


def snapshot(
    running: int,
    waiting: WaitingQueue,
    open_requests: int,
    blocks: BlockManager,
    counters: Counters,
) -> SchedulerStats:
    return SchedulerStats(
        running=running,
        waiting=len(waiting) + waiting.num_put_off,
        waiting_for=waiting.by_reason(),
        waiting_requests=waiting.num_requests,
        waiting_tokens=waiting.num_prompt_tokens,
        open_requests=open_requests,
        blocks_total=blocks.num_blocks,
        blocks_used=blocks.num_used,
        blocks_cached=blocks.num_cached,
        blocks_free=blocks.num_free,
        blocks_retained=blocks.num_retained,
        counters=counters,
    )

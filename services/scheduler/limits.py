"""What an engine can hold, as its worker said when it attached."""

from __future__ import annotations

import msgspec

from penstock.protocol.model_info import end_tokens
from penstock.protocol.wire.messages.engine import EngineSizes, LayerGroup
from penstock.protocol.wire.messages.membership import Capacity
from penstock.protocol.wire.messages.steps import Attached
from penstock.services.scheduler.kv_groups import ONE_FULL, check_groups

BLOCK_BYTES = 5
"""Bytes that a block's number takes in a plan, at most."""
MOST_CHARACTER_BYTES = 4
SLOT_BYTES = 224
"""Bytes that a new slot and its chunk take in a plan, at most, without tokens, blocks, sampling,
task and trace."""
MOST_ROW_TOKENS = 255
"""Tokens of a row of a result, at most: one byte counts them."""
MAX_SEQUENCE_TOKENS = 4 * 1024 * 1024
"""Tokens of one sequence, at most, so that a plan which takes it in fits a frame, whatever else it
asks for: twice its tokens (the prompt comes once more where penalties read it), blocks of 8 tokens
or more, and sampling of at most ``MAX_SAMPLING_BYTES``, 39 MiB in all."""
MAX_SAMPLING_BYTES = 4 * 1024 * 1024
"""Bytes in a plan, at most, of what a request asks of the sampler. The bounds of its parameters are
lower: ids of allowed tokens are 1 MiB, a grammar is 256 KiB."""


class Limits(EngineSizes, frozen=True, array_like=True, gc=False):
    """Sizes of one engine that work together. Raises ``ValueError`` for those that cannot."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_row_tokens > MOST_ROW_TOKENS:
            raise ValueError(
                f"max_row_tokens is {self.max_row_tokens}: a result counts up to {MOST_ROW_TOKENS}"
            )
        if self.max_num_seqs * self.max_row_tokens > self.max_num_batched_tokens:
            each = "one token" if self.max_row_tokens == 1 else f"{self.max_row_tokens} tokens"
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} is too large for max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: a step could not hold {each} of every running "
                "sequence; lower --max-num-seqs or raise --max-num-batched-tokens"
            )
        if self.task_prompts == "whole" and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is too small for prompts "
                f"of up to {self.max_model_len} tokens, each of which is computed in one step"
            )
        check_groups(self.layer_groups)
        if self.max_sequence_len < 2:
            raise ValueError(
                "max_model_len and KV memory must hold 2 tokens or more, "
                f"got {self.max_sequence_len}"
            )

    @classmethod
    def of(cls, sizes: EngineSizes) -> Limits:
        return cls(*msgspec.structs.astuple(sizes))

    @property
    def layer_groups(self) -> list[LayerGroup]:
        """Groups of layers with a block table each."""
        return self.groups or ONE_FULL

    @property
    def max_sequence_len(self) -> int:
        """Prompt and output of one sequence together, in tokens.

        Bounded by KV memory, so that a sequence that has the engine for itself always fits, and
        by what one plan may bring.
        """
        return min(self.max_model_len, self.kv_tokens, MAX_SEQUENCE_TOKENS)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the K and V of this many positions."""
        return -(-tokens // self.block_size)


def capacity_of(whole: Attached, limits: Limits, model: str) -> Capacity:
    """What an engine with these workers tells others that it can do; ``model``: its folder."""
    return msgspec.structs.replace(
        Capacity(*msgspec.structs.astuple(limits)),
        max_model_len=limits.max_sequence_len,
        tasks=whole.tasks,
        generates=whole.generates,
        labels=whole.labels,
        adapters=whole.adapters,
        ends=end_tokens(model),
        repeats=whole.repeats,
    )

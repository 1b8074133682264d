"""What an engine can hold, as its worker said when it attached."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from penstock.protocol.wire.messages.steps import Attached

TOKEN_BYTES = 4
BLOCK_BYTES = 5
"""Of a block's number in a plan, at most."""
SLOT_BYTES = 192
"""Of a new slot and its chunk in a plan without tokens, blocks and adjustments, at most."""
MAX_SEQUENCE_TOKENS = 4 * 1024 * 1024
"""Of one sequence, so that a plan which takes it in fits a frame, whatever else it asks for: twice
its tokens (the prompt comes once more where penalties read it), blocks of 8 tokens or more, and
adjustments of at most ``MAX_SAMPLING_BYTES``, 39 MiB in all."""
MAX_SAMPLING_BYTES = 4 * 1024 * 1024
"""Of what a request asks of the sampler, in a plan. The bounds of its parameters are lower: ids of
allowed tokens are 1 MiB, a grammar is 256 KiB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of one engine. Raises ``ValueError`` for sizes that cannot work together."""

    num_blocks: int
    block_size: int
    """Tokens in one KV block."""
    max_num_seqs: int
    """Slots of the worker."""
    max_num_batched_tokens: int
    """Positions computed in one step, prefill and decode together."""
    max_model_len: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} is larger than max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: a step could not hold one token of every running "
                "sequence; lower --max-num-seqs or raise --max-num-batched-tokens"
            )
        if self.max_sequence_len < 2:
            raise ValueError(
                "max_model_len and KV memory must hold 2 tokens or more, "
                f"got {self.max_sequence_len}"
            )

    @classmethod
    def of(cls, attached: Attached) -> Limits:
        return cls(
            num_blocks=attached.num_blocks,
            block_size=attached.block_size,
            max_num_seqs=attached.max_num_seqs,
            max_num_batched_tokens=attached.max_num_batched_tokens,
            max_model_len=attached.max_model_len,
            vocab_size=attached.vocab_size,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens that KV memory holds."""
        return self.num_blocks * self.block_size

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

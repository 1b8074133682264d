"""How much KV memory an engine takes, and how long a sequence it can then hold."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.messages.engine import EngineSizes, LayerGroup

MOST_MICRO_BATCHES = 8
"""Of a pipeline on GPUs, which holds as many steps at a time; more stages take turns."""
EXTRA_BLOCKS = 2
"""Blocks of KV memory beside those of sequences; see ``ModelExecutor``."""
TIER_STAGING_BYTES = 192 << 20
"""Of a GPU, and as much of the host, for copies of KV blocks to what keeps them outside of it."""
OUTSIDE_BYTES = 3 << 28
"""What CUDA's context and the loaded kernels take of a GPU, as a plan counts them."""
NULL_BLOCKS = 65_536
"""KV blocks of the null engine unless given: its blocks are numbers, but the scheduler's cost."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold this many positions."""
    return -(-tokens // block_size)


def plan_capacity(
    config: Config,
    info: ModelInfo,
    block_bytes: int,
    budget_bytes: int,
    groups: Sequence[LayerGroup] = (),
) -> EngineSizes:
    """Decide the number of KV blocks and ``max_model_len``.

    block_bytes: K and V of one block over all layers of a group; budget_bytes: what is free for KV
    memory; groups: as in ``EngineSizes``.
    ``num_kv_blocks`` decides, else ``kv_cache_memory_bytes``, else the budget; never more than
    ``max_num_seqs`` sequences of ``max_model_len`` can use. Raises ``ConfigError`` that names
    both sides when ``max_model_len`` exceeds what the model or the KV memory allows.
    """
    given = config.model.max_model_len
    if given is not None and given > info.max_model_len:
        raise ConfigError(
            f"--max-model-len {given}: the model was trained for {info.max_model_len} positions "
            f"(max_position_embeddings in {info.folder / 'config.json'}); give at most that"
        )
    block_size = config.cache.block_size
    longest = given or info.max_model_len
    blocks, reason = _blocks(config, block_bytes, budget_bytes)
    capacity = EngineSizes(
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=longest,
        vocab_size=info.vocab_size,
        groups=list(groups),
        micro_batches=_micro_batches(config),
    )
    tokens = capacity.kv_tokens
    _check_room(capacity, given, block_bytes, reason)
    useful = capacity.max_num_seqs * capacity.sequence_blocks(longest)
    return msgspec.structs.replace(
        capacity, num_blocks=min(blocks, useful), max_model_len=min(longest, tokens)
    )


def _check_room(capacity: EngineSizes, given: int | None, block_bytes: int, reason: str) -> None:
    """Raises ``ConfigError`` where KV memory does not hold a sequence, or not one of the
    ``max_model_len`` that was ``given``. reason: for its number of blocks."""
    tokens, blocks, block_size = capacity.kv_tokens, capacity.num_blocks, capacity.block_size
    if tokens < 1 <= blocks:
        raise ConfigError(
            f"KV memory: {reason} holds {blocks} blocks, and a sequence needs one for each of the "
            f"model's {len(capacity.groups)} groups of layers; give more with "
            "--kv-cache-memory-bytes or --num-kv-blocks"
        )
    if tokens < 1:
        raise ConfigError(
            f"KV memory: {reason} holds no block of {block_size} tokens ({block_bytes} bytes); "
            "give more with --kv-cache-memory-bytes"
        )
    if given is not None and given > tokens:
        raise ConfigError(
            f"--max-model-len {given}: KV memory holds {tokens} tokens ({blocks} blocks of "
            f"{block_size}, from {reason}); lower --max-model-len or raise "
            "--kv-cache-memory-bytes or --num-kv-blocks"
        )


def _micro_batches(config: Config) -> int:
    """One for each stage of a pipeline, where stages compute beside each other."""
    if config.device.device == "null":
        return 1
    stages = min(config.cluster.pipeline_parallel_size, MOST_MICRO_BATCHES)
    return min(stages, config.scheduler.max_num_seqs)


def whole_prompts(capacity: EngineSizes) -> EngineSizes:
    """The sizes of an engine that computes each prompt in one step and keeps nothing of it: two
    blocks stand for a slot (the scheduler keeps one aside for what runs), and take no memory."""
    longest = capacity.max_model_len
    return msgspec.structs.replace(
        capacity,
        num_blocks=2 * capacity.max_num_seqs,
        block_size=longest + 1,
        max_num_batched_tokens=max(capacity.max_num_batched_tokens, longest),
        groups=[],
        task_prompts="whole",
    )


def check_fits(capacity: EngineSizes, block_bytes: int, free_bytes: int) -> None:
    """Raises ``ConfigError`` when the KV memory that was asked for is not free.

    On the CPU blocks take memory when they are first used: what other programs take meanwhile is
    then missing, and no check at the start can know of it.
    """
    needed = (capacity.num_blocks + EXTRA_BLOCKS) * block_bytes
    if needed > free_bytes:
        raise ConfigError(
            f"KV memory: {capacity.num_blocks} blocks need {needed} bytes, {free_bytes} are free; "
            "lower --num-kv-blocks, --kv-cache-memory-bytes, --max-num-seqs or --max-model-len"
        )


def _blocks(config: Config, block_bytes: int, budget_bytes: int) -> tuple[int, str]:
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks, f"--num-kv-blocks {cache.num_kv_blocks}"
    if cache.kv_cache_memory_bytes is not None:
        given = cache.kv_cache_memory_bytes
        return given // block_bytes, f"--kv-cache-memory-bytes {given}"
    return budget_bytes // block_bytes, f"{budget_bytes} bytes of free memory"

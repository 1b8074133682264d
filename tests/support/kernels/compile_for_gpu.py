"""Compile every kernel launch of a GPU executor for a GPU that need not be there.

    CAPABILITY=90 SHARED_BYTES=232448 python compile_for_gpu.py [MODELS]

Runs the executor's steps on the CPU while launches are recorded, compiles each kernel once for that
compute capability and prints it, and those launched early that may end before they have waited for
the kernel ahead; of the first ``MODELS`` shapes of models, with one vocabulary and fewer
numbers of rows, or of all. It has a process of its own, because Triton decides between its compiler
and its interpreter when a kernel is declared.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from support.kernels.dependent_launch import Given, waits
from support.kernels.pretended_gpu import CAPABILITY, SHARED_BYTES
from support.kernels.quantized_weights import quantized_weights

from penstock.kernels.gpu import prefill_attention, rows_linear_hopper
from penstock.kernels.gpu.activation import gated_product
from penstock.kernels.gpu.added_rows import AddedRows
from penstock.kernels.gpu.adjust_logits import adjust_logits
from penstock.kernels.gpu.all_reduce import PeerRows, all_reduce, all_reduce_add_norm
from penstock.kernels.gpu.attention_arguments import (
    NOTHING_LISTED,
    DecodeBatch,
    HeadInputs,
    LayerCache,
    Scores,
    layer_cache,
    listed_blocks,
)
from penstock.kernels.gpu.compressed_weights import compress
from penstock.kernels.gpu.decode_attention import decode_attention
from penstock.kernels.gpu.decode_workspace import decode_workspace
from penstock.kernels.gpu.draft_counts import count_accepted, count_ahead
from penstock.kernels.gpu.draw import draw
from penstock.kernels.gpu.few_rows_codes import Shape, few_rows_codes
from penstock.kernels.gpu.fixed_attention import fixed_attention, part_sums, place_rows
from penstock.kernels.gpu.fixed_linear import fixed_linear
from penstock.kernels.gpu.fp8_linear import CODES, fp8_block_linear, quantize_rows
from penstock.kernels.gpu.fp8_rows import (
    add_rms_norm_fp8,
    fp8_rows_in,
    gated_fp8,
    rms_norm_fp8,
    rows_to_fp8,
)
from penstock.kernels.gpu.guessed_drafts import (
    Outcome,
    PlacedRows,
    PlannedRows,
    accept_drafts,
    place_drafts,
)
from penstock.kernels.gpu.int8_linear import int8_linear, quantize_rows_int8
from penstock.kernels.gpu.keep_floor import keep_floor
from penstock.kernels.gpu.logprobs import logprob_columns, logprobs
from penstock.kernels.gpu.low_rank import (
    FEW_TILE,
    MANY_TILE,
    RowTiles,
    expand,
    shrink,
    small_numbers,
)
from penstock.kernels.gpu.norm import add_normed, add_rms_norm
from penstock.kernels.gpu.packed_rows import (
    KINDS,
    DistanceBias,
    packed_attention,
    pool_rows,
)
from penstock.kernels.gpu.quantized_linear import quantized_linear
from penstock.kernels.gpu.recorded_launches import Recorded, Recorder
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.rotate_heads import rotate_heads
from penstock.kernels.gpu.row_inputs import pack_heads, row_inputs
from penstock.kernels.gpu.sampler_memory import (
    no_history,
    sampler_slots,
    sampler_space,
    vocab_splits,
)
from penstock.kernels.gpu.sampler_stages import sampler_stages
from penstock.kernels.gpu.shared_prefix import prefix_attention, shared_prefix
from penstock.kernels.gpu.split_linear import ACTIVATIONS, SplitWeight, split_linear
from penstock.kernels.gpu.surprise import surprise
from penstock.kernels.gpu.token_history import add_tokens, ban_words
from penstock.kernels.gpu.widen_cache import Contexts, wide_cache, widen_cache
from penstock.kernels.gpu.word_linear import word_linear
from penstock.kernels.gpu.word_weight import why_not, word_weight
from penstock.kernels.low_rank import StackedLowRank
from penstock.kernels.quantized_cache import LARGEST, columns
from penstock.kernels.quantized_kinds import SPACE_BYTES
from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.kernels.rotary import RopeParameters
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.gpu import kernel_choice
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.models.dense import DenseConfig, caches_of
from penstock.services.worker.models.dense_form import allocate_dense
from penstock.services.worker.models.specification import Rotary

MODELS = [
    (4, 2, 128, 16, True, torch.bfloat16), (4, 4, 64, 32, False, torch.float32),
    (4, 2, 128, 16, True, torch.float32), (4, 4, 64, 32, False, torch.bfloat16),
    (16, 1, 256, 64, True, torch.bfloat16), (4, 2, 128, 16, False, torch.float16),
    (4, 4, 32, 16, False, torch.bfloat16), (4, 1, 256, 16, False, torch.float32),
]  # fmt: skip
"""Query heads, KV heads, head size, block size, whether heads are normed, type."""
VARIED: list[dict[str, Any]] = [
    {
        "windows": (64, 0), "softcap": 50.0, "logit_softcap": 30.0, "activation": "gelu_tanh",
        "output_norms": True, "scale": 0.1, "embedding_multiplier": 32.0,
    },
    {"windows": (0, 64), "rotaries": (None, Rotary(RopeParameters(1e4), 64)), "sinks": True},
]  # fmt: skip
"""What a model of two layers may have beside that; in bfloat16 with heads of 128 and of 64."""
VOCABULARIES = [151_936, 32_000]
"""Vocabularies of the sampler: more groups, and fewer, than what a program reads at once."""
CODES_ROWS = (100, 600)
"""Rows of decode steps over keys and values of a byte a number that have other shapes of the kernel
than a few rows have: see ``decode_shapes.shape_for``."""
_forked: list[Any] = []
"""In a process that compiles: the recorder, then each launch."""
ROWS = 256
"""Rows enough that a draw takes other programs than for one row."""


def compile_all(recorder: Recorder) -> None:
    """Compile in a process a core, which are forks, since a launch cannot be sent to another."""
    for one in recorder.recorded:
        check_waits(one)
    costly = sorted(recorder.recorded, key=lambda one: -one.cost)
    forks = multiprocessing.get_context("fork")
    with forks.Pool(initializer=_forked.extend, initargs=([recorder, *costly],)) as pool:
        for line in pool.imap_unordered(shared_bytes, range(1, len(costly) + 1)):
            print(line, flush=True)


def shared_bytes(number: int) -> str:
    """Compile the launch with this number. Returns a line of what it takes."""
    kernel, _ = _forked[0].compiled(_forked[number])
    return f"{_forked[number].name}: {kernel.metadata.shared} bytes shared"


def check_waits(one: Recorded) -> None:
    """Says so of a kernel that is launched early and may end before it has waited."""
    if not one.arguments["options"].launch_pdl:
        return
    names = one.kernel.arg_names
    constants = {names[path[0]]: value for path, value in one.arguments["constexprs"].items()}
    kinds = one.arguments["signature"].items()
    given = {name: Given() for name, kind in kinds if kind[0] in "*t"}
    if not waits(one.kernel.fn, given | constants):
        print(f"{one.name} may end before it has waited", flush=True)


def executor(config: DenseConfig, block_size: int, dtype: torch.dtype) -> GpuExecutor:
    weights = allocate_dense(config, dtype, torch.device("cpu"))
    groups = group_layers(caches_of(config)).groups
    sizes = EngineSizes(64, block_size, 64, 256, 512, 512, groups=groups)
    return dense_executor(config, weights, sizes)


COMPRESSED = [
    (1024, 512, False, 2, 8), (1024, 512, True, 1, 64), (512, 9600, True, 1, 64),
    (640, 128, False, 1, 64),
]  # fmt: skip
"""Layers of compressed weights: width, columns, whether they are gated, programs that share the
width, rows. The third has three groups of warps, the last two tiles in a step."""


def compressed() -> None:
    from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear

    for width, outs, gated, splits, rows in COMPRESSED:
        weight = torch.ones(outs * (1 + gated), width, dtype=torch.bfloat16)
        small = compress(weight, gated=gated, splits=splits)
        x = torch.zeros(64, width, dtype=torch.bfloat16)
        CompressedLinear(x, [small], [None], (rows, rows), gated=gated)


def summed(dtype: torch.dtype, width: int, ranks: int) -> None:
    """Sums over ranks, with and without a norm behind."""
    rows, weight = torch.zeros(2, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    numbers = torch.zeros(2, dtype=torch.int32)
    peers = tuple(1 << (40 + rank) for rank in range(ranks))
    shared = PeerRows(0, peers, numbers, numbers, 2, width, dtype, 1 << 20)
    all_reduce(rows, rows, shared)
    all_reduce_add_norm(torch.zeros(4, 2, width), rows, weight, 1e-6, rows, shared)
    all_reduce_add_norm(rows, rows, weight, 1e-6, rows, shared, weight)


def quantized(dtype: torch.dtype) -> None:
    """Products with weights in every form, of few rows and of many."""
    for weight in quantized_weights(64, 384).values():
        for rows in (1, 64):
            x = torch.zeros(rows, 384, dtype=dtype)
            quantized_linear(x, weight, None, torch.zeros(rows, 64, dtype=dtype))
    if dtype != torch.float32:
        in_words_of(quantized_weights(64, 384).values(), dtype)


def in_words_of(weights: Iterable[QuantizedWeight], dtype: torch.dtype) -> None:
    """Products with weights in words, in parts, gated and widened, and of rows in FP8."""
    space = torch.zeros(SPACE_BYTES, dtype=torch.uint8)
    for weight in (word_weight(each) for each in weights if not why_not(each)):
        for rows in (1, 12, 40, 100, 300):
            x, out = (torch.zeros(rows, size, dtype=dtype) for size in (384, 64))
            for divided in (False, True):
                word_linear(x, weight, None, out, space, divided=divided)
        for blocks in (1, 2):
            x, out = (torch.zeros(3, size, dtype=dtype) for size in (384, 32))
            few_rows_codes(x, weight, None, out, Shape(blocks, 1, 2, 1), gated=True)
    if CAPABILITY >= (8, 9) and dtype == torch.bfloat16:
        rows_in_codes(space)


def rows_in_codes(space: torch.Tensor) -> None:
    """What leaves rows in FP8 and int8, and the products with them."""
    x, norm = torch.zeros(2, 3, 384, dtype=torch.bfloat16), torch.ones(384)
    rows = fp8_rows_in(torch.zeros(3, 384, dtype=torch.bfloat16), 384)
    rms_norm_fp8(x[0], norm, 1e-6, rows)
    add_rms_norm_fp8(x[0], x[1], norm, 1e-6, rows)
    add_rms_norm_fp8(torch.zeros(2, 3, 384), x[1], norm, 1e-6, rows)
    gated_fp8(torch.zeros(3, 768, dtype=torch.bfloat16), rows)
    rows_to_fp8(x[0], rows)
    int8, one = space[: 3 * 384].view(3, 384).view(torch.int8), torch.ones(3, 1)
    quantize_rows_int8(x[0], int8, one)
    int8_linear(int8, one, int8, one, None, torch.zeros(3, 3, dtype=torch.bfloat16))
    codes, scales = space[: 3 * 384].view(3, 384).view(CODES), torch.ones(3, 3)
    quantize_rows(x[0], codes, scales)
    if CAPABILITY != kernel_choice.HOPPER:
        return  # nobody asks others for it
    weight, out = torch.zeros(128, 384).to(CODES), torch.zeros(3, 128, dtype=torch.bfloat16)
    fp8_block_linear(
        codes, scales, weight, torch.ones(3, 1), 128, None, out, tile=(128, 128), warps=8
    )  # fmt: skip


def low_rank(dtype: torch.dtype) -> None:
    """Updates by adapters, of few rows and of many, to a product and to the first of its parts."""
    numbers = torch.zeros(64, dtype=torch.int32)
    for rank in (16, 64):
        layer = StackedLowRank(
            torch.zeros(2, 2 * rank, 384, dtype=dtype), torch.zeros(2, 512, rank, dtype=dtype),
            (384, 128),
        )  # fmt: skip
        for size in (FEW_TILE, MANY_TILE):
            for rows, kind in ((64, dtype), (1024, dtype), (64, torch.float32)):
                step = RowTiles(numbers, numbers[:48].view(3, 16), 4, rows, size, numbers)
                x, out = torch.zeros(rows, 384, dtype=dtype), torch.zeros(rows, 512, dtype=kind)
                small = torch.zeros(small_numbers(rows, 2 * rank))
                shrink(x, layer, numbers, step, small)
                expand(out, layer, numbers, step, small)
                expand(out, layer, numbers, step, small, add=False)
    out, weight, added = out.to(dtype), out[0].to(dtype), AddedRows(out.to(dtype), numbers)
    add_rms_norm(out, out, weight, 1e-6, out, added)
    add_normed(out, weight, out, weight, 1e-6, out, added)
    gated_product(out, out[:, :256].contiguous(), added=added)


def fixed_order(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Products and attention whose sums have one order."""
    for outputs in (512, 40_000):
        weight = torch.zeros(outputs, 384, dtype=dtype)
        for rows in (1, 100, 1000):
            x, out = (torch.zeros(rows, size, dtype=dtype) for size in (384, outputs))
            fixed_linear(x, weight, None, out)
    keys, values = torch.zeros(2, 4, kv_heads, 16, dim, dtype=dtype)
    numbers, rows_of = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    out = torch.zeros(4, heads, dim, dtype=dtype)
    for chunks in (None, (rows_of, rows_of)):
        batch = DecodeBatch(rows_of, rows_of, numbers)
        place_rows(batch, chunks, rows_of, rows_of, numbers)
    sums = part_sums(4, heads, kv_heads, dim, 2048, out.device)
    for most, memory in ((128, None), (1, None), (1, sums)):
        cache = LayerCache(keys, values)
        fixed_attention(out, numbers, 1, numbers, cache, out, 0.1, most, memory)


def sample(vocab: int, dtype: torch.dtype) -> None:
    """Every kernel of the sampler, once."""
    device = torch.device("cpu")
    slots, space = sampler_slots(1, vocab, 8, device), sampler_space(1, vocab, device)
    numbers = torch.zeros(1, 4096, dtype=torch.int32)
    one, logits = numbers[0], torch.empty(1, vocab, dtype=dtype)
    best = torch.empty(ROWS * vocab_splits(vocab))
    ban_words(one, 1, slots, numbers, numbers, numbers)
    adjust_logits(logits, one, slots, space, no_history(device), 1e-5)
    for after in (False, True):
        sampler_stages(one, 1, one, one, slots, space, after)
    surprise(logits, one, one, best)
    keep_floor(logits, one, one, one, slots, space, 1e-5)
    for rows in (logits, torch.empty(ROWS, vocab, dtype=dtype)):
        draw(rows, one, slots.temperature, one, one, one, best, one, 1e-5)
        draw(rows, one, slots.temperature, one, one, one, best, one, 1e-5, slots, space)
    add_tokens(one, 1, slots, one, numbers)
    logprobs(logits, one, one, one, space, logprob_columns(1, device))


def drafted() -> None:
    """What places and counts drafts."""
    numbers = torch.zeros(16, 64, dtype=torch.int32)
    one, tables = numbers[0], numbers.view(2, 8, 64)
    outcome, rows = Outcome(one, one), PlacedRows(one, one, one, one, tables)
    place_drafts(PlannedRows(one, one, one), numbers, one, one, tables, rows, outcome, 8, 16)
    accept_drafts(numbers, one, one, one, one, numbers, numbers, outcome)
    slots = sampler_slots(16, 64, 8, numbers.device)
    count_ahead(one[:16], one[:16].long(), slots)
    count_accepted(numbers, outcome, numbers, numbers, slots)


def rows_of_others(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """What stands between code that is not ours and our attention."""
    numbers, wide = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    batch = DecodeBatch(numbers, numbers, numbers)
    row_inputs(numbers, numbers, numbers, batch, numbers, wide, wide)
    parts = [torch.zeros(4, count, dim - 8, dtype=dtype) for count in (heads, kv_heads, kv_heads)]
    pack_heads(*parts, torch.zeros(4, heads + 2 * kv_heads, dim - 8, dtype=dtype))
    rotate_heads(*parts[:2], *torch.zeros(2, 4, dim - 8, dtype=dtype))


def patterns(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Attention in chunks, with sinks, and to blocks besides."""
    keys, values = torch.zeros(2, 4, kv_heads, 16, dim, dtype=dtype)
    numbers, rows = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    qkv = torch.zeros(4, heads + 2 * kv_heads, dim, dtype=dtype)
    out, sinks = torch.zeros(4, heads, dim, dtype=dtype), torch.zeros(heads, dtype=dtype)
    turns = HeadInputs(*torch.zeros(2, 64, dim // 2), None, None)
    space = decode_workspace(4, heads, kv_heads, dim, qkv.device)
    listed, cache = listed_blocks(np.ones((1, 4), np.bool_), qkv.device), LayerCache(keys, values)
    for scores, blocks in (
        (Scores(0.1, chunk=32, sinks=True), NOTHING_LISTED), (Scores(0.1, 32), listed),
    ):  # fmt: skip
        of_layer = sinks if scores.sinks else None
        decode_attention(
            qkv, DecodeBatch(rows, rows, numbers), turns, cache, out, space, 1e-6, None, scores,
            of_layer, blocks,
        )  # fmt: skip
        prefill_attention.prefill_attention(
            out, numbers, 1, numbers, cache, out, scores, of_layer, blocks
        )


def caches_of_codes(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Attention over keys and values of a byte a number."""
    numbers, rows = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    qkv = torch.zeros(4, heads + 2 * kv_heads, dim, dtype=dtype)
    out = torch.zeros(4, heads, dim, dtype=dtype)
    turns = HeadInputs(*torch.zeros(2, 64, dim // 2), None, None)
    space = decode_workspace(4, heads, kv_heads, dim, qkv.device)
    prefix = shared_prefix(rows[:1], rows, 4, heads, kv_heads, dim)
    batch = DecodeBatch(rows, rows, numbers)
    for kind in LARGEST if CAPABILITY >= (8, 9) else (torch.int8,):
        shape = (2, 4, kv_heads, 16, columns(dim, kind))
        cache = layer_cache(*torch.zeros(shape, dtype=torch.int8).view(kind))
        rope_and_cache(qkv, rows, rows, numbers, turns, out, cache, 1e-6)
        prefix_attention(qkv, batch, prefix, turns, cache, 1e-6)
        decode_attention(qkv, batch, turns, cache, out, space, 1e-6, prefix)
        decode_attention(
            qkv, batch, turns, cache, out, space, 1e-6, scores=Scores(0.1, 32, 2.0)
        )  # fmt: skip
        for count in CODES_ROWS:
            decode_many(count, cache, heads, kv_heads, dim, dtype)
        prefill_attention.prefill_attention(out, numbers, 1, numbers, cache, out)
        wide = wide_cache(4, kv_heads, 16, dim, numbers, dtype)
        widen_cache(Contexts(torch.zeros(5, dtype=torch.int32), rows), numbers, cache, wide)


def decode_many(
    count: int, cache: LayerCache, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Decode attention of so many rows."""
    qkv = torch.zeros(count, heads + 2 * kv_heads, dim, dtype=dtype)
    rows = torch.zeros(count, dtype=torch.int32)
    batch = DecodeBatch(rows, rows, torch.zeros(count, 16, dtype=torch.int32))
    turns = HeadInputs(*torch.zeros(2, 64, dim // 2), None, None)
    space = decode_workspace(count, heads, kv_heads, dim, qkv.device)
    out = torch.zeros(count, heads, dim, dtype=dtype)
    decode_attention(qkv, batch, turns, cache, out, space, 1e-6)


def prompts_of_encoders(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    rows = torch.zeros(64, heads + 2 * kv_heads, dim, dtype=dtype)
    query, key, value = rows.split((heads, kv_heads, kv_heads), 1)
    tiles, spans = torch.zeros(3, 3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    out = torch.zeros(64, heads, dim, dtype=dtype)
    bias = DistanceBias(torch.zeros(heads, 257), 128)
    for window, added in ((0, None), (64, None), (0, bias)):
        packed_attention(query, key, value, tiles, out, 0.1, window, added)
    if dtype == torch.float32:
        split_products()
    for kind in KINDS:
        pool_rows(out.flatten(1), spans, kind, torch.zeros(2, heads * dim))


def split_products() -> None:
    """Products of fp32 from parts in bfloat16, of few rows and of many."""
    weight = SplitWeight(*torch.zeros(2, 768, 64, dtype=torch.bfloat16))
    for rows in (16, 512, 2048):
        x, residual = torch.zeros(rows, 64), torch.zeros(rows, 768)
        split_linear(x, weight, None, residual)
        split_linear(x, weight, residual[0])
    for activation in ACTIVATIONS:
        split_linear(x, weight, None, activation=activation)


def steps(config: DenseConfig, block_size: int, dtype: torch.dtype) -> None:
    """Steps of all kinds, with the kernels that an executor chooses now."""
    engine = executor(config, block_size, dtype)
    kind = f"heads of {config.head_dim}, blocks of {block_size}, {dtype}"
    print(f"{kind}: {engine.summary}", flush=True)
    blocks = list(range(7 * len(engine.slots.blocks.groups)))
    new = NewSlot(0, bytes(4 * 100), 100, 0, blocks, SlotSampling(0.0, 0, 1.0, 0).packed())
    engine.launch(StepPlan(1, 1, True, [], [new], [], [Chunk(0, 0, 100, True, [])]))
    engine.launch(StepPlan(1, 2, False, [], [], [], []))
    with torch.inference_mode():
        for rows in (4, 16, 64) if config.head_dim == 128 else (4, 64):
            engine.decoder.body(rows, rows, None)
            engine.decoder.head(rows)
        if engine.decoder.shares_prefixes:
            engine.decoder.body(64, 64, None, shared=True)
        if dtype == torch.bfloat16 and not kernel_choice.not_hopper():
            compressed()


def main() -> None:
    recorder = Recorder(CAPABILITY)
    most, vocabularies = len(MODELS), VOCABULARIES
    if len(sys.argv) > 1:
        most, vocabularies = int(sys.argv[1]), VOCABULARIES[:1]
        rows_linear_hopper.TILES = (16, 64, 128)
    for heads, kv_heads, dim, block_size, norm, dtype in MODELS[:most]:
        if prefill_attention.shape_for(dim, dtype.itemsize, SHARED_BYTES) is None:
            continue
        config = DenseConfig(
            512, 1024, 1, heads, kv_heads, dim, 512, 1e-6, RopeParameters(1e4), False,
            qk_norm=norm,
        )  # fmt: skip
        steps(config, block_size, dtype)
        if CAPABILITY == kernel_choice.HOPPER:
            # With the kernels of other GPUs, too.
            with patch.object(kernel_choice, "HOPPER", (0, 0)):
                steps(config, block_size, dtype)
        drafted()
        rows_of_others(heads, kv_heads, dim, dtype)
        summed(dtype, heads * 1280, kv_heads + 1)
        quantized(dtype)
        low_rank(dtype)
        fixed_order(heads, kv_heads, dim, dtype)
        prompts_of_encoders(heads, kv_heads, dim, dtype)
        patterns(heads, kv_heads, dim, dtype)
        caches_of_codes(heads, kv_heads, dim, dtype)
        for vocab in vocabularies:
            sample(vocab, dtype)
    for number, options in enumerate(VARIED[: 1 + most // len(MODELS)]):
        config = DenseConfig(
            512, 1024, 2, 4, 2, 128 >> number, 512, 1e-6, RopeParameters(1e4), False, **options
        )
        steps(config, 16, torch.bfloat16)
    compile_all(recorder)


if __name__ == "__main__":
    main()

"""Any ``CausalModel`` between our state of the batch, attention and sampler on a CUDA device.

Its layers are whatever code computes them, torch's operations or transformers' modelling code, and
allocate as they go; a graph of a step holds their launches and the memory between them. What they
read and what they leave lies in memory of ours: tokens, positions, heads, hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.gpu.attention_arguments import DecodeBatch, HeadInputs
from penstock.kernels.gpu.code_shapes import ROW_CLASSES
from penstock.kernels.gpu.row_inputs import pack_heads, row_inputs
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.drafted_rows import StepRows
from penstock.services.worker.gpu.drafting_executor import DraftingGpuExecutor
from penstock.services.worker.gpu.graph_sizes import GraphSizes, few_graph_sizes
from penstock.services.worker.gpu.kv_pool import KVPool
from penstock.services.worker.gpu.layer_attention import LayerAttention
from penstock.services.worker.gpu.step_decoder import StepDecoder
from penstock.services.worker.gpu.workspace import (
    LogitsSpace,
    make_attention_rows,
    make_logits_space,
)
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.models.causal_model import CausalModel, StepInputs
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.specification import head_shape


class ModelDecoder(StepDecoder):
    """A model whose layers have the same heads: see ``paged_config``."""

    may_wait = True

    def __init__(
        self,
        model: CausalModel,
        words: str,
        state: BatchState,
        capacity: EngineSizes,
        rows: int,
        kind: KVCacheKind = "auto",
    ) -> None:
        """words: how it is computed, for the log; rows: of the largest step; kind: of KV memory."""
        model.prepare(capacity.max_model_len)
        device, dtype = model.device, model.dtype
        heads, kv_heads, dim = head_shape(model.caches)
        self.state, self._model, self._words = state, model, words
        self._quantized = isinstance(model, Decoder) and model.quantized
        self.vocab_size, self.num_kv_heads = model.vocab_size, kv_heads
        slots = len(state.rows)
        self.space = LogitsSpace(**make_logits_space(model.vocab_size, slots, dtype, device))
        self._rows = make_attention_rows(rows, heads, kv_heads, dim, dtype, device)
        self.attention = LayerAttention(
            state,
            self._rows,
            [_unchanged(capacity.max_model_len, dim, device)] * len(model.caches),
            model.caches,
            capacity.num_blocks + EXTRA_BLOCKS,
            capacity.block_size,
            0.0,
            kind=kind,
        )
        self._hidden = torch.zeros(rows, model.hidden_size, dtype=dtype, device=device)
        self._tokens, self._positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._decode_tokens = torch.full((slots,), -1, dtype=torch.int32, device=device)

    @property
    def summary(self) -> str:
        return f"{self._words}; {self.attention.summary}"

    @property
    def widened_room(self) -> tuple[int, int]:
        return self.attention.widened_room

    @property
    def shares_prefixes(self) -> bool:
        return self.attention.shares_prefixes

    @property
    def kv_pool(self) -> KVPool:
        return self.attention.pool

    @property
    def row_classes(self) -> Sequence[int]:
        return ROW_CLASSES if self._quantized else ()

    def graph_sizes(self, most: int, max_rows: int) -> GraphSizes:
        return few_graph_sizes(most, max_rows, self.shares_prefixes)

    def body(
        self,
        rows: int,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool = False,
    ) -> None:
        state = self.state
        self.attention.plan(num_decode, shared)
        alone = self._decode_tokens[:rows]
        of_chunks = (
            (alone, alone, alone)
            if chunks is None
            else (chunks.tokens[:rows], chunks.slots[:rows], chunks.positions[:rows])
        )
        batch = DecodeBatch(state.rows[:num_decode], state.position, state.tables[0])
        tokens, positions = self._tokens[:rows], self._positions[:rows]
        row_inputs(*of_chunks, batch, state.last_token, tokens, positions)
        attention = _Attention(self, num_decode, chunks, shared)
        hidden = self._model.hidden(StepInputs(tokens, positions, attention, None), None)
        self._hidden[:rows].copy_(hidden)

    def attend(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        num_decode: int,
        chunks: StepRows | None,
        shared: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        """heads: queries, keys and values; sinks: [Hq] or ``None``. See ``StepAttention``."""
        rows = len(heads[0])
        pack_heads(*heads, self._rows.qkv[:rows])
        self.attention.attend(layer, rows, num_decode, chunks, shared, sinks)
        return self._rows.output[:rows].flatten(1)

    def head(self, count: int) -> None:
        hidden = self._hidden.index_select(0, self.state.sample_index[:count])
        self.space.logits[:count].copy_(self._model.logits(hidden, None))

    def head_of_all(self, rows: int, count: int) -> None:
        self.head(count)

    def row_logits(self, first: int, count: int) -> Tensor:
        logits = self.space.logits[:count]
        return logits.copy_(self._model.logits(self._hidden[first : first + count], None))


class _Attention:
    """The ``StepAttention`` of one step."""

    def __init__(
        self,
        decoder: ModelDecoder,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool,
    ) -> None:
        self._decoder, self._step = decoder, (num_decode, chunks, shared)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        return self._decoder.attend(layer, (query, key, value), *self._step, sinks)


def _unchanged(max_positions: int, dim: int, device: torch.device) -> HeadInputs:
    """Cosines of 1 and sines of 0: the heads come rotated."""
    shape = (max_positions, dim // 2)
    return HeadInputs(
        torch.ones(shape, dtype=torch.float32, device=device),
        torch.zeros(shape, dtype=torch.float32, device=device),
        None,
        None,
    )


def model_executor(
    model: CausalModel, words: str, capacity: EngineSizes, kind: KVCacheKind = "auto"
) -> DraftingGpuExecutor:
    """words: how the model is computed, for the log; kind: of KV memory."""

    def make(state: BatchState, max_rows: int) -> ModelDecoder:
        return ModelDecoder(model, words, state, capacity, max_rows, kind)

    return DraftingGpuExecutor(capacity, model.device, make)

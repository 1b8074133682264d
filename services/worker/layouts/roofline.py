"""How long a step takes at least of what a GPU's memory, arithmetic and links do, as it is reached.

A step of a stage takes the sum of

- each layer's products: their weights' bytes, or their operations, whichever take longer;
- attention: the bytes of K and V that decode rows read, and the operations of prefill;
- the other bytes that rows move between kernels;
- a fixed time for each layer and for the step;
- all-reduces among the ranks that divide the layers.

The shares and times below were fitted once to what one GPU was measured to do; a test compares
estimates with the tables of ``docs/benchmarks.md``. ``docs/planning.md`` has the sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.kernels.cache_kinds import KVCacheKind, stored_head
from penstock.services.worker.gpus import Gpu, Link
from penstock.services.worker.model_shape import ModelShape
from penstock.services.worker.models.rank_shares import most_peer_bytes
from penstock.services.worker.models.specification import CacheSpecification

MEMORY_SHARE = 0.9
"""Of a sheet's bandwidth: 4.3 of 4.8 TB/s on an H200, 3.0 of 3.35 on an H100."""
FLOPS_SHARE = 0.7
"""Of a sheet's operations, under load for long: 650 to 690 of 989 TFLOP/s on an H200."""
LAYER_SECONDS = 14e-6
"""A layer's kernels, beside what their bytes take: they wait for each other."""
OTHERS_LAYER_SECONDS = 58e-6
"""The same of transformers' code, which has five times as many kernels."""
STEP_SECONDS = 15e-6
"""The draw, and the start of the next step."""
TILE_POSITIONS = 64
"""A row's attention takes as long as if it had so many positions more: tiles are read whole, and
the parts of a context are put together."""
COMPRESSED_SHARE, COMPRESSED_ROWS = 0.83, 64
"""The time to read compressed weights, as a share of the plain ones' (a layer of B takes 83 µs for
102 at one row, 97 for 112 at 64; they are 0.75 of the bytes), and the largest step that does."""
NVLINK_SHARE, PCIE_SHARE = 0.8, 0.6
"""Of a link's bandwidth, by NCCL: 366 of 450 GB/s between four H100s, 25 of 32 between five RTX
4090s and 28 of 64 between eight RTX 5090s."""
NVLINK_SECONDS, PCIE_SECONDS = (6e-6, 2e-6), (10e-6, 4e-6)
"""An all-reduce of few bytes by NCCL in a graph: once, and for each rank."""
UNFILLED_BYTES, UNFILLED_SECONDS = 4e6, 4e-12
"""NCCL does not fill a link with so many bytes: what each of them takes longer. (Two H100s: 17.7 µs
for 1 MiB, which is 4.8 more than by the above; six: 53 µs for 4 MB, 15.6 more.)"""
PEER_SECONDS = 2.3e-6, 1.4e-6
"""A sum over peer memory of few bytes, with the time in which ranks wait for each other: from a
token of B and of 32B at batch 1 on two and four H100s. The sum alone takes 2.8 µs between two."""
STAGE_SECONDS = 400e-6
"""For each stage of several and each step: rows are handed on, tokens are sent back, and the next
batch is launched when they are there. From B in two stages on H100s: W1, batch 1, 64."""
NETWORK = Link("400 Gbit/s", 50e9)
"""Between hosts: one adapter for each GPU."""
NETWORK_SECONDS = 20e-6


class Rates(msgspec.Struct, frozen=True):
    """What is reached on one of several GPUs of a host."""

    bandwidth: float
    """Bytes of memory a second."""
    flops: float
    """Operations of products a second."""
    link: Link
    peer: bool = True
    """Whether sums of few rows go over peer memory where an NVLink connects the GPUs."""

    def all_reduce(self, num_bytes: float, ranks: int) -> float:
        """Seconds; num_bytes: of each rank's addend."""
        if ranks == 1:
            return 0.0
        if self.peer and self.link.nvlink and num_bytes <= most_peer_bytes(ranks):
            once, each = PEER_SECONDS
            return once + each * ranks + (ranks - 1) * num_bytes / self._reached
        once, each = NVLINK_SECONDS if self.link.nvlink else PCIE_SECONDS
        unfilled = UNFILLED_SECONDS * min(num_bytes, UNFILLED_BYTES) if self.link.nvlink else 0.0
        moved = 2 * (ranks - 1) / ranks * num_bytes
        return once + each * ranks + unfilled + moved / self._reached

    def send(self, num_bytes: float, *, hosts: bool) -> float:
        """Seconds from one stage to the next; hosts: which is on another host."""
        if hosts:
            return NETWORK_SECONDS + num_bytes / NETWORK.bandwidth
        return num_bytes / self._reached

    @property
    def _reached(self) -> float:
        return self.link.bandwidth * (NVLINK_SHARE if self.link.nvlink else PCIE_SHARE)


def rates_of(gpu: Gpu, *, peer: bool = True) -> Rates:
    return Rates(MEMORY_SHARE * gpu.bandwidth, FLOPS_SHARE * gpu.flops, gpu.link, peer)


class Rows(msgspec.Struct, frozen=True):
    """What a step computes."""

    decode: int = 0
    """Sequences that get a token each."""
    context: float = 0.0
    """Positions that each of them has, on average."""
    prefill: int = 0
    """Tokens of prompts."""
    behind: float = 0.0
    """Positions that each of these attends to, on average."""
    sampled: int = 0
    """Prompts that end in this step."""

    @property
    def computed(self) -> int:
        return self.decode + self.prefill


class StageCost:
    """Steps of one stage of a model, on one of the ranks that divide it."""

    def __init__(
        self,
        shape: ModelShape,
        rates: Rates,
        item_bytes: int,
        *,
        ranks: int = 1,
        begins: bool = True,
        ends: bool = True,
        compressed: bool = False,
        own_code: bool = True,
        kind: KVCacheKind = "auto",
    ) -> None:
        """shape: of the rank's part; compressed: whether it has compressed weights, too; own_code:
        whether our kernels compute the layers, and not transformers' code; kind: of KV memory."""
        self._shape, self._rates, self._item = shape, rates, item_bytes
        self._ranks, self._begins, self._ends = ranks, begins, ends
        self._compressed, self._kind = compressed, kind
        self._head = shape.vocab * shape.hidden * ends
        self._linears = shape.parameters - shape.table_parameters - self._head
        self._layer_seconds = LAYER_SECONDS if own_code else OTHERS_LAYER_SECONDS
        self._caches = Counter(shape.caches)

    def seconds(self, rows: Rows) -> float:
        """One step."""
        sampled = rows.decode + rows.sampled
        return (
            self._product(self._linears, rows.computed)
            + self._attention(rows)
            + len(self._shape.caches) * self._layer_seconds
            + rows.computed * self._moved_bytes / self._rates.bandwidth
            + self._exchange(rows.computed)
            + (self._sampling(sampled) if self._ends else 0.0)
        )

    def sent_bytes(self, rows: int) -> int:
        """To the next stage."""
        return rows * self._shape.hidden * self._item

    def _product(self, numbers: int, rows: int) -> float:
        share = COMPRESSED_SHARE if self._compressed and rows <= COMPRESSED_ROWS else 1.0
        read = share * numbers * self._item / self._rates.bandwidth
        return max(read, 2 * numbers * rows / self._rates.flops)

    def _attention(self, rows: Rows) -> float:
        read = pairs = 0.0
        for cache, layers in self._caches.items():
            head = stored_head(cache.head_dim, self._item, self._kind)
            bytes_each = 2 * cache.num_kv_heads * head
            held = _attended(cache, rows.context) + TILE_POSITIONS
            read += layers * rows.decode * held * bytes_each
            pairs += layers * cache.num_heads * cache.head_dim * _attended(cache, rows.behind)
        operations = 4 * rows.prefill * pairs
        return read / self._rates.bandwidth + operations / self._rates.flops

    @property
    def _moved_bytes(self) -> float:
        """That a row's activations are written and read in all layers."""
        shape = self._shape
        width = 3 * shape.hidden + shape.heads_width + 1.5 * shape.mlp_width
        return 2 * len(shape.caches) * width * self._item

    def _sampling(self, rows: int) -> float:
        """The LM head and the draw."""
        logits = 2 * rows * self._shape.vocab * self._item / self._rates.bandwidth
        exchange = self._rates.all_reduce(0, self._ranks)
        return self._product(self._head, rows) + logits + exchange + STEP_SECONDS

    def _exchange(self, rows: int) -> float:
        """Two sums a layer among the ranks, and that of the embedding's parts."""
        count = 2 * len(self._shape.caches) + self._begins
        return count * self._rates.all_reduce(rows * self._shape.hidden * self._item, self._ranks)


def _attended(cache: CacheSpecification, positions: float) -> float:
    """Of so many positions, those that a layer attends to."""
    if any(cache.besides):
        return positions
    return min(positions, cache.window or cache.chunk or positions)


class EngineCost:
    """Steps of an engine: of all its stages."""

    def __init__(
        self, stages: Sequence[StageCost], rates: Rates, batches: int = 1, *, hosts: bool = False
    ) -> None:
        """batches: how many are under way at once, so that stages compute beside each other; hosts:
        whether the stages are on several hosts."""
        self._stages, self._rates, self._hosts = stages, rates, hosts
        self._batches = batches

    def decode_seconds(self, sequences: int, context: float) -> float:
        """From a token of each of so many sequences to the next one."""
        batches = min(self._batches, sequences)
        rows = Rows(decode=-(-sequences // batches), context=context)
        times = self._times(rows)
        return max(sum(times), batches * max(times))

    def prompt_seconds(self, tokens: int, step_tokens: int, rows: Rows | None = None) -> float:
        """A prompt of so many tokens that waits for nobody, in steps of at most ``step_tokens``;
        rows: decode rows in each of these steps."""
        beside, seconds = rows or Rows(), 0.0
        for start in range(0, tokens, step_tokens):
            count = min(step_tokens, tokens - start)
            times = self._times(
                msgspec.structs.replace(
                    beside,
                    prefill=count,
                    behind=start + count / 2,
                    sampled=int(start + count == tokens),
                )
            )
            seconds += sum(times) if start + count == tokens else self._between(times)
        return seconds

    def prefill_seconds(self, tokens: int, step_tokens: int) -> float:
        """For each token of prompts of this length, in full steps."""
        prompts = max(1, step_tokens // tokens)
        times = self._times(Rows(prefill=step_tokens, behind=tokens / 2, sampled=prompts))
        return self._between(times) / step_tokens

    def rate(self, sequences: int, prompt: int, answer: int, step_tokens: int) -> float:
        """Tokens of answers a second, while so many sequences run at any time."""
        decode = answer * self.decode_seconds(sequences, prompt + answer / 2)
        prefill = sequences * prompt * self.prefill_seconds(prompt, step_tokens)
        return sequences * answer / (decode + prefill)

    def _between(self, times: Sequence[float]) -> float:
        """Seconds from one step to the next of those that follow each other through the stages."""
        return max(max(times), sum(times) / self._batches)

    def _times(self, rows: Rows) -> list[float]:
        sent = [
            self._rates.send(stage.sent_bytes(rows.computed), hosts=self._hosts)
            for stage in self._stages[:-1]
        ]
        passing = STAGE_SECONDS if sent else 0.0
        pairs = zip(self._stages, [*sent, 0.0], strict=True)
        return [stage.seconds(rows) + send + passing for stage, send in pairs]

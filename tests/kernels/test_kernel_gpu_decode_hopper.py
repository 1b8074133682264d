"""The Gluon kernel of decode attention on a Hopper GPU, against a plain computation in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from support.kernels.paged_sequences import EPS, MAX_POSITIONS, Case, Paged
from support.kernels.triton_device import DEVICE, ON_GPU, error, tolerance
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import DecodeBatch
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.shared_prefix import SharedPrefix, parts_for, shared_prefix
from penstock.services.worker.gpu.attention_choice import PrefixAttention, TritonPrefixAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
FEW = [0, 33, 3000]
MANY = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 500, 777, 1500, 2047]
CASES = [
    Case(heads, kv_heads, dim, block_size, norm, lengths)
    for lengths in (FEW, MANY)
    for heads, kv_heads, dim, block_size, norm in (
        (16, 8, 128, 16, True), (32, 8, 128, 16, True), (4, 4, 128, 32, False),
        (14, 2, 64, 64, False), (16, 2, 128, 8, True), (8, 8, 64, 8, True), (8, 4, 128, 128, False),
        (16, 1, 128, 16, False), (16, 1, 64, 256, True),
    )
]  # fmt: skip
OWN = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 500]
"""Positions behind a shared prefix."""
PREFIXED = [
    Case(heads, kv_heads, dim, block_size, norm, [13 * block_size + own for own in OWN])
    for heads, kv_heads, dim, block_size, norm in (
        (16, 8, 128, 16, True), (32, 8, 128, 16, True), (32, 8, 128, 64, False),
        (4, 4, 128, 32, False), (8, 8, 64, 16, True), (16, 2, 64, 64, True),
        (16, 2, 128, 32, False), (14, 2, 64, 32, False), (16, 1, 128, 8, True),
        (24, 8, 128, 16, True), (28, 4, 128, 16, False),
    )
]  # fmt: skip
"""Behind 13 blocks, which with the smallest end in the middle of a tile of 32 positions."""
KERNELS = ["Triton", "Gluon"]
"""The kernels of attention over the shared prefix."""
OF_KERNELS = [
    pytest.param(case, kernel, id=f"{case} {kernel}")
    for case in PREFIXED
    for kernel in KERNELS
    if kernel == "Triton" or case.dim == 128
]
PADDING = 2
"""Rows of no slot, behind the others."""


class Rows:
    """Decode rows over a cache with NaN in its unused places, on the second of two layers.

    common: positions that all rows share but every fifth, or none; kernel: what attends to them.
    """

    def __init__(self, case: Case, common: int | None = None, kernel: str = "Gluon") -> None:
        from penstock.kernels.gpu.decode_attention_hopper import HopperDecodeAttention
        from penstock.kernels.gpu.shared_prefix_hopper import HopperPrefixAttention, why_not

        self.case, self.paged = case, Paged(case, torch.bfloat16, room=1)
        paged, count = self.paged, len(case.lengths)
        self.prefixed = common is not None
        self.prefix = self._shared(common or 0)
        self.keys = torch.stack([torch.full_like(paged.keys, float("nan")), paged.keys])
        self.values = torch.stack([torch.full_like(paged.values, float("nan")), paged.values])
        self.before = self.keys.clone(), self.values.clone()
        paged.keys, paged.values = self.keys[1], self.values[1]
        self.qkv = paged.rand(count + PADDING, case.heads + 2 * case.kv_heads, case.dim)
        self.rows = torch.tensor([*range(count), -1, -1], dtype=torch.int32, device=DEVICE)
        self.position = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
        self.out = torch.empty(
            count + PADDING, case.heads, case.dim, dtype=torch.bfloat16, device=DEVICE
        )
        self.attention = HopperDecodeAttention(
            self.keys, self.values, case.heads, 200, case.norm, EPS, self.prefix
        )
        self.attend_prefix: PrefixAttention = TritonPrefixAttention(
            self.keys, self.values, EPS, self.prefix
        )
        if kernel == "Gluon" and self.prefixed:
            shared = case.heads // case.kv_heads
            assert not why_not(torch.bfloat16, case.dim, case.block_size, shared)
            self.attend_prefix = HopperPrefixAttention(
                self.keys, self.values, case.heads, case.norm, EPS, self.prefix
            )

    def _shared(self, common: int) -> SharedPrefix:
        """The prefix, which members' block tables name from now on."""
        case, table = self.case, self.paged.table
        members = [index for index in range(len(case.lengths)) if index % 5 != 3]
        blocks = common // case.block_size
        table[members, :blocks] = table[members[0], :blocks]
        lengths = torch.zeros(200, dtype=torch.int32, device=DEVICE)
        lengths[members] = common
        leader = torch.tensor([members[-1] if common else -1], dtype=torch.int32, device=DEVICE)
        return shared_prefix(leader, lengths, 200, case.heads, case.kv_heads, case.dim)

    def reset(self) -> None:
        """The caches as they were, and no output."""
        self.keys.copy_(self.before[0])
        self.values.copy_(self.before[1])
        self.out.fill_(float("nan"))
        self.prefix.partial.fill_(float("nan"))
        self.prefix.sums.fill_(float("nan"))
        self.attention.suffix.fill_(float("nan"))

    def attend(self, ahead: Callable[[], object] = lambda: None) -> None:
        """ahead: starts what is between the plan and the first kernel that reads QKV."""
        paged = self.paged
        batch = DecodeBatch(self.rows, self.position, paged.table)
        self.attention.plan(batch, self.prefixed)
        ahead()
        if self.prefixed:
            self.attend_prefix(1, self.qkv, batch, paged.inputs)
        self.attention(1, self.qkv, batch, paged.inputs, self.out, self.prefixed)

    def check(self) -> None:
        """What the last call wrote."""
        case, paged = self.case, self.paged
        heads, kv_heads = case.heads, case.kv_heads
        qkv, out = self.qkv[:-PADDING], self.out[:-PADDING]
        query = paged.rotated(qkv[:, :heads], paged.inputs.query_weight, self.position)
        key = paged.rotated(
            qkv[:, heads : heads + kv_heads], paged.inputs.key_weight, self.position
        )
        for index, length in enumerate(self.position.tolist()):
            keys, values = paged.context(index, length + 1)
            assert error(keys[length], key[index]) < tolerance(torch.bfloat16)
            assert torch.equal(values[length], qkv[index, heads + kv_heads :])
            wanted = paged.attend(query[index : index + 1], index, length)
            found = out[index : index + 1]
            assert error(found, wanted) < tolerance(torch.bfloat16), f"{length} cached"
        assert self.out[-PADDING:].isnan().all(), "padding is left alone"
        assert not self.attention.arrived.any(), "ready for the next launch"

    def unwritten(self) -> tuple[Tensor, Tensor]:
        """The caches as they must be but for the new positions, and as they are, in bits."""
        wanted = torch.stack(self.before).view(torch.int16)
        found = torch.stack([self.keys, self.values]).view(torch.int16).clone()
        for index, length in enumerate(self.position.tolist()):
            block, offset = (place[-1] for place in self.paged.places(index, length + 1))
            found[:, 1, block, :, offset] = wanted[:, 1, block, :, offset]
        return wanted, found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_all_lengths_equal_the_plain_computation(case: Case) -> None:
    rows = Rows(case)
    rows.reset()
    rows.attend()
    rows.check()
    wanted, found = rows.unwritten()
    assert torch.equal(found, wanted), "nothing but the new positions is written"


@pytest.mark.parametrize(
    "lengths", [[5], [MAX_POSITIONS - 2], [index * 7 % 300 for index in range(190)]], ids=len
)
def test_one_row_and_many_rows_equal_the_plain_computation(lengths: list[int]) -> None:
    rows = Rows(CASES[0]._replace(lengths=lengths))
    rows.reset()
    rows.attend()
    rows.check()


@pytest.mark.parametrize(("case", "kernel"), OF_KERNELS)
def test_rows_behind_a_shared_prefix_equal_the_plain_computation(case: Case, kernel: str) -> None:
    rows = Rows(case, 13 * case.block_size, kernel)
    rows.reset()
    rows.attend()
    rows.check()
    wanted, found = rows.unwritten()
    assert torch.equal(found, wanted), "nothing but the new positions is written"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("heads", "count", "parts"),
    [(32, 2, 16), (32, 16, 16), (32, 64, 4), (32, 190, 2), (64, 190, 1)],
)
def test_a_prefix_in_one_part_or_in_many_equals_the_plain_computation(
    heads: int, count: int, parts: int, kernel: str
) -> None:
    lengths = [1040 + index * 7 % 300 for index in range(count)]
    assert parts_for(count + PADDING, heads, 8) == parts
    rows = Rows(CASES[1]._replace(heads=heads, lengths=lengths), 1040, kernel)
    rows.reset()
    rows.attend()
    rows.check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_prefix_of_nobody_changes_nothing(kernel: str) -> None:
    rows = Rows(CASES[0]._replace(lengths=MANY), 0, kernel)
    rows.reset()
    rows.attend()
    rows.check()


def test_a_step_can_leave_the_prefix_out() -> None:
    rows = Rows(PREFIXED[0], 13 * PREFIXED[0].block_size)
    rows.prefixed = False
    rows.reset()
    rows.attend()
    rows.check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_programs_none_of_whose_rows_take_part_leave_nothing_behind(kernel: str) -> None:
    """A program has 32 of these rows or fewer; 40 take part."""
    lengths = [1040 + index * 7 % 300 for index in range(190)]
    rows = Rows(CASES[1]._replace(lengths=lengths), 1040, kernel)
    rows.prefix.lengths[40:] = 0
    rows.prefix.slot.fill_(0)
    rows.reset()
    rows.attend()
    rows.check()
    parts = parts_for(len(rows.rows), rows.case.heads, rows.case.kv_heads)
    each = parts * rows.case.heads
    assert rows.prefix.partial[40 * each * rows.case.dim :].isnan().all()
    assert rows.prefix.sums[40 * each * 2 :].isnan().all()


@pytest.mark.parametrize(
    ("case", "common", "kernel"),
    [
        (CASES[-1], None, "Triton"), (PREFIXED[0], 13 * 16, "Triton"),
        (PREFIXED[0], 13 * 16, "Gluon"),
    ],
    ids=["alone", "prefix, Triton", "prefix, Gluon"],
)  # fmt: skip
def test_padding_alone_writes_nothing(case: Case, common: int | None, kernel: str) -> None:
    rows = Rows(case, common, kernel)
    rows.rows.fill_(-1)
    rows.reset()
    rows.attend()
    for written in (rows.out, rows.prefix.partial, rows.prefix.sums):
        assert written.isnan().all()
    assert torch.equal(rows.keys.view(torch.int16), rows.before[0].view(torch.int16))


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few rows", "many rows"])
def test_every_run_gives_the_same_bits(lengths: list[int]) -> None:
    assert_same_bits(Rows(CASES[1]._replace(lengths=lengths)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_run_behind_a_prefix_gives_the_same_bits(kernel: str) -> None:
    assert_same_bits(Rows(PREFIXED[1], 13 * PREFIXED[1].block_size, kernel))


@triton.jit
def _late_copy(source, target, size, EARLY: tl.constexpr):
    """Lets its successor start, is busy for some 50 µs, and leaves most of the GPU free."""
    begin_early(EARLY)
    number = tl.program_id(0)
    for _ in range(20_000):
        number = number * 1_664_525 + 1_013_904_223
    for start in range(tl.program_id(0) * 1024, size, tl.num_programs(0) * 1024):
        place = start + tl.arange(0, 1024)
        there = (place < size) & (place + (number & 1) >= 0)
        tl.store(target + place, tl.load(source + place, mask=there), mask=there)


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_a_kernel_ahead_that_writes_qkv_late_is_awaited(kernel: str | None) -> None:
    case = PREFIXED[1]
    rows = Rows(case, 13 * case.block_size if kernel else None, kernel or "Gluon")
    source = rows.qkv.clone()

    def write_late() -> None:
        source.mul_(1.0)  # starts when the plan is over, and lets nothing start before it ends
        _late_copy[(4,)](source, rows.qkv, source.numel(), EARLY, launch_pdl=EARLY)

    rows.attend(write_late)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.attend(write_late)
    for _ in range(5):
        source.normal_()
        rows.reset()
        rows.qkv.fill_(float("nan"))
        graph.replay()
        rows.check()


def assert_same_bits(rows: Rows) -> None:
    rows.reset()
    rows.attend()
    first = rows.out.clone()
    for _ in range(20):
        rows.reset()
        rows.attend()
        assert torch.equal(rows.out.view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few rows", "many rows"])
def test_a_graph_serves_other_rows_and_lengths_than_those_it_recorded(lengths: list[int]) -> None:
    rows = Rows(CASES[0]._replace(lengths=lengths))
    wanted = rows.position.clone()
    rows.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.attend()
    graph.replay()
    rows.check()
    rows.position.copy_(torch.div(wanted, 2, rounding_mode="floor"))
    rows.reset()
    graph.replay()
    rows.check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_graph_serves_other_prefixes_than_the_one_it_recorded(kernel: str) -> None:
    case = PREFIXED[0]
    rows = Rows(case, 13 * case.block_size, kernel)
    rows.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.attend()
    graph.replay()
    rows.check()
    members = rows.prefix.lengths > 0
    for blocks in (5, 1):
        rows.prefix.lengths[members] = blocks * case.block_size
        rows.reset()
        graph.replay()
        rows.check()

"""A worker in plain Python that executes step plans and refuses every plan that breaks a rule.

It computes with what the plan tells: what stands before the positions that a new slot computes is
read from its blocks. Whoever knows the sequences whole says so, and it is compared.

K and V are modelled by content: a position holds a hash of all tokens up to it, which is what the
K and V of a real model depend on. So a block table that is wrong, stale or too short, a block that
two sequences write, or a prefix hit on other tokens is seen at the read. The token sampled is a
function of that hash, so that a whole run can be compared with one sequence computed alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import msgspec

from penstock.protocol.wire.messages.steps import (
    TOO_EARLY,
    Chunk,
    NewSlot,
    RowFailure,
    SlotAdjustments,
    SlotSampling,
    StepFailed,
    StepPlan,
    StepResult,
)
from penstock.services.scheduler.limits import Limits

_MASK = (1 << 61) - 1
_NOT_A_NUMBER = -1
"""Content of a position whose K and V are NaN, and of all that depend on it."""
_UNSENT = -2
"""Stands for a token that the plan did not bring."""


class BrokenRule(AssertionError):
    """The plan is not one that the protocol allows."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise BrokenRule(message)


def token_bytes(tokens: Ordered[int]) -> bytes:
    return array("i", tokens).tobytes()


def token_list(data: bytes) -> list[int]:
    tokens = array("i")
    tokens.frombytes(data)
    return tokens.tolist()


def mix(history: int, value: int) -> int:
    """Hash of a history and one value more."""
    mixed = ((history ^ (value + 0x9E37_79B9)) * 0x2545_F491_4F6C_DD1D) & _MASK
    return mixed ^ (mixed >> 29)


def history_hash(tokens: Ordered[int]) -> int:
    history = 0
    for token in tokens:
        history = mix(history, token)
    return history


def draw(history: int, sampling: SlotSampling, choice: int, position: int, vocab_size: int) -> int:
    """The token sampled after a history, as output number ``position`` of its choice."""
    value = mix(mix(mix(history, sampling.seed), choice), position)
    return mix(value, 7) % vocab_size


@dataclass
class Slot:
    """What the worker knows of one slot."""

    tokens: list[int]
    prompt_len: int
    computed: int
    blocks: list[int]
    sampling: SlotSampling
    choice: int
    histories: list[int] = field(default_factory=list)
    """Hash of the tokens up to each position, once it is known what stands before them."""
    decoding: bool = False
    early: bool = False
    began: int = -1
    """What was computed before the latest step in which it decoded."""

    def begin(self, before: list[int]) -> None:
        """before: the histories of the computed positions."""
        self.histories = list(before)
        history = before[-1] if before else 0
        for token in self.tokens[len(before) :]:
            history = mix(history, token)
            self.histories.append(history)

    def append(self, token: int) -> None:
        self.histories.append(mix(self.histories[-1], token))
        self.tokens.append(token)


@dataclass
class SimulatedWorker:
    """Executes plans one at a time, as ``protocol/wire/messages/steps.py`` says.

    ``poison``: a step that computes this token raises (as a kernel fault would).
    ``not_a_number``: K, V and logits of this token and of all that attend to it are NaN.
    """

    limits: Limits
    epoch: int
    poison: int = -1
    not_a_number: int = -1
    banned_seed: int = -1
    """Slots with this seed ban every token."""
    is_early: Callable[[SlotSampling], bool] = lambda _: False
    """Whether the grammar of a row is not compiled yet; its slot has no token from then on."""
    row_count: Callable[[], int] | None = None
    """How many tokens a row would like to bring, ``max_row_tokens`` at most; ``None``: one."""
    fail_steps: dict[int, str] = field(default_factory=dict)
    """Steps that raise, with the reason."""
    token_seconds: float = 0.0
    """What a token of prefill is said to take."""
    executed: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    max_rows: int = 0

    def __post_init__(self) -> None:
        self._expected = 1
        self._needs_full = True
        self._memory: list[list[int | None]] = [
            [None] * self.limits.block_size for _ in range(self.limits.num_blocks)
        ]
        self._whole: dict[int, list[int]] = {}
        self._before: dict[int, int] = {}
        """The history that each history continues."""

    def execute(
        self, plan: StepPlan, whole: dict[int, list[int]] | None = None
    ) -> StepResult | StepFailed | None:
        """Run one plan. ``None``: not executed (another epoch, or waiting for a full plan).

        whole: all tokens of new slots' sequences, as far as the caller knows them.
        """
        if plan.epoch != self.epoch:
            return None
        require(plan.step == self._expected, f"plan {plan.step} came, {self._expected} was due")
        self._expected += 1
        if self._needs_full and not plan.full:
            require(plan.step > 1, "the first plan of an epoch is full")
            return None
        require(plan.full == self._needs_full, "a full plan came without a reason")
        return self.run(plan, whole)

    def drop_slots(self) -> None:
        """Forget all slots; only a full plan can follow."""
        self.slots.clear()
        self._needs_full = True

    def run(
        self, plan: StepPlan, whole: dict[int, list[int]] | None = None
    ) -> StepResult | StepFailed:
        """Execute a plan whose turn it is. A full one may come at any time."""
        self._whole = whole or {}
        require(plan.full or not self._needs_full, "only a full plan can follow a failure")
        self._needs_full = False
        self._rearrange(plan)
        parts = self.limits.micro_batches
        decoding = [
            slot
            for number, slot in sorted(self.slots.items())
            if slot.decoding and number % parts == plan.micro_batch
        ]
        work = self._work(plan, decoding)
        try:
            self._write(plan, work)
        except _StepRaised as raised:
            self.drop_slots()
            return StepFailed(plan.epoch, plan.step, str(raised))
        self.executed += 1
        return self._finish(plan, decoding, work)

    # Slots and block tables.

    def _rearrange(self, plan: StepPlan) -> None:
        if plan.full:
            require(not plan.gone and not plan.grown, "a full plan begins without slots")
            self.slots.clear()
        for number in plan.gone:
            require(number in self.slots, f"slot {number} is gone, but was not in use")
            del self.slots[number]
        for new in plan.added:
            self._add(new, plan.prompts)
        wanted = dict.fromkeys(new.prompt for new in plan.added if new.prompt >= 0)
        require(list(wanted) == list(range(len(plan.prompts))), "a prompt that nobody points to")
        require(len(plan.grown) % 2 == 0, "grown holds pairs")
        for number, block in zip(plan.grown[::2], plan.grown[1::2], strict=True):
            slot = self._slot(number)
            require(slot.decoding, f"slot {number} grew, but does not decode")
            self._append_blocks(slot, [block])
            if self.row_count is not None:
                continue  # how far it has come was not known
            require(self._covers(slot, slot.computed + 1), f"slot {number} grew for nothing")
            require(
                len(slot.blocks) == self.limits.blocks_for(slot.computed + 1),
                f"slot {number} grew before it needed to",
            )

    def _add(self, new: NewSlot, prompts: list[bytes]) -> None:
        require(0 <= new.slot < self.limits.max_num_seqs, f"there is no slot {new.slot}")
        require(new.slot not in self.slots, f"slot {new.slot} is in use")
        sent = token_list(new.tokens)
        tokens = [_UNSENT] * new.start + sent
        vocab, virtual = self.limits.vocab_size, max(new.virtual_tokens - new.start, 0)
        ids = [vocab + new.start + at for at in range(virtual)]
        require(sent[:virtual] == ids, "virtual tokens of other numbers")
        require(all(0 <= t < vocab for t in sent[virtual:]), "token out of vocabulary")
        require(0 < new.prompt_len <= len(tokens), "the prompt is empty or longer than the tokens")
        require(len(tokens) < self.limits.max_model_len, "no room for one token more")
        require(0 <= new.num_computed < len(tokens), "nothing is left to compute")
        require(
            new.num_computed == len(new.blocks) * self.limits.block_size,
            "prefix hits are whole blocks",
        )
        sampling = msgspec.msgpack.decode(new.sampling, type=SlotSampling)
        require(0 <= sampling.seed < 2**64, "the seed is unsigned, 64 bits")
        self._require_history(new, prompts, sampling.adjustments)
        slot = Slot(tokens, new.prompt_len, new.num_computed, [], sampling, new.choice)
        self._append_blocks(slot, new.blocks)
        self.slots[new.slot] = slot

    def _require_history(
        self, new: NewSlot, prompts: list[bytes], asked: SlotAdjustments | None
    ) -> None:
        """A slot gets the tokens that its adjustments and its drafts read, and no others that it
        does not compute."""
        drafts = bool(new.corpus)
        require(not drafts or self.limits.max_row_tokens > 1, "drafts are not for this engine")
        if asked is None and not drafts:
            require(new.start == new.num_computed, "tokens that nobody reads are sent")
            require(new.prompt < 0, "a prompt that nobody reads is sent")
            return
        require(new.start == min(new.num_computed, new.prompt_len), "output is missing")
        reads_prompt = drafts or (asked is not None and asked.reads_prompt)
        require((new.prompt >= 0) == (reads_prompt and new.start > 0), "prompt or no prompt")
        if asked is not None and asked.steers and new.length > new.prompt_len:
            require(new.num_computed < new.prompt_len, "its output's logits are not computed anew")
        if new.prompt >= 0:
            prompt = token_list(prompts[new.prompt])
            require(len(prompt) == new.prompt_len, "the prompt is another one's")
            sent = token_list(new.tokens)[: new.prompt_len - new.start]
            require(prompt[new.start :] == sent, "the prompt and its tokens differ")

    def _slot(self, number: int) -> Slot:
        require(number in self.slots, f"slot {number} is not in use")
        return self.slots[number]

    def _append_blocks(self, slot: Slot, blocks: list[int]) -> None:
        for block in blocks:
            require(0 <= block < self.limits.num_blocks, f"there is no block {block}")
            require(block not in slot.blocks, f"block {block} is twice in a table")
            slot.blocks.append(block)

    def _covers(self, slot: Slot, positions: int) -> bool:
        return len(slot.blocks) * self.limits.block_size >= positions

    def _room(self, slot: Slot) -> int:
        """Tokens that a row may bring: positions that it has blocks for, from its last token on."""
        positions = min(len(slot.blocks) * self.limits.block_size, self.limits.max_model_len - 1)
        return max(0, positions - (len(slot.tokens) - 1))

    # Computing.

    def _work(self, plan: StepPlan, decoding: list[Slot]) -> list[tuple[Slot, int]]:
        """(slot, end) for all that compute: positions from ``computed`` to ``end``."""
        each = self.limits.max_row_tokens
        work = [(slot, slot.computed + 1) for slot in decoding]
        if each > 1:  # one that has all its tokens by now has no room for more
            work = [(slot, min(end, slot.computed + self._room(slot))) for slot, end in work]
        chunked: list[int] = []
        for chunk in plan.chunks:
            require(chunk.slot not in chunked, f"slot {chunk.slot} has two chunks")
            chunked.append(chunk.slot)
            work.append((self._slot(chunk.slot), self._end_of(chunk)))
        require(
            all(new.slot in chunked for new in plan.added), "a slot was added that computes nothing"
        )
        for slot in decoding:
            slot.began = slot.computed
        count = sum(end - slot.computed for slot, end in work[len(decoding) :])
        count += len(decoding) if plan.chunks else each * len(decoding)
        require(count > 0, "the step computes nothing")
        require(count <= self.limits.max_num_batched_tokens, f"{count} tokens pass the budget")
        for slot, end in work:
            require(end <= self.limits.max_model_len - 1, "computes the last token of its limit")
            require(self._covers(slot, end), "a position lies behind the block table")
        self.max_rows = max(self.max_rows, len(work))
        return work

    def _end_of(self, chunk: Chunk) -> int:
        slot = self._slot(chunk.slot)
        end = chunk.start + chunk.count
        require(not slot.decoding, f"slot {chunk.slot} decodes and has a chunk")
        require(chunk.start == slot.computed, f"chunk starts at {chunk.start}: not what was due")
        require(chunk.count > 0 and end <= len(slot.tokens), "chunk of unknown tokens")
        require(chunk.sample == (end == len(slot.tokens)), "sample is set wrongly")
        self._append_blocks(slot, chunk.blocks)
        require(
            len(slot.blocks) == self.limits.blocks_for(end),
            "the chunk's blocks are too many or few",
        )
        return end

    def _write(self, plan: StepPlan, work: list[tuple[Slot, int]]) -> None:
        """Write K and V of the whole step, before anything is read. May fail half way."""
        size = self.limits.block_size
        writers: dict[int, Slot] = {}
        for slot, end in work:
            if not slot.histories:
                slot.begin(self._histories(slot))
                self._require_own_prefix(slot)
            for position in range(slot.computed, end):
                block = slot.blocks[position // size]
                require(writers.setdefault(block, slot) is slot, f"block {block} has two writers")
                self._require_sole_writer(slot, block, position // size)
                history = slot.histories[position]
                self._memory[block][position % size] = history
                self._before[history] = slot.histories[position - 1] if position else 0
        for slot, end in work:
            if self.poison in slot.tokens[slot.computed : end]:
                self._scramble(writers)
                raise _StepRaised(f"token {self.poison} is poison")
        if plan.step in self.fail_steps:
            self._scramble(writers)
            raise _StepRaised(self.fail_steps[plan.step])
        self._spread_not_a_number(work)

    def _histories(self, slot: Slot) -> list[int]:
        """Those of a new slot's computed positions, as they lie in its blocks: written by plans
        before this one, or by a sequence that stands before it in this one."""
        found: list[int] = []
        for position in range(slot.computed):
            content = self._read(slot, position)
            if content is None:
                raise BrokenRule(f"position {position} of a prefix hit was never computed")
            before = found[-1] if found else 0
            require(
                _NOT_A_NUMBER in (content, before) or self._before[content] == before,
                f"position {position} of a prefix hit does not follow the one before it",
            )
            found.append(content)
        return found

    def _require_own_prefix(self, slot: Slot) -> None:
        """The prefix hit is that of the slot's sequence, where the caller has said what it is."""
        number = next(number for number, other in self.slots.items() if other is slot)
        tokens = self._whole.get(number)
        if tokens is None or not slot.computed:
            return
        hit = slot.histories[slot.computed - 1]
        own = history_hash(tokens[: slot.computed])
        require(hit in (own, _NOT_A_NUMBER), "a prefix hit has K and V that are not its own")
        require(
            slot.tokens[slot.computed :] == tokens[slot.computed :], "tokens that are not its own"
        )

    def _require_sole_writer(self, slot: Slot, block: int, index: int) -> None:
        """No other slot has computed anything in a block that is being written."""
        for other in self.slots.values():
            if other is not slot and block in other.blocks:
                at = other.blocks.index(block)
                require(at == index, f"block {block} stands at two places of two tables")
                require(
                    other.computed >= (at + 1) * self.limits.block_size,
                    f"block {block} is written while another sequence writes to it too",
                )

    def _scramble(self, writers: dict[int, Slot]) -> None:
        """What a step that died leaves in the blocks that it was writing."""
        for block, slot in writers.items():
            size = self.limits.block_size
            at = slot.blocks.index(block) * size
            for offset in range(max(slot.computed - at, 0), size):
                self._memory[block][offset] = None

    def _spread_not_a_number(self, work: list[tuple[Slot, int]]) -> None:
        """NaN in K and V reaches everything that attends to it, in this same step."""
        if self.not_a_number < 0:
            return
        spreading = True
        while spreading:
            spreading = False
            for slot, end in work:
                for position in range(slot.computed, end):
                    touched = slot.tokens[position] == self.not_a_number or any(
                        self._read(slot, p) == _NOT_A_NUMBER for p in range(position)
                    )
                    if touched and self._read(slot, position) != _NOT_A_NUMBER:
                        block = slot.blocks[position // self.limits.block_size]
                        self._memory[block][position % self.limits.block_size] = _NOT_A_NUMBER
                        spreading = True

    def _read(self, slot: Slot, position: int) -> int | None:
        size = self.limits.block_size
        return self._memory[slot.blocks[position // size]][position % size]

    def _finish(
        self, plan: StepPlan, decoding: list[Slot], work: list[tuple[Slot, int]]
    ) -> StepResult:
        """Attend to everything before, then sample."""
        for slot, end in work:
            blocks = slot.blocks[: self.limits.blocks_for(end)]
            read = [content for block in blocks for content in self._memory[block]][:end]
            if read != slot.histories[:end]:
                for position in range(end):
                    content = read[position]
                    require(
                        content == slot.histories[position]
                        or (self.not_a_number >= 0 and content == _NOT_A_NUMBER),
                        f"position {position} reads K and V that are not its own",
                    )
            slot.computed = end
        rows = decoding + [self.slots[chunk.slot] for chunk in plan.chunks if chunk.sample]
        tokens, bad_rows, banned_rows, failures = [], [], [], []
        counts = bytearray()
        for row, slot in enumerate(rows):
            if not self._room(slot):
                counts.append(0)
                continue
            drawn = self._drawn(slot)
            if self._read(slot, len(slot.tokens) - 1) == _NOT_A_NUMBER:
                bad_rows.append(row)
                drawn = [0]
            elif slot.sampling.seed == self.banned_seed:
                banned_rows.append(row)
                drawn = [0]
            slot.early = slot.early or self.is_early(slot.sampling)
            if slot.early:
                failures.append(RowFailure(row, "not compiled yet", TOO_EARLY))
                drawn = [self.executed % self.limits.vocab_size]
            self._take(slot, drawn)
            tokens += drawn
            counts.append(len(drawn))
        prefilled = sum(chunk.count for chunk in plan.chunks)
        seconds = 0.001 + self.token_seconds * prefilled
        return StepResult(
            plan.epoch, plan.step, token_bytes(tokens), bad_rows, seconds,
            failures=failures, banned_rows=banned_rows,
            counts=b"" if self.row_count is None else bytes(counts),
        )  # fmt: skip

    def _drawn(self, slot: Slot) -> list[int]:
        """What a row brings: as many tokens as it likes and has room for."""
        count = 1 if self.row_count is None else min(self.row_count(), self._room(slot))
        history, drawn = slot.histories[-1], list[int]()
        for position in range(len(slot.tokens) - slot.prompt_len, len(slot.tokens) + count):
            if len(drawn) == count or self.not_a_number in drawn or self.poison in drawn:
                break
            vocab = self.limits.vocab_size
            drawn.append(draw(history, slot.sampling, slot.choice, position, vocab))
            history = mix(history, drawn[-1])
        return drawn

    def _take(self, slot: Slot, drawn: list[int]) -> None:
        """The slot goes on behind what was drawn. K and V of tokens that a row tried in vain lie
        behind those of its last one."""
        size, first = self.limits.block_size, len(slot.tokens) - 1
        slot.decoding = True
        for token in drawn:
            slot.append(token)
        slot.computed = len(slot.tokens) - 1
        for position in range(first + 1, slot.computed):
            history = slot.histories[position]
            self._memory[slot.blocks[position // size]][position % size] = history
            self._before[history] = slot.histories[position - 1]
        tried = min(first + self.limits.max_row_tokens, len(slot.blocks) * size)
        for position in range(max(slot.computed, first + 1), tried):
            self._memory[slot.blocks[position // size]][position % size] = None


class _StepRaised(Exception):
    """The step died."""


def output_alone(
    prompt: Ordered[int],
    sampling: SlotSampling,
    choice: int,
    stop_ids: Ordered[int],
    max_len: int,
    vocab: int,
) -> list[int]:
    """The output of one sequence that has the worker for itself."""
    history, output = history_hash(prompt), list[int]()
    while len(prompt) + len(output) < max_len:
        token = draw(history, sampling, choice, len(output), vocab)
        history = mix(history, token)
        output.append(token)
        if token in stop_ids:
            break
    return output

"""Drives an executor with hand-made plans, the way a scheduler would, but simple and seeded."""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from penstock.protocol.logprobs import PackedLogprobs, entry_bytes
from penstock.protocol.wire.messages.engine import NO_BLOCK, LayerGroup
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    SlotSampling,
    StepPlan,
    StepResult,
)
from penstock.services.worker.executor import Executor

GREEDY = SlotSampling(0.0, 0, 1.0, 0)


class Sequence:
    def __init__(
        self,
        name: int,
        prompt: list[int],
        sampling: SlotSampling,
        choice: int = 0,
        adapter: str = "",
        virtual: int = 0,
    ) -> None:
        self.name = name
        self.adapter = adapter
        self.virtual = virtual
        self.choice = choice
        self.prompt = prompt
        self.sampling = sampling
        self.output: list[int] = []
        self.slot = -1
        self.tables: list[list[int]] = []
        """For each group of layers."""
        self.computed = 0
        self.decoding = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class PlanDriver:
    """Plans steps for a list of sequences: shuffled blocks, random chunk sizes, preemptions."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.random = random.Random(seed)
        capacity = executor.capacity
        self.block_size = capacity.block_size
        self.groups = capacity.groups or [LayerGroup()]
        self.free = list(range(capacity.num_blocks))
        self.random.shuffle(self.free)
        self.slots = list(range(capacity.max_num_seqs))
        self.random.shuffle(self.slots)
        self.step = 0
        self.bad: set[int] = set()
        self.row_counts: list[int] = []
        """Tokens of each row of each step."""
        self.logprobs: dict[tuple[int, int], PackedLogprobs] = {}
        """By (prompt, index of the output token)."""
        self.prompt_logprobs: dict[tuple[int, int], PackedLogprobs] = {}
        """By (prompt, first position of a chunk)."""

    def _take(self, sequence: Sequence, positions: int) -> list[int]:
        """Blocks of all groups, as a plan names them; those ahead of the windows of the first
        position that is computed are free from this step on."""
        sequence.tables = sequence.tables or [[] for _ in self.groups]
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for index in range(group.blocks_behind(sequence.computed, self.block_size)):
                if index < len(table) and table[index] != NO_BLOCK:
                    self.free.append(table[index])
                    table[index] = NO_BLOCK
        taken = []
        for _ in range(-(-positions // self.block_size) - len(sequence.tables[0])):
            for table in sequence.tables:
                taken.append(self.free.pop())
                table.append(taken[-1])
        return taken

    def _drop(self, sequence: Sequence) -> int:
        held = [block for table in sequence.tables for block in table if block != NO_BLOCK]
        self.free += held
        self.random.shuffle(self.free)
        sequence.tables, sequence.computed, sequence.decoding = [], 0, False
        slot, sequence.slot = sequence.slot, -1
        self.slots.append(slot)
        return slot

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        samplings: list[SlotSampling] | None = None,
        choices: list[int] | None = None,
        adapters: list[str] | None = None,
        virtual: list[int] | None = None,
        chunk: int | None = None,
        running: int = 64,
        preemptions: int = 0,
        aborts: float = 0.0,
        prompt_logprobs: int | None = None,
    ) -> list[list[int]]:
        """Outputs of all prompts. ``virtual``: how many of each prompt's first tokens stand for a
        soft prompt; ``chunk``: prefill chunks of this size, else of random sizes;
        ``aborts``: share of the steps in which a sequence, whatever it is doing, ends early."""
        every = [
            Sequence(
                i,
                prompt,
                samplings[i] if samplings else GREEDY,
                choices[i] if choices else 0,
                adapters[i] if adapters else "",
                virtual[i] if virtual else 0,
            )
            for i, prompt in enumerate(prompts)
        ]
        waiting, active = deque(every), []
        gone: list[int] = []
        while waiting or active:
            for _ in range(len(active)):
                if preemptions and self.random.random() < 0.05:
                    victim = self.random.choice(active)
                    active.remove(victim)
                    gone.append(self._drop(victim))
                    waiting.append(victim)
                    preemptions -= 1
            if active and self.random.random() < aborts:
                victim = self.random.choice(active)
                active.remove(victim)
                gone.append(self._drop(victim))
            added = []
            while waiting and len(active) < running and self.slots:
                sequence = waiting.popleft()
                sequence.slot = self.slots.pop(0)
                ids = np.array(sequence.tokens, "<i4").tobytes()
                added.append(
                    NewSlot(
                        sequence.slot,
                        ids,
                        len(sequence.prompt),
                        0,
                        [],
                        sequence.sampling.packed(),
                        sequence.choice,
                        None if sequence.output else prompt_logprobs,
                        adapter=sequence.adapter,
                        most=len(sequence.prompt) + max_tokens,
                        corpus=b"corpus",
                        virtual_tokens=sequence.virtual,
                    )
                )
                active.append(sequence)
            self.step += 1
            micro_batches = self.executor.capacity.micro_batches
            turn = self.step % micro_batches
            rows, grown, chunks = [], [], []
            started = 0
            budget = self.executor.capacity.max_num_batched_tokens
            most = self.executor.capacity.max_row_tokens
            for sequence in sorted(active, key=lambda s: s.slot):
                if sequence.decoding and sequence.slot % micro_batches == turn:
                    budget -= 1
                    longest = len(sequence.prompt) + max_tokens - 1
                    for block in self._take(sequence, min(sequence.computed + most, longest)):
                        grown += [sequence.slot, block]
                    rows.append(sequence)
                    started += 1
            for sequence in active:
                if sequence.decoding or budget < 1:
                    continue
                left = len(sequence.tokens) - sequence.computed
                size = min(left, budget, chunk or self.random.randint(1, max(1, left)))
                blocks = self._take(sequence, sequence.computed + size)
                chunks.append(Chunk(sequence.slot, sequence.computed, size, size == left, blocks))
                sequence.computed += size
                budget -= size
                if size == left:
                    rows.append(sequence)
                    sequence.decoding = True
            full = self.step == 1
            plan = StepPlan(1, self.step, full, gone, added, grown, chunks, micro_batch=turn)
            result = self.executor.execute(plan)
            assert (result.epoch, result.step) == (1, self.step)
            tokens = np.frombuffer(result.tokens, "<i4").tolist()
            counts = list(result.counts) or [1] * len(rows)
            assert len(tokens) == sum(counts) and len(counts) == len(rows)
            brought = [[tokens.pop(0) for _ in range(count)] for count in counts]
            self.row_counts += counts
            for sequence, count in zip(rows[:started], counts, strict=False):
                sequence.computed += count
            self.bad |= {rows[i].name for i in result.bad_rows}
            gone = []
            self._keep_logprobs(result, rows, active)
            for sequence, more in zip(rows, brought, strict=True):
                sequence.output += more
                assert len(sequence.output) <= max_tokens
                if len(sequence.output) == max_tokens:
                    active.remove(sequence)
                    gone.append(self._drop(sequence))
        self.step += 1
        self.executor.execute(StepPlan(1, self.step, self.step == 1, gone, [], [], []))
        return [sequence.output for sequence in every]

    def _keep_logprobs(
        self, result: StepResult, rows: list[Sequence], active: list[Sequence]
    ) -> None:
        for found in result.logprobs:
            sequence = rows[found.row]
            size = entry_bytes(found.token.most)
            for number in range(len(found.token.entries) // size):
                part = found.token.entries[number * size : (number + 1) * size]
                place = sequence.name, len(sequence.output) + number
                self.logprobs[place] = PackedLogprobs(found.token.most, part)
        by_slot = {sequence.slot: sequence for sequence in active}
        for chunk in result.prompt_logprobs:
            self.prompt_logprobs[by_slot[chunk.slot].name, chunk.start] = chunk.tokens

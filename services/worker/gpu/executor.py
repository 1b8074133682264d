"""Executes step plans on a CUDA device without waiting for it.

``launch`` checks a plan against the slots, sends the differences, and puts the step's kernels on
the device's stream; it returns while they run. ``finished`` gives the oldest step's tokens once
its event has passed. So the next step is on the stream before this one ends: the sampled token
never leaves the device before the next step reads it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.kernels.gpu.cache_keys import make_keys_stable
from penstock.kernels.sampling import NOT_FINITE, NOTHING_LEFT
from penstock.protocol.process.trace import PREPARE, TRACE
from penstock.protocol.wire.messages.engine import Adapter, EngineSizes
from penstock.protocol.wire.messages.steps import NewSlot, RowFailure, StepPlan, StepResult
from penstock.services.worker.gpu.adapter_tiles import AdapterTiles
from penstock.services.worker.gpu.batch_state import RING, BatchState
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.graphs import StepGraphs
from penstock.services.worker.gpu.in_flight import InFlight
from penstock.services.worker.gpu.logprob_rows import GpuLogprobs
from penstock.services.worker.gpu.sampler import GpuSampler
from penstock.services.worker.gpu.step_decoder import StepDecoder
from penstock.services.worker.gpu.step_shape import STEP_SHAPE
from penstock.services.worker.gpu.step_times import StepTimes
from penstock.services.worker.grammar_rows import GrammarRows
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.placement import placement
from penstock.services.worker.pooling import PromptTask
from penstock.services.worker.prompt_sums import chunk_rows
from penstock.services.worker.slots import PlannedStep, SlotTable
from penstock.services.worker.step_logprobs import asking_chunks

if TYPE_CHECKING:
    from penstock.services.worker.adapters.adapter_loader import AdapterLoader
    from penstock.services.worker.executor import Rests
    from penstock.services.worker.rank_group import Meeting
    from penstock.services.worker.speculation.drafting import DraftCounts

MakeDecoder = Callable[[BatchState, int], StepDecoder]


class GpuExecutor:
    """A decoder, its KV memory, its slots and its graphs."""

    tasks: Mapping[str, PromptTask] = MappingProxyType({})
    """None: no step of its graphs hands out hidden states."""
    generates, repeats = True, False
    labels: list[str] = []
    adapters: list[Adapter] = []
    loader: AdapterLoader | None = None
    rests: Rests | None = None
    described = ""
    max_in_flight = RING - 1
    shape = STEP_SHAPE
    account: MemoryAccount | None = None
    draft_counts: DraftCounts | None = None

    def __init__(
        self, capacity: EngineSizes, device: torch.device, make_decoder: MakeDecoder
    ) -> None:
        """make_decoder: is given the batch's state and the rows of the largest step."""
        make_keys_stable()
        self.capacity = capacity
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.slots = SlotTable(capacity)
        max_rows = max(capacity.max_num_batched_tokens, capacity.max_num_seqs)
        with torch.inference_mode():
            state = self._state = BatchState(self.slots, self._device)
            self.decoder = make_decoder(state, max_rows)
            widened = self.decoder.widened_room
            self.chunks = ChunkRows(max_rows, capacity.max_num_seqs, self._device, widened)
            state.finds_shared = self.decoder.shares_prefixes
            self.sampler = GpuSampler(self.slots, state, self.decoder.vocab_size)
            self._logprobs = GpuLogprobs(self.slots, state, self.decoder, self.sampler.space)
            self.grammars = GrammarRows(capacity.max_num_seqs, self.decoder.vocab_size)
            self._masks: dict[int, torch.Tensor] = {}
            self._results = [self._host(2, capacity.max_num_seqs) for _ in range(RING)]
            self._chunk_buffers = [self.chunks.host_buffer(self._on_gpu) for _ in range(RING)]
        self.device, self.dtype = placement(device, self.decoder.space.logits.dtype)
        self.summary = self.decoder.summary
        self.graphs = StepGraphs(self.decoder, self.chunks)
        self.adapted: StepGraphs | None = None
        """Of steps in which a row has an adapter; ``None``: there are none."""
        self._adapter_tiles: AdapterTiles | None = None
        self._flight: deque[InFlight] = deque()
        self._turn = 0
        self._last_end = 0.0
        self._step_times = StepTimes()

    def adapt(self, numbers: Mapping[str, int], decoder: StepDecoder, tiles: AdapterTiles) -> None:
        """Take adapters. numbers: of those that are loaded; decoder: computes the steps in which
        the rows that ``tiles`` names have some."""
        self.slots.adapter_numbers = numbers
        self.adapted, self._adapter_tiles = StepGraphs(decoder, self.chunks), tiles

    def _host(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, pin_memory=self._on_gpu)

    @property
    def in_flight(self) -> int:
        return len(self._flight)

    @property
    def shares_a_prefix(self) -> bool:
        """Whether the last decode step read a prefix that its rows share once."""
        return self._state.is_shared

    def prepare(self) -> None:
        self.grammars.prepare()

    def improve(self, now: float, pause: float) -> bool:
        return False

    def meet(self, meeting: Meeting) -> None:
        return

    def reset(self) -> None:
        """Drop all slots, and the steps that are under way."""
        self._forget()
        self._flight.clear()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _forget(self) -> None:
        self.slots.reset()
        self._state.forget()
        if self._adapter_tiles is not None:
            self._adapter_tiles.forget()

    def launch(self, plan: StepPlan) -> None:
        """Put one step on the stream. At most ``max_in_flight`` may be under way."""
        launched = time.perf_counter()
        try:
            with torch.inference_mode():
                step = self.slots.apply(plan)
                self.sampler.begin(plan.added, plan.prompts)
                self._begin_grammars(plan.added)
                self._flight.append(self._launch(plan, step, launched))
                self.slots.advance(step)
        except BaseException:
            self._forget()
            raise

    def execute(self, plan: StepPlan) -> StepResult:
        """One step, waited for. Nothing else may be under way."""
        self.launch(plan)
        result = self.finished(wait=True)
        if result is None:
            raise RuntimeError(f"step {plan.step} was launched and is not under way")
        return result

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits [rows, vocab] of a plan's rows, overwritten by the next step."""
        return self.decoder.space.logits[: len(self.execute(plan).tokens) // 4]

    def warm_up(self) -> None:
        """Compile every kernel that a step may need, and capture the graphs."""
        self.run_kernels()
        self.capture_graphs()

    def capture_graphs(self) -> None:
        """All kernels must have run."""
        with torch.inference_mode():
            self.graphs.capture(self.capacity.max_num_seqs)
            if self.adapted is not None:
                self.adapted.capture(self.capacity.max_num_seqs)
        if self.graphs.why_none:
            self.summary += (
                f"; no CUDA graphs, each step is launched kernel by kernel: {self.graphs.why_none}"
            )

    def run_kernels(self) -> None:
        """Launch every kernel that a step may need once, on padding."""
        most = self.capacity.max_num_seqs
        with torch.inference_mode(), ThreadPoolExecutor(1, "compile") as beside:
            # Both threads draw; two first calls of a kernel at once would lose what one compiles.
            self.decoder.draw(1)
            choices = beside.submit(self._run_choices, most)
            self.graphs.run_padding(most)
            if self.adapted is not None:
                self.adapted.run_padding(most)
            choices.result()

    @torch.inference_mode()
    def _run_choices(self, most: int) -> None:
        """Run once the kernels of rows that ask for more than a temperature."""
        for rows in (1, most):
            self._draw_all(rows)
            self.sampler.stages.warm_up(self.decoder.space.logits[:rows])
            self._logprobs.of_rows(rows)

    def _launch(self, plan: StepPlan, step: PlannedStep, launched: float) -> InFlight:
        traced = time.monotonic_ns() if TRACE.on else 0
        ring = self._next_ring()
        decoding, rows = len(step.decoding), len(step.sampled)
        total = decoding + sum(len(chunk.tokens) for chunk in step.chunks)
        asked = asking_chunks(step)
        every = bool(asked) or any(len(chunk.drawn) for chunk in step.chunks)
        graphs = self._graphs_of(step, ring)
        if step.chunks:
            padded = graphs.mixed_rows(total, self.chunks.tiles_of(step))
            buffer = self._chunk_buffers[ring]
            sample_rows = self.chunks.send(step, padded, buffer, every_row=every)
        else:
            sample_rows = np.arange(rows)
        self._state.update(step, sample_rows, ring)
        begun = None
        if traced:
            TRACE.add(PREPARE, traced, plan.step)
            begun = self._event(timed=True)
        if step.chunks:
            graphs.run_mixed(padded, decoding)
        elif decoding:
            graphs.run_decode(decoding, self.shares_a_prefix and graphs.decoder.shares_prefixes)
        host = self._results[ring]
        drawn, failures, openings = self._allow(step, ring)
        failures = failures + self.slots.unreadable_rows(step)
        has_logits = self._recall(graphs, step, padded if step.chunks else 0)
        if asked and not has_logits:
            graphs.decoder.head_of_all(padded, rows)
            has_logits = True
        if rows:
            self._choose(graphs, step, rows, openings, made=has_logits)
            host.copy_(self.decoder.space.result, non_blocking=True)
        logprobs = self._logprobs.begin(step, asked)
        event = self._event(timed=bool(traced))
        return InFlight(
            plan.epoch, plan.step, rows, host, event, launched, drawn, self._noted(step), failures,
            logprobs, begun,
        )  # fmt: skip

    def _graphs_of(self, step: PlannedStep, ring: int) -> StepGraphs:
        """Those of steps with adapters if a row has one."""
        if self._adapter_tiles is None or self.adapted is None:
            return self.graphs
        return self.adapted if self._adapter_tiles.update(step, ring) else self.graphs

    def _next_ring(self) -> int:
        """Which host buffers are free for the next step."""
        ring, self._turn = self._turn, (self._turn + 1) % RING
        return ring

    def _noted(self, step: PlannedStep) -> dict[int, int]:
        rows = self.sampler.history.asking(step.sampled)
        return dict(zip(step.sampled[rows].tolist(), rows.tolist(), strict=True))

    def _event(self, timed: bool) -> torch.cuda.Event | None:
        """An event at the present end of the stream; ``None`` on the CPU."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin_grammars(self, added: list[NewSlot]) -> None:
        for new in added:
            for flight in self._flight:  # its token is of who sat there before
                flight.drawn.pop(new.slot, None)
                flight.noted.pop(new.slot, None)
        self.grammars.begin(added, self.slots.adjustments)

    def _allow(
        self, step: PlannedStep, ring: int
    ) -> tuple[dict[int, int], list[RowFailure], dict[int, int]]:
        """Send the masks of rows with a grammar: which they are, by slot, which of them have
        failed, and which may begin with a token of their own.

        The layers of this step are on the stream by now, but for the last one's end, behind the
        step whose tokens the grammars must see first: waiting for these costs the device nothing
        while the masks take less time than the layers.
        """
        rows = self.grammars.following(step.sampled)
        if not len(rows):
            return {}, [], {}
        self._feed_all()
        slots = step.sampled[rows]
        host = self._mask_buffer(ring)[: len(rows)]
        masks = self.grammars.fill(step.sampled, rows, host.numpy())
        self.sampler.allow(slots, host)
        drawn = dict(zip(slots.tolist(), rows.tolist(), strict=True))
        return drawn, masks.failures, masks.openings

    def _mask_buffer(self, ring: int) -> torch.Tensor:
        """[R, ceil(V / 32)], for the masks of a step's rows."""
        if ring not in self._masks:
            self._masks[ring] = self._host(*self.sampler.slots.allowed.shape)
        return self._masks[ring]

    def _feed_all(self) -> None:
        """Wait for the steps whose tokens somebody on the host must see, and show them."""
        for flight in self._flight:
            if (flight.drawn or flight.noted) and flight.event is not None:
                flight.event.synchronize()
            self._feed(flight)

    def _feed(self, flight: InFlight) -> None:
        """Show grammars, and who looks for repeats, the tokens of a step that is over."""
        told = (flight.drawn, self.grammars.took), (flight.noted, self.sampler.history.took)
        for waiting, took in told:
            if waiting:
                slots, rows = np.array(list(waiting.items()), np.int64).T
                took(slots, flight.result.numpy()[0][rows])
        flight.drawn, flight.noted = {}, {}

    def _recall(self, graphs: StepGraphs, step: PlannedStep, padded: int) -> bool:
        """Show what samplers must know of earlier tokens; whether logits of all rows were made."""
        if len(self.sampler.history.asking(step.sampled)):
            self._feed_all()
        self.sampler.plan(step.sampled)
        recalling = [(first, chunk) for first, chunk in chunk_rows(step) if len(chunk.drawn)]
        if not recalling:
            return False
        count = len(step.sampled)
        graphs.decoder.head_of_all(padded, count)
        logits = self.decoder.space.logits[:count]
        sampled = logits.clone()  # the rows that follow are made in the same memory
        for first, chunk in recalling:
            self.sampler.stages.recall(first, chunk, self.decoder.row_logits)
        logits.copy_(sampled)
        return True

    def _choose(
        self, graphs: StepGraphs, step: PlannedStep, rows: int, openings: dict[int, int], made: bool
    ) -> None:
        """Tokens for the step's logits rows; openings: see ``Masks``; made: the logits are."""
        plain = not self.sampler.needed(step.sampled)
        if plain and not made:
            graphs.run_head_and_draw(rows)
            return
        if not made:
            graphs.run_head(rows)
        if plain:
            self.decoder.draw(rows)
        else:
            self._open(step, openings)
            self._draw_all(rows)

    def _open(self, step: PlannedStep, openings: dict[int, int]) -> None:
        for row, token in openings.items():
            slot = int(step.sampled[row])
            self.sampler.open(slot, token, self.decoder.space.logits[row])

    def _draw_all(self, rows: int) -> None:
        """Tokens for logits rows of which some ask for more than a temperature."""
        space, slots = self.decoder.space, self._state.sample_slots
        logits = space.logits[:rows]
        self.decoder.commit(rows, self.sampler.draw(logits, slots, space.best, space.token))
        self.sampler.note(logits, slots)

    def finished(self, wait: bool = False) -> StepResult | None:
        """The oldest step's result, or ``None`` while it runs or when there is none."""
        if not self._flight or not self._is_over(self._flight[0], wait):
            return None
        return self._result(self._flight.popleft())

    def _is_over(self, flight: InFlight, wait: bool) -> bool:
        """Whether a step is over; those before it are. The first time that it is, those on the host
        who must see its tokens do."""
        if flight.is_over:
            return True
        if flight.event is not None:
            if wait:
                flight.event.synchronize()
            elif not flight.event.query():  # type: ignore[no-untyped-call]
                return False
        now = time.perf_counter()
        flight.seconds = now - max(flight.launched, self._last_end)
        flight.is_over, self._last_end = True, now
        self._feed(flight)
        return True

    def _result(self, flight: InFlight) -> StepResult:
        """Of a step that is over."""
        if flight.begun is not None and flight.event is not None:
            self._step_times.add(flight.step, flight.begun, flight.event)
        tokens, bad = flight.result.numpy()[:, : flight.rows]
        asked = flight.logprobs
        return StepResult(
            flight.epoch,
            flight.step,
            tokens.astype("<i4").tobytes(),
            np.flatnonzero(bad == NOT_FINITE).tolist(),
            flight.seconds,
            [] if asked is None else asked.of_rows(tokens),
            [] if asked is None else asked.of_prompts(),
            flight.failures,
            np.flatnonzero(bad == NOTHING_LEFT).tolist(),
        )

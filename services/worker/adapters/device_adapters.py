"""Adapters in memory of a CUDA device that is taken at the start, one place for each.

The places of a linear layer are one buffer, so graphs that read it stay valid whichever adapters
are in it. One that is brought in while steps are computed comes through two buffers of pinned
memory on a stream of its own; whoever brings it waits for that, and no step does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.gpu.low_rank import padded_rank
from penstock.kernels.low_rank import LowRank, StackedLowRank
from penstock.protocol.config.adapters import AdapterLimits
from penstock.services.worker.adapters.checked_folder import NOT_ON_GPUS
from penstock.services.worker.adapters.model_adapters import Coming, ModelAdapters
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LayerLinears


class DeviceAdapters(ModelAdapters):
    """Adapters of a model in the form that our kernels compute (``DenseModel``)."""

    def __init__(self, decoder: Decoder, limits: AdapterLimits, max_rank: int) -> None:
        """See ``ModelAdapters``; max_rank: ``--max-lora-rank``."""
        self._multipliers = [each.residual_multiplier for each in decoder.specification.layers]
        super().__init__(decoder, limits, max_rank)
        self.model = self.model._replace(no_soft_prompts=NOT_ON_GPUS)
        self._rank = padded_rank(max_rank)
        self.stacks = [
            LayerLinears(*(self._stack(linear) for linear in layer.linears))
            for layer in decoder.weights.layers
        ]
        self.ranks = torch.zeros(self.places, dtype=torch.int32, device=self._on)
        """Of what is in each place, the highest of its layers."""
        self._free: dict[int, torch.cuda.Event] = {}
        """Number of a place → when the last step is over that read what was in it."""
        self._copies = _Copies(self.stacks, self._on)

    def _stack(self, linear: Linear) -> StackedLowRank:
        specification = linear.specification
        parts, rank = tuple(specification.stored.values()), self._rank

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(self.places, *shape, dtype=self._dtype, device=self._on)

        return StackedLowRank(
            zeros(len(parts) * rank, specification.inputs), zeros(sum(parts), rank), parts
        )

    @property
    def num_bytes(self) -> int:
        """Of all places."""
        return sum(stack.num_bytes for layer in self.stacks for stack in layer)

    @property
    def num_taken(self) -> int:
        """See ``ModelAdapters``: all places are taken at the start."""
        return self.num_bytes

    def factor(self, layer: int, which: int) -> float:
        behind = which in (LayerLinears._fields.index("output"), LayerLinears._fields.index("down"))
        return self._multipliers[layer] if behind else 1.0

    def fill(self, coming: Coming) -> None:
        """See ``ModelAdapters``; when it returns, the adapter is in its place of the device."""
        self._copies.begin(self._free.pop(coming.number, None))
        place, highest = coming.number - 1, 0
        for products, stacks in zip(self.layers, self.stacks, strict=True):
            for product, stack in zip(products, stacks, strict=True):
                update = coming.updates.linears.get(product)
                if update is not None:
                    highest = max(highest, *(part.up.shape[1] for part in update.parts))
                self._copies.write(stack, place, update)
        self._copies.end(self.ranks[place : place + 1], highest)

    def apply(self, coming: Coming) -> None:
        """It is on the device."""

    def leave(self, digest: str) -> None:
        """See ``ModelAdapters``; steps that are under way may have rows of it."""
        number = self.numbers.pop(digest)
        if self._on.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._free[number] = event


class _Copies:
    """Writes adapters into their places, through two host buffers in turn. One at a time."""

    def __init__(self, stacks: list[LayerLinears[StackedLowRank]], device: torch.device) -> None:
        largest = max(
            stack.down[0].numel() + stack.up[0].numel() for layer in stacks for stack in layer
        )
        dtype, on_gpu = stacks[0].qkv.down.dtype, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.zeros(largest, dtype=dtype, pin_memory=on_gpu) for _ in range(2)]
        self._rank = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        self._read: list[torch.cuda.Event | None] = [None, None]
        """When the device has read each buffer."""
        self._turn = 0
        if self._stream is not None:  # behind what fills the places with zeros
            self._stream.wait_stream(torch.cuda.current_stream())

    def begin(self, free: torch.cuda.Event | None) -> None:
        """free: the place is read until then."""
        if self._stream is not None and free is not None:
            self._stream.wait_event(free)

    def write(self, stack: StackedLowRank, place: int, update: LowRank | None) -> None:
        """update: ``None``: the adapter has nothing for this layer."""
        turn = self._turn = 1 - self._turn
        read = self._read[turn]
        if read is not None:
            read.synchronize()
        places = stack.down[place], stack.up[place]
        parts = torch.split(
            self._buffers[turn][: sum(each.numel() for each in places)],
            [each.numel() for each in places],
        )
        down, up = (part.view(each.shape) for part, each in zip(parts, places, strict=True))
        down.zero_()
        up.zero_()
        if update is not None:
            _lay_out(stack, update, down, up)
        with torch.cuda.stream(self._stream):
            for target, host in zip(places, (down, up), strict=True):
                target.copy_(host, non_blocking=True)
            self._read[turn] = self._event()

    def end(self, place: Tensor, rank: int) -> None:
        """Wait until all is there. place: [1] of ``DeviceAdapters.ranks``."""
        self._rank.fill_(rank)
        with torch.cuda.stream(self._stream):
            place.copy_(self._rank, non_blocking=True)
            last = self._event()
        if last is not None:
            last.synchronize()

    def _event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _lay_out(stack: StackedLowRank, update: LowRank, down: Tensor, up: Tensor) -> None:
    """Write an update to ``down`` [parts * rank, inputs] and ``up`` [outputs, rank], all zeros."""
    rank = up.shape[1]
    begins = list(_begins(stack.parts))
    for part in update.parts:
        count = part.up.shape[1]
        first = begins.index(part.first_output) * rank
        down[first : first + count] = update.down[part.first_rank : part.first_rank + count]
        up[part.first_output : part.first_output + len(part.up), :count] = part.up


def _begins(parts: tuple[int, ...]) -> Iterator[int]:
    begin = 0
    for part in parts:
        yield begin
        begin += part

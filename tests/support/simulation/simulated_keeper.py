"""The keeper's real service on the simulated network, with memory that is really shared.

A simulated worker's K and V are numbers; a block of them is copied as bytes, by the worker's real
code for engines on CPUs.
"""

from __future__ import annotations

import struct
from unittest.mock import patch

from support.simulation.simulated_engine import EngineNode, WorkerNode, make_service

from penstock.protocol.process.participant import Participant
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Peer
from penstock.services.keeper.service import KeeperService
from penstock.services.worker import service
from penstock.services.worker.kv_copies import BlockCopies

SPACE = b"simulated engine"
CONTENT_BYTES = 8


class SimulatedBlocks:
    """A worker's KV memory, block by block."""

    layout = "simulated"

    def __init__(self, node: WorkerNode) -> None:
        self._executor = node.executor
        self._format = struct.Struct(f"<{node.traits.limits.block_size}q")
        self.block_bytes = CONTENT_BYTES * node.traits.limits.block_size

    def read(self, block: int, into: memoryview) -> None:
        content = self._executor.memory[block]
        if None in content:
            self._executor.complain("a block is stored before it is computed")
        self._format.pack_into(into, 0, *content)

    def write(self, block: int, content: memoryview) -> None:
        self._executor.memory[block] = list(self._format.unpack(content))


class KeptWorkerNode(WorkerNode):
    """A worker whose blocks are kept."""

    def _loaded(self) -> None:
        copies = BlockCopies(SimulatedBlocks(self), self.traits.limits.num_blocks, SPACE)
        with patch.object(service, "copies_of", lambda *_: copies):
            super()._loaded()


class KeeperNode(EngineNode):
    service = "keeper"

    def join(self) -> Participant:
        self.keeper = make_service(KeeperService, self.config(), self)
        self.keeper.start()
        return self.keeper.participant

    def on_message(self, sender: int, message: Message) -> None:
        self.keeper.on_message(sender, message, self.world.now)
        self.plan_turn(0.0)

    def on_tick(self) -> None:
        self.keeper.on_tick(self.world.now)
        self.plan_turn(0.0)

    def on_gone(self, gone: dict[int, Peer]) -> None:
        self.keeper.on_gone(gone, self.world.now)

    def turn(self) -> None:
        self.keeper.work(self.world.now)

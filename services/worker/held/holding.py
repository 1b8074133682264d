"""Held weights of one worker: looked for at its start, else made, moved and offered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.protocol.config import Config
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.descriptors import close_all
from penstock.protocol.wire.messages.held_weights import MAX_PIECES, WeightsKey
from penstock.services.worker.held.description import (
    CannotHold,
    Describer,
    RestoredModel,
    Restorer,
)
from penstock.services.worker.held.digest import weights_digest
from penstock.services.worker.held.holder import GivenWeights, HolderConnection, NoHolder
from penstock.services.worker.held.manifest import BadManifest, HeldKV, Manifest, decode_manifest
from penstock.services.worker.held.memory import (
    AwaitedMemory,
    HeldMemory,
    Piece,
    RestingMemory,
    move,
    view,
)
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense_form import DenseModel
from penstock.services.worker.quantization.reading import read_quantization

_log = logging.getLogger("penstock.worker")
AGAIN_SECONDS = 2.0
"""Between two offers, while the holder does not take them."""


class FoundWeights(NamedTuple):
    """A model as another worker has left it."""

    restored: RestoredModel
    compression: str
    account: MemoryAccount | None
    num_bytes: int
    report: LoadReport
    kv: AwaitedMemory | None
    """KV memory as that account has planned it."""


class KeptWeights(NamedTuple):
    """What was made for others to map."""

    num_bytes: int
    """Of weights."""
    kv_memory: Tensor | None
    """uint8 [bytes], zeros."""


class _Content(NamedTuple):
    manifest: bytes
    num_bytes: int
    descriptors: Sequence[int]


class Holding:
    """Of one worker, from its start to its end."""

    def __init__(self, config: Config, dtype: torch.dtype, memory: HeldMemory) -> None:
        """Raises ``BadModelFolder``."""
        name, digest = config.model.names()[0], weights_digest(config, dtype)
        self.key = WeightsKey(name, memory.place, digest)
        self._path, self._online = config.cluster.holder_socket, config.model.quantization
        self._memory, self._engine = memory, config.cluster.engine
        self._connection: HolderConnection | None = None
        """While the weights are this worker's to load."""
        self._content: _Content | None = None
        """What is offered; ``None`` also while it is away."""
        self._away: _Content | None = None
        self._resting: RestingMemory | None = None
        self._offering = threading.Lock()
        self._present = threading.Event()
        """There is something to offer."""
        self._stayed: HolderConnection | None = None
        """To the holder that has the weights."""

    # --- at the start

    def find(
        self, info: ModelInfo, device: torch.device, progress: Callable[[str], None]
    ) -> FoundWeights | None:
        """The weights, if they are held. ``None``: they are to be loaded, and then ``keep`` is
        called. Whatever is wrong with what is held is said in the log, and the weights are
        loaded."""
        began = time.perf_counter()
        progress("asking for held weights")
        try:
            connection = HolderConnection(self._path)
        except NoHolder as failure:
            _log.warning("held weights: %s; the model is loaded", failure)
            return None
        self._connection = connection
        given: GivenWeights | None = None
        try:
            given = connection.want(
                self.key, lambda: progress("waiting for another engine that loads the same weights")
            )
            if given is None:
                return None
            with torch.inference_mode():
                found = self._open(given, info, device, began)
        except (NoHolder, BadManifest, OSError, RuntimeError) as failure:
            close_all(given.descriptors if given is not None else ())
            self.close()
            _log.warning("held weights are not used: %s; the model is loaded", failure)
            return None
        self._connection = None
        self._stay(connection)
        return found

    def _open(
        self, given: GivenWeights, info: ModelInfo, device: torch.device, began: float
    ) -> FoundWeights:
        """Raises ``BadManifest``, ``OSError`` and ``RuntimeError``."""
        manifest = decode_manifest(given.manifest)
        count, held_kv = len(manifest.pieces), manifest.kv
        if count + (held_kv is not None) != len(given.descriptors):
            raise BadManifest(f"{len(given.descriptors)} descriptors for {count} pieces of memory")
        pieces = [
            self._memory.open(descriptor, piece)
            for descriptor, piece in zip(given.descriptors, manifest.pieces, strict=False)
        ]
        tensors = [view(placed, pieces) for placed in manifest.placed]
        quantization = read_quantization(info, self._online)
        restored = Restorer(tensors, device).model(manifest.model, quantization)
        kv = None
        if held_kv is not None and held_kv.engine == self._engine:
            kv = self._memory.awaited(given.descriptors[-1], held_kv.num_bytes)
        self._own(_Content(given.manifest, manifest.num_bytes, given.descriptors), pieces, kv)
        report = LoadReport(manifest.num_bytes, time.perf_counter() - began, mapped=True)
        compression, account = manifest.model.compression, manifest.account
        return FoundWeights(restored, compression, account, manifest.num_bytes, report, kv)

    # --- what was loaded

    def keep(
        self,
        model: object,
        kernels: DenseModel | None = None,
        compression: str = "",
        account: MemoryAccount | None = None,
    ) -> KeptWeights:
        """Move a loaded model's weights into memory that others can map, make KV memory of that
        kind if ``account`` says how much, and offer both. Where a model cannot be held, nothing is,
        and the log says why."""
        try:
            with torch.inference_mode():
                return self._keep(model, kernels, compression, account)
        except (CannotHold, OSError, RuntimeError) as failure:
            _log.warning("weights are not held: %s", failure)
            return KeptWeights(0, None)
        finally:
            self.close()

    def _keep(
        self,
        model: object,
        kernels: DenseModel | None,
        compression: str,
        account: MemoryAccount | None,
    ) -> KeptWeights:
        if not isinstance(model, Decoder):
            raise CannotHold("transformers' code computes the model")
        describer = Describer()
        described = describer.model(model, kernels, compression)
        placed, pieces, held = move(self._memory, describer.tensors)
        if len(pieces) >= MAX_PIECES:
            raise CannotHold(f"{len(pieces)} pieces of memory; {MAX_PIECES - 1} are the most")
        kv = None if account is None else self._memory.make(account.kv_bytes)
        held_kv = None if account is None else HeldKV(account.kv_bytes, self._engine)
        manifest = Manifest(described, placed, held, account, held_kv)
        descriptors = [piece.descriptor for piece in pieces]
        descriptors += [] if kv is None else [kv.descriptor]
        self._own(_Content(manifest.encode(), manifest.num_bytes, descriptors), pieces, kv)
        self._begin()
        return KeptWeights(manifest.num_bytes, None if kv is None else kv.memory)

    def _own(
        self, content: _Content, pieces: Sequence[Piece], kv: Piece | AwaitedMemory | None
    ) -> None:
        self._content = content
        self._resting = self._memory.resting(pieces, kv)
        self._present.set()

    def _begin(self) -> None:
        """Offer the weights for the first time."""
        connection, self._connection = self._connection, None
        try:
            connection = connection or HolderConnection(self._path)
            refused = self._offer(connection)
        except NoHolder as failure:
            refused = str(failure)
        if refused:
            _log.warning("weights are not held yet: %s", refused)
            if connection is not None:
                connection.close()
                connection = None
        self._stay(connection)

    def _offer(self, connection: HolderConnection) -> str:
        """Returns why they are not held. Raises ``NoHolder``."""
        with self._offering:
            content = self._content
            if content is None:
                return "there are none"
            return connection.offer(
                self.key, content.manifest, content.num_bytes, content.descriptors
            )

    def close(self) -> None:
        """Nobody waits any more for what this worker was to load."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- while the model sleeps

    @property
    def may_leave(self) -> bool:
        """Whether its memory is that of a device, in pieces that can be given back."""
        return self._resting is not None

    def leave(self) -> None:
        """Take weights and KV memory off the device, on which nothing may be computing; nothing is
        offered meanwhile. Raises ``OSError`` and ``RuntimeError``."""
        if self._resting is None or self._content is None:
            raise RuntimeError("the weights are in no memory that can be given back")
        with self._offering:
            content, self._content = self._content, None
            self._present.clear()
        self._resting.leave()
        close_all(content.descriptors)
        self._away = content
        if self._stayed is not None:
            self._stayed.end()

    def come_back(self) -> None:
        """Have them on the device again, KV memory as zeros. Raises ``RuntimeError``."""
        if self._resting is None or self._away is None:
            raise RuntimeError("the weights have not left")
        self._content = self._away._replace(descriptors=self._resting.come_back())
        self._away = None
        self._present.set()

    # --- while it works

    def _stay(self, connection: HolderConnection | None) -> None:
        """Stay connected to the holder that has the weights, so as to hear of its end, and offer
        them to the next one. ``None``: there is none yet."""
        thread = threading.Thread(
            target=self._watch, args=(connection,), name="holder", daemon=True
        )
        thread.start()

    def _watch(self, connection: HolderConnection | None) -> None:
        while True:
            if connection is not None:
                self._stayed = connection
                connection.wait_for_end()
                self._stayed = None
                connection.close()
            connection = self._offered_again()

    def _offered_again(self) -> HolderConnection:
        """A connection to a holder that has the weights."""
        said = ""
        while True:
            self._present.wait()
            try:
                connection = HolderConnection(self._path)
                refused = self._offer(connection)
                if not refused:
                    return connection
                connection.close()
            except NoHolder as failure:
                refused = str(failure)
            if refused != said:
                _log.warning("weights are not held for now: %s", refused)
                said = refused
            time.sleep(AGAIN_SECONDS)

"""What ``penstock serve`` says of itself once it is ready, from its settings and its engines."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.protocol.config import Config
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.membership import Peer
from penstock.services.launcher.listening import at, unix_url
from penstock.services.launcher.progress import AnnouncedModel, Announcement, has_chat_template


def announcement(
    configs: Sequence[Config],
    address: str,
    grpc: socket.socket | None,
    peers: Iterable[Peer],
    began: float,
) -> Announcement:
    """``peers``: this server's processes, whose engines know what they hold."""
    engines = [peer for peer in peers if peer.service == "scheduler"]
    config = configs[0]
    return Announcement(
        url=address,
        grpc=at(grpc) if grpc is not None else unix_url(config.server.grpc_uds),
        models=[_announced(one, engines) for one in configs],
        device=config.device.device,
        router=config.cluster.router,
        seconds=round(time.monotonic() - began, 2),
        drain_timeout_s=config.launch.drain_timeout_s,
        keys=config.server.has_keys,
    )


def _announced(config: Config, engines: Iterable[Peer]) -> AnnouncedModel:
    name, folder = config.model.names()[0], Path(config.model.model)
    capacities = [peer.capacity for peer in engines if peer.identity.is_of(name)]
    return AnnouncedModel(
        model=name,
        folder=str(folder),
        dtype=config.model.dtype,
        stored_dtype=read_model_info(folder).dtype,
        max_model_len=min((one.max_model_len for one in capacities), default=0),
        kv_tokens=sum(one.all_kv_tokens for one in capacities),
        chat=has_chat_template(folder),
    )

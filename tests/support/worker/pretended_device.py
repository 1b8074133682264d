"""A model on a device that is no CPU, without numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.protocol.model_info import read_model_info
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.models.weights import allocate_weights

PRETENDED = torch.device("meta")


def pretended(folder: Path | str) -> Decoder:
    info = read_model_info(folder)
    model = adapter_for(info).specification(info)
    return Decoder(model, allocate_weights(model, torch.float32, PRETENDED))

"""The served models as Anthropic's clients read them."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.client.gateway_interface import ServedModel
from penstock.services.frontend.bodies.anthropic_answers import ModelInfo, ModelInfoList
from penstock.services.frontend.parse import short_names


def model_info(model: ServedModel, name: str, created: int) -> ModelInfo:
    """created: seconds since the epoch."""
    return ModelInfo(
        id=name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.max_model_len - 1,
        max_tokens=model.max_model_len,
    )


def model_infos(models: list[ServedModel], created: int) -> ModelInfoList:
    """All names of all models, the short ones last: some clients can send no others."""
    named = {name: model for model in models for name in (model.name, *model.aliases)}
    for name, model in short_names(models).items():
        named.setdefault(name, model)
    infos = [model_info(model, name, created) for name, model in named.items()]
    ids = [info.id for info in infos]
    return ModelInfoList(
        data=infos, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None
    )

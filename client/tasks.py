"""Whether anybody does what a request is for."""

from __future__ import annotations

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.tasks import GENERATE, OF_TOKENIZERS
from penstock.protocol.wire.messages.requests import Rejected, RequestHead


def task_refusal(head: RequestHead, models: list[ServedModel]) -> Rejected | None:
    """The answer to a request for a task that no engine of its model does, nor its tokenizer."""
    if head.task == GENERATE or head.task in OF_TOKENIZERS:
        return None
    done = [
        GENERATE,
        *(task for model in models if model.name == head.model for task in model.tasks),
    ]
    if head.task in done:
        return None
    message = f"task is {head.task!r}; the model {head.model!r} does: {', '.join(done)}"
    return Rejected(0, 0, 400, "invalid_request_error", message, param="task")

"""Whether anybody does what a request is for, as it wants it done."""

from __future__ import annotations

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.tasks import CLASSIFY, EMBED, GENERATE, OF_TOKENIZERS, SCORE
from penstock.protocol.wire.messages.requests import REPEATING, Rejected, RequestHead

_ROUTES = {EMBED: "/v1/embeddings", SCORE: "/v1/rerank, /v1/score", CLASSIFY: "/v1/classify"}


def task_refusal(head: RequestHead, models: list[ServedModel]) -> Rejected | None:
    """The answer to a request for a task that no engine of its model does, nor its tokenizer."""
    if head.task in OF_TOKENIZERS:
        return None
    model = next((one for one in models if one.name == head.model), None)
    if model is None:
        done = [GENERATE]
    else:
        done = [*([GENERATE] if model.generates else []), *model.tasks]
    if head.task in done:
        return None
    at = ", ".join(f"{task} ({_ROUTES[task]})" if task in _ROUTES else task for task in done)
    if head.task == GENERATE:
        message = f"the model {head.model!r} generates no text; it does: {at}"
    else:
        message = f"the model {head.model!r} does not do the task {head.task!r}; it does: {at}"
    return Rejected(0, 0, 400, "invalid_request_error", message, param="model")


def repeat_refusal(head: RequestHead, model: ServedModel) -> Rejected | None:
    """The answer to a request that wants its answer repeated, where no engine of a model does so.
    What one that sleeps will do is not known yet."""
    if not head.deterministic or model.repeats or model.sleep:
        return None
    message = (
        f"deterministic is true, and no engine of the model {head.model!r} repeats its answers bit "
        f"for bit: {REPEATING}"
    )
    return Rejected(0, 0, 400, "invalid_request_error", message, param="deterministic")

"""The span of a client's request, in the words of OpenTelemetry's conventions for generative AI.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.process.spans import SPANS, OpenSpan
from penstock.protocol.process.stage import Attributes
from penstock.protocol.tasks import GENERATE
from penstock.protocol.wire.messages.requests import Chat
from penstock.services.frontend.parse import GenerateRequest

if TYPE_CHECKING:
    from penstock.services.frontend.generation import Generation

_OPERATIONS = {"embed": "embeddings"}
"""What the conventions call a task; others keep their name."""


def _operation(request: GenerateRequest) -> str:
    if request.task != GENERATE:
        return _OPERATIONS.get(request.task, request.task)
    is_chat = bool(request.prompts) and isinstance(request.prompts[0], Chat)
    return "chat" if is_chat else "text_completion"


def begin_span(
    request: GenerateRequest, trace: str, request_id: str, began: float
) -> OpenSpan | None:
    """Open the span of a request; only while ``SPANS.on``. ``trace``: the client's
    ``traceparent``; ``began``: monotonic seconds. ``None``: it is not sampled."""
    operation = _operation(request)

    def facts() -> Attributes:
        return _asked_for(operation, request, request_id)

    return SPANS.open(f"{operation} {request.served}", trace, began, facts)


def _asked_for(operation: str, request: GenerateRequest, request_id: str) -> Attributes:
    params = request.params
    facts: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": request.served,
        "penstock.request_id": request_id,
        "penstock.stream": request.stream,
    }
    if params.max_tokens is not None:
        facts["gen_ai.request.max_tokens"] = params.max_tokens
    if params.temperature is not None:
        facts["gen_ai.request.temperature"] = params.temperature
    if params.top_p is not None:
        facts["gen_ai.request.top_p"] = params.top_p
    if params.n > 1:
        facts["gen_ai.request.choice.count"] = params.n
    return facts


def end_span(span: OpenSpan, generation: Generation) -> None:
    """Close the span of a request that has ended, however it did."""
    usage = generation.usage
    facts: Attributes = {
        "gen_ai.response.model": generation.request.served,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.response.finish_reasons": tuple(generation.reasons),
        "penstock.continuations": generation.continuations,
    }
    if generation.first_at:
        span.event("first token", generation.first_at)
    error = generation.error
    span.end(facts, "" if error is None else error.code or error.kind)

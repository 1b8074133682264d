"""How many tokens a prompt has: a tokenizer says it, and nothing is computed."""

from __future__ import annotations

import msgspec
from aiohttp import web

from penstock.client.answers import Answer
from penstock.protocol.tasks import TOKENIZE
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.dialect_handler import generation_of
from penstock.services.frontend.parse import GenerateRequest


async def count_tokens(request: web.Request, asked: GenerateRequest) -> int:
    """Tokens of the prompt of ``asked``. Raises ``ApiError`` where they cannot be told."""
    arrival = request.app[CONTEXT].clock.now()
    counted = msgspec.structs.replace(asked, task=TOKENIZE, stream=False)
    generation = generation_of(request, counted, arrival)
    try:
        generation.open([Answer()])
        await generation.finished
        if generation.error is not None:
            raise generation.error
        return generation.usage.prompt
    finally:
        generation.close()

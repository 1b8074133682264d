"""How many tokens a prompt has: a tokenizer says it, and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from penstock.client.answers import Answer
from penstock.protocol.tasks import TOKENIZE
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.dialect_handler import generation_of
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.parse import GenerateRequest


async def count_tokens(
    request: web.Request, asked: GenerateRequest, *, is_part: bool = True
) -> int:
    """Tokens of the prompt of ``asked``. is_part: for a request of the client's, which does not
    ask for them itself. Raises ``ApiError`` where they cannot be told."""
    arrival = request.app[CONTEXT].clock.now()
    return await counted(
        asked, lambda counting: generation_of(request, counting, arrival), is_part=is_part
    )


async def counted(
    asked: GenerateRequest,
    begin: Callable[[GenerateRequest], Generation],
    *,
    is_part: bool = True,
) -> int:
    """The same, of what ``begin`` makes of a request."""
    generation = begin(msgspec.structs.replace(asked, task=TOKENIZE, stream=False, is_part=is_part))
    try:
        await generation.open([Answer()])
        await generation.finished
        if generation.error is not None:
            raise generation.error
        return generation.usage.prompt
    finally:
        generation.close()

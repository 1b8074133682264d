"""How old the queue of a tokenizer is."""

from __future__ import annotations

import asyncio
import time

import uvloop

from penstock.services.tokenizer.service import ENCODE_SECONDS, TokenizerService


def test_the_queue_is_as_old_as_the_first_request_whose_encoding_has_not_ended() -> None:
    async def ages() -> list[float]:
        tokenizer = TokenizerService.__new__(TokenizerService)  # no socket, no model
        tokenizer.loop = asyncio.get_running_loop()
        tokenizer.encoding = {}
        found = [tokenizer._queue_age()]
        for number, waited in enumerate((3.0, 1.0)):
            left = ENCODE_SECONDS - waited
            tokenizer.encoding[number, 0] = tokenizer.loop.call_later(left, print)
        found.append(tokenizer._queue_age())
        tokenizer.encoding.pop((0, 0)).cancel()
        found.append(tokenizer._queue_age())
        tokenizer.loop_delay = 2.0
        found.append(tokenizer._queue_age())
        tokenizer.encoding.pop((1, 0)).cancel()
        found.append(tokenizer._queue_age())
        return found

    began = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(ages())
    slack = time.monotonic() - began + 0.01
    for age, expected in zip(found, (0.0, 3.0, 1.0, 2.0, 2.0), strict=True):
        assert expected <= age + 0.01 <= expected + slack + 0.01

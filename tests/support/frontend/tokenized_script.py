"""A script whose rows the tokenizer's own code makes of what a model has written."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

from support.frontend.frontend_scripted import Script

from penstock.client.sink import Sink, row_extras
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.ownership.choice import Choice
from penstock.protocol.ownership.guard import TokenExtras
from penstock.protocol.ownership.text_rows import TextRows
from penstock.protocol.wire.messages.requests import PromptText, Work
from penstock.protocol.wire.messages.tokens import End, EndReason, RowLogprobs
from penstock.services.tokenizer.choice_stream import ChoiceStream
from penstock.services.tokenizer.parsed_stream import ParsedStream
from penstock.services.tokenizer.reading import reading_of
from penstock.services.tokenizer.text_model import TextModel

MODEL = TextModel.load(Path(__file__).parents[3] / "demo" / "model")
"""The built-in model's."""


def writes(
    output: str, *, row: int = 1, ends: bool = True, written: asyncio.Event | None = None
) -> Script:
    """Accept, and bring the tokens of ``output``, ``row`` at a time; after them nothing, or the
    token that ends a turn. written: set when all have come."""
    encoded = MODEL.encode_prompt(PromptText(output, add_special_tokens=False))
    tokens = memoryview(encoded).cast("i").tolist()
    stop = MODEL.token_id("<|im_end|>")
    assert stop is not None
    if ends:
        tokens.append(stop)

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(3)
        choice = Choice(_stream(work), work.params.logprobs is not None)
        for begin in range(0, len(tokens), row):
            part = tokens[begin : begin + row]
            is_last = ends and begin + row >= len(tokens)
            end = End(0, EndReason.STOP, stop) if is_last else None
            entries = b"".join(struct.pack("<iif", token, 1, -0.5) for token in part)
            logprobs = RowLogprobs(0, PackedLogprobs(0, entries))
            content, used, end = choice.push(memoryview(_int32(part)).cast("i"), end)
            rows = TextRows()
            rows.add(1, 0, 0, choice, used, content, end, TokenExtras(logprobs=logprobs))
            batch = rows.batch()
            extras = row_extras(batch) or {}
            sink.on_row(0, batch.texts[0], batch.counts[0], extras.get(0))
            await asyncio.sleep(0)
        if written is not None:
            written.set()
        if not ends:
            await asyncio.Event().wait()

    return script


def _stream(work: Work) -> ChoiceStream:
    reading = reading_of(MODEL, work.output, b"", skips_special=True)
    if reading is None:
        return ChoiceStream(MODEL, work.params)
    return ParsedStream(MODEL, work.params, b"", reading, reading.parser(1, 0))


def _int32(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)

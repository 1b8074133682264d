"""The way of one choice from token ids to text, thinking and tool calls."""

from __future__ import annotations

from penstock.protocol.ownership.choice import Delta, joined
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import Content, Event, Reasoning, Text
from penstock.services.tokenizer.choice_stream import ChoiceStream, TokenRow
from penstock.services.tokenizer.output.parser import OutputParser
from penstock.services.tokenizer.reading import Reading
from penstock.services.tokenizer.stop_strings import StopStrings
from penstock.services.tokenizer.text_model import TextModel

_HIDDEN = Reasoning("")


class ParsedStream(ChoiceStream):
    """Detokenizer, output parser and stop strings of one choice.

    Stop strings are looked for in the answer's text, never in thinking or in a call's arguments.
    """

    __slots__ = ("_hides", "_parser")

    def __init__(
        self,
        text_model: TextModel,
        params: SamplingParams,
        prompt: bytes,
        reading: Reading,
        parser: OutputParser,
    ) -> None:
        super().__init__(text_model, params, prompt, skip_special=False)
        self._parser = parser
        self._hides = reading.hides_reasoning

    def push(self, tokens: TokenRow, last_is_stop: bool = False) -> Delta:
        """See ``ChoiceStream``."""
        stops, parser = self._stops, self._parser
        if stops is not None and stops.found is not None:
            return Delta("", 0, stops.found)
        if self._is_over():
            return Delta("", 0, None, over=True)
        count = len(tokens)
        rendered = count - 1 if last_is_stop and not self._include else count
        content: Content = ""
        for position in range(rendered):
            token = tokens[position]
            if parser.in_reasoning:
                self.reasoning_tokens += 1
            found = parser.push(token, self._push_token(token))
            if found.__class__ is not str:
                found = self._shown(found)  # type: ignore[arg-type]
            if stops is not None:
                if self._untouched:
                    self._untouched -= 1
                elif found:
                    found = _answers(found, stops)
                if stops.found is not None:
                    return Delta(joined(content, found), position + 1, stops.found)
            content = joined(content, found) if content else found
            if parser.ended:
                return Delta(content, position + 1, None, over=True)
        return Delta(content, count, None)

    def finish(self, *, complete: bool = False) -> Content:
        """See ``ChoiceStream``. What was held back of a mark is text."""
        if self.stop is not None or self._is_over():
            return ""
        parser, stops = self._parser, self._stops
        content = joined(parser.push(-1, self._flush_tokens()), parser.finish(complete=complete))
        if content.__class__ is not str:
            content = self._shown(content)  # type: ignore[arg-type]
        if stops is not None:
            content = _answers(content, stops)
            if stops.found is None:
                content = joined(content, stops.flush())
        return content

    def _is_over(self) -> bool:
        """The only call has come."""
        return self._parser.ended

    def _shown(self, events: list[Event]) -> list[Event]:
        """The events, without the words of thinking that is hidden. That its tokens were thinking
        is told all the same: who counts them knows of no others."""
        if not self._hides:
            return events
        return [_HIDDEN if isinstance(event, Reasoning) else event for event in events]


def _answers(content: Content, stops: StopStrings) -> Content:
    """The content up to the end of what may be released of it, as the stop strings have it."""
    if isinstance(content, str):
        return stops.push(content)
    left: list[Event] = []
    for event in content:
        text = stops.push(event.text) if isinstance(event, Text) else stops.flush()
        left += [Text(text)] if text else []
        if stops.found is not None:
            break
        if not isinstance(event, Text):
            left.append(event)
    return left

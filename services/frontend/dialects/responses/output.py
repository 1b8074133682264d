"""The items of an answer, made from the events of its tokens, and the events that tell of them.

One item is open at a time. What is told of an item adds up to it, so that the unstreamed response
holds what the streamed one ends with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from msgspec import UNSET

from penstock.services.frontend.bodies.openai_response import (
    CustomCall,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningOutput,
    ReasoningText,
    SummaryText,
)
from penstock.services.frontend.bodies.responses import ChatTokenLogprob
from penstock.services.frontend.dialects.responses.custom_input import CustomInput
from penstock.services.frontend.dialects.responses.events import EventWriter
from penstock.services.frontend.dialects.responses.items import output_id, seal
from penstock.services.frontend.dialects.responses.tools import OfferedTools, ToolIdentity

_PART = "response.content_part"
_SUMMARY = "response.reasoning_summary"


class OpenItem(ABC):
    """An item that grows."""

    kind: ClassVar[str]

    def __init__(self, writer: EventWriter, answer_id: str, index: int) -> None:
        self.id = output_id(self.kind, answer_id, index)
        self.index = index
        self._writer = writer
        self._texts: list[str] = []
        self._place: dict[str, Any] = {"item_id": self.id, "output_index": index}

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """As it is now."""

    @abstractmethod
    def open(self) -> bytes:
        """What is told of its beginning."""

    @abstractmethod
    def close(self) -> bytes:
        """What is told of its end, but for the item itself."""

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def opened(self) -> bytes:
        item = self.item("in_progress")
        added = self._writer.event("response.output_item.added", output_index=self.index, item=item)
        return added + self.open()

    def closed(self, status: ItemStatus) -> tuple[bytes, OutputItem]:
        told = self.close()
        item = self.item(status)
        done = self._writer.event("response.output_item.done", output_index=self.index, item=item)
        return told + done, item


class OpenMessage(OpenItem):
    kind = "message"

    def __init__(self, writer: EventWriter, answer_id: str, index: int) -> None:
        super().__init__(writer, answer_id, index)
        self._place["content_index"] = 0
        self._logprobs: list[ChatTokenLogprob] = []
        self._plain = writer.delta_opening("response.output_text.delta", **self._place, logprobs=[])

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self._part()]
        return OutputMessage(id=self.id, status=status, content=content)

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self._logprobs)

    def open(self) -> bytes:
        return self._writer.event(f"{_PART}.added", **self._place, part=OutputText(text=""))

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> bytes:
        self._texts.append(text)
        if not logprobs:
            return self._writer.delta(self._plain, text)
        self._logprobs += logprobs
        return self._writer.event(
            "response.output_text.delta", **self._place, delta=text, logprobs=logprobs
        )

    def close(self) -> bytes:
        event = self._writer.event
        text = event(
            "response.output_text.done", **self._place, text=self.text, logprobs=self._logprobs
        )
        return text + event(f"{_PART}.done", **self._place, part=self._part())


class OpenReasoning(OpenItem):
    """Thinking. Its summary, where one is wanted, is the thinking itself."""

    kind = "reasoning"

    def __init__(
        self, writer: EventWriter, answer_id: str, index: int, *, summarized: bool, sealed: bool
    ) -> None:
        super().__init__(writer, answer_id, index)
        self._summary_place = {**self._place, "summary_index": 0}
        self._place["content_index"] = 0
        self._summarized = summarized
        self._sealed = sealed
        self._opening = writer.delta_opening("response.reasoning_text.delta", **self._place)
        self._summary_opening = writer.delta_opening(
            f"{_SUMMARY}_text.delta", **self._summary_place
        )

    def item(self, status: ItemStatus) -> ReasoningOutput:
        text = self.text
        is_done = status != "in_progress"
        return ReasoningOutput(
            id=self.id,
            status=status,
            summary=[SummaryText(text=text)] if is_done and self._summarized else [],
            content=[ReasoningText(text=text)] if is_done else [],
            encrypted_content=seal(text) if is_done and self._sealed else UNSET,
        )

    def open(self) -> bytes:
        event = self._writer.event
        told = event(f"{_PART}.added", **self._place, part=ReasoningText(text=""))
        if self._summarized:
            part = SummaryText(text="")
            told += event(f"{_SUMMARY}_part.added", **self._summary_place, part=part)
        return told

    def add(self, text: str) -> bytes:
        self._texts.append(text)
        told = self._writer.delta(self._opening, text)
        if self._summarized:
            told += self._writer.delta(self._summary_opening, text)
        return told

    def close(self) -> bytes:
        event, text = self._writer.event, self.text
        told = event("response.reasoning_text.done", **self._place, text=text)
        told += event(f"{_PART}.done", **self._place, part=ReasoningText(text=text))
        if self._summarized:
            place = self._summary_place
            told += event(f"{_SUMMARY}_text.done", **place, text=text)
            told += event(f"{_SUMMARY}_part.done", **place, part=SummaryText(text=text))
        return told


class OpenCall(OpenItem):
    """A call of a function."""

    kind = "function_call"

    def __init__(
        self, writer: EventWriter, answer_id: str, index: int, call_id: str, tool: ToolIdentity
    ) -> None:
        super().__init__(writer, answer_id, index)
        self.call_id = call_id
        self.tool = tool
        self._namespace = tool.namespace or UNSET
        self._opening = writer.delta_opening(self._delta_kind, **self._place)

    _delta_kind = "response.function_call_arguments.delta"

    def item(self, status: ItemStatus) -> FunctionCall | CustomCall:
        return FunctionCall(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.tool.name,
            arguments=self.text,
            namespace=self._namespace,
        )

    def open(self) -> bytes:
        return b""

    def add(self, text: str) -> bytes:
        self._texts.append(text)
        return self._writer.delta(self._opening, text) if text else b""

    def close(self) -> bytes:
        return self._writer.event(
            "response.function_call_arguments.done",
            **self._place,
            name=self.tool.name,
            arguments=self.text,
        )


class OpenCustomCall(OpenCall):
    """A call of a tool that takes text."""

    kind = "custom_tool_call"
    _delta_kind = "response.custom_tool_call_input.delta"

    def __init__(
        self, writer: EventWriter, answer_id: str, index: int, call_id: str, tool: ToolIdentity
    ) -> None:
        super().__init__(writer, answer_id, index, call_id, tool)
        self._input = CustomInput()

    def item(self, status: ItemStatus) -> CustomCall:
        return CustomCall(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.tool.name,
            input=self._input.whole,
            namespace=self._namespace,
        )

    def add(self, text: str) -> bytes:
        return self._told(self._input.feed(text))

    def _told(self, text: str) -> bytes:
        return self._writer.delta(self._opening, text) if text else b""

    def close(self) -> bytes:
        told = self._told(self._input.end())
        return told + self._writer.event(
            "response.custom_tool_call_input.done", **self._place, input=self._input.whole
        )


class Output:
    """The items of one answer. Each method returns the events of what it adds."""

    def __init__(
        self,
        writer: EventWriter,
        answer_id: str,
        tools: OfferedTools,
        *,
        summarized: bool,
        sealed: bool,
    ) -> None:
        """summarized: thinking has summaries; sealed: and ``encrypted_content``."""
        self.items: list[OutputItem] = []
        """Those that are closed."""
        self._writer = writer
        self._answer_id = answer_id
        self._tools = tools
        self._summarized = summarized
        self._sealed = sealed
        self._open: OpenItem | None = None
        self._call = -1
        """The number of the call that is open."""

    @property
    def is_calling(self) -> bool:
        """A call of a tool is open: what has come of it means nothing yet."""
        return isinstance(self._open, OpenCall)

    @property
    def is_saying(self) -> bool:
        """A message is open: the next text goes on with it."""
        return isinstance(self._open, OpenMessage)

    def calls(self) -> list[FunctionCall | CustomCall]:
        """Of tools, closed."""
        return [one for one in self.items if isinstance(one, FunctionCall | CustomCall)]

    def text(self, text: str, logprobs: list[ChatTokenLogprob]) -> bytes:
        opened = b""
        if not isinstance(self._open, OpenMessage):
            message = OpenMessage(self._writer, self._answer_id, self._next())
            opened = self._begin(message)
        else:
            message = self._open
        return opened + message.add(text, logprobs)

    def reasoning(self, text: str) -> bytes:
        opened = b""
        if not isinstance(self._open, OpenReasoning):
            thinking = OpenReasoning(
                self._writer,
                self._answer_id,
                self._next(),
                summarized=self._summarized,
                sealed=self._sealed,
            )
            opened = self._begin(thinking)
        else:
            thinking = self._open
        return opened + thinking.add(text)

    def call(self, number: int, call_id: str, function: str) -> bytes:
        tool = self._tools.identity(function)
        kind = OpenCustomCall if tool.is_custom else OpenCall
        opened = self._begin(kind(self._writer, self._answer_id, self._next(), call_id, tool))
        self._call = number
        return opened

    def arguments(self, number: int, text: str) -> bytes:
        """Raises ``ValueError`` for another call than the one that is open."""
        if not isinstance(self._open, OpenCall) or number != self._call:
            raise ValueError(f"arguments of call {number}, which is not open")
        return self._open.add(text)

    def close(self, status: ItemStatus) -> bytes:
        """End the open item, if there is one."""
        if self._open is None:
            return b""
        told, item = self._open.closed(status)
        self.items.append(item)
        self._open = None
        return told

    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: OpenItem) -> bytes:
        told = self.close("completed")
        self._open = item
        return told + item.opened()

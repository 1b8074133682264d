"""What happens between a request's admission and its first token."""

from __future__ import annotations

from collections.abc import Callable

from penstock.client.admission import AdmissionController
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.wire.messages.requests import Rejected


class UntilFirstRow:
    """The sink of a request without its first token, or of a batch that waits in part: the
    admission controller hears what comes."""

    __slots__ = ("_admission", "_begun", "_sink", "request_id")

    def __init__(
        self, begun: Callable[[int, Sink], None], admission: AdmissionController, sink: Sink
    ) -> None:
        """begun: called with the request's id and its own sink when its first token is there."""
        self.request_id = 0
        self._begun = begun
        self._admission = admission
        self._sink = sink

    @property
    def wants_ids(self) -> bool:
        return self._sink.wants_ids

    def on_accepted(self, prompt_tokens: int) -> None:
        self._admission.counted(self.request_id, prompt_tokens)
        self._sink.on_accepted(prompt_tokens)

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        if self._admission.started(self.request_id):
            self._begun(self.request_id, self._sink)
        self._sink.on_row(choice, text, tokens, extras)

    def on_continued(self) -> None:
        self._sink.on_continued()

    def on_rejected(self, rejected: Rejected) -> None:
        self._admission.left(self.request_id)
        self._sink.on_rejected(rejected)

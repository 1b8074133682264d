"""A request on a WebSocket, from its beginning to its end in the metrics and the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.client.gateway_interface import Overloaded
from penstock.protocol.trace_context import line_fields
from penstock.services.frontend.context import TRACE
from penstock.services.frontend.errors import ApiError, from_rejected, status_error
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.websockets.session import SocketSession

_log = logging.getLogger("penstock.frontend")


class SocketRequest:
    """What is known of it while it is answered."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.generation: Generation | None = None
        self.refusal: ApiError | None = None
        """What its client must be told."""


@contextmanager
def one_request(session: SocketSession) -> Iterator[SocketRequest]:
    """Counts and logs how the request ends that is answered within, closes its generation, and
    keeps an error as ``refusal``. A ``ConnectionError`` passes: its client has gone."""
    request = SocketRequest(session.next_request_id())
    is_whole = False
    try:
        yield request
        is_whole = True
    except ApiError as error:
        request.refusal = error
    except Overloaded as overloaded:
        request.refusal = from_rejected(overloaded.rejected)
    except ConnectionError:
        raise
    except Exception:
        fields = line_fields(request.id, session.request[TRACE])
        _log.exception("a request failed", extra=fields)
        request.refusal = status_error(500, f"Internal error in request {request.id}")
    finally:
        try:
            if request.refusal is not None:
                session.refused(request.refusal, request.id, request.generation)
            elif is_whole:
                session.answered(request.id, request.generation)
            else:
                session.abandoned(request.id, request.generation)
        finally:
            if request.generation is not None:
                request.generation.close()

"""An engine that does not repeat its answers takes no request that wants that."""

from __future__ import annotations

from penstock.protocol.wire.messages.requests import RequestHead
from penstock.services.scheduler.admission import Offers


def test_a_request_that_should_have_gone_elsewhere_is_refused_with_what_does_it() -> None:
    asked = RequestHead(deterministic=True)
    reason = Offers(repeats=False).lacks(asked)
    assert reason.startswith("deterministic: this engine does not repeat its answers; a CPU does")
    assert "--deterministic" in reason
    assert not Offers(repeats=True).lacks(asked)
    assert not Offers(repeats=False).lacks(RequestHead())

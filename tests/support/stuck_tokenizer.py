"""A tokenizer's process in which a prompt of the one token 666 never comes back from its thread.

``sleep`` stands for a call into a library that releases the interpreter and does not return.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from penstock.protocol.wire.messages.requests import Tokens, TokenWork, Work
from penstock.services import cli
from penstock.services.tokenizer import preparation, service
from penstock.services.tokenizer.preparation import prepare

STUCK = (666).to_bytes(4, "little")


def stuck_prepare(work: Work, *arguments: Any, **named: Any) -> TokenWork:
    if isinstance(work.prompt, Tokens) and work.prompt.ids == STUCK:
        time.sleep(3600)
    return prepare(work, *arguments, **named)


if __name__ == "__main__":
    service.prepare = stuck_prepare
    preparation.QUICK_TOKENS = preparation.QUICK_CHARACTERS = 0  # all prompts have threads
    service.ENCODE_SECONDS = 0.5
    service.LOST_SECONDS = 2.0
    service.MAX_ENCODING = 12
    service.MAX_ENCODING_BYTES = 4000
    sys.exit(cli.main(["tokenizer", *sys.argv[1:]]))

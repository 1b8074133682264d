"""How much may wait for encoding: in requests and in bytes, of all tenants and of each."""

from __future__ import annotations

from collections import Counter

from penstock.protocol.wire.messages.requests import (
    Chat,
    Pair,
    Prompt,
    PromptText,
    Tokens,
    Work,
    prompts_of,
)

_Key = tuple[int, int]


def work_bytes(work: Work) -> int:
    """What a request that waits takes, about."""
    grammar = work.params.structured_outputs
    source = 0 if grammar is None else len(grammar.source)
    outputs = sum(len(choice.output) for choice in work.choices)
    return sum(map(_prompt_bytes, prompts_of(work))) + source + outputs


def _prompt_bytes(prompt: Prompt) -> int:
    match prompt:
        case Chat(messages, template_kwargs):
            return len(messages) + len(template_kwargs)
        case PromptText(text):
            return len(text)
        case Tokens(ids):
            return len(ids)
        case Pair(text, other):
            return len(text) + len(other)


class EncodeRoom:
    """Requests that wait for encoding or are in it; of a batch each prompt counts as one. A tenant
    gets half of what there is room for, so that nobody fills it alone."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._held: dict[_Key, tuple[str, int, int]] = {}
        """(tenant, prompts, bytes)."""
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def lacks(self, tenant: str, size: int, prompts: int = 1) -> tuple[int, str] | None:
        """Why a request of so many bytes does not fit, with an HTTP status; ``None``: it does."""
        held, held_bytes = self._requests.total(), self._bytes.total()
        if held + prompts > self._most or held_bytes + size > self._most_bytes:
            return 503, (
                f"{held} requests of {held_bytes} bytes wait for encoding; at most {self._most} "
                f"of {self._most_bytes} are taken: try again"
            )
        held, held_bytes = self._requests[tenant], self._bytes[tenant]
        most, most_bytes = self._most // 2, self._most_bytes // 2
        if held + prompts > most or held_bytes + size > most_bytes:
            return 429, (
                f"{held} requests of {held_bytes} bytes of one key, user or address wait for "
                f"encoding; at most {most} of {most_bytes} are taken: try again"
            )
        return None

    def enter(self, key: _Key, tenant: str, size: int, prompts: int = 1) -> None:
        self._held[key] = tenant, prompts, size
        self._requests[tenant] += prompts
        self._bytes[tenant] += size

    def leave(self, key: _Key) -> None:
        """The request is encoded or refused; one that is not there changes nothing."""
        found = self._held.pop(key, None)
        if found is None:
            return
        tenant, prompts, size = found
        self._requests[tenant] -= prompts
        self._bytes[tenant] -= size
        if not self._requests[tenant]:
            del self._requests[tenant], self._bytes[tenant]

"""What the servers of pages to chat send to ``/v1/chat/completions`` (docs/chat-frontends.md)."""

from __future__ import annotations

from support.frontend.frontend_scripted import LENGTH, Client, run, say

MESSAGES = [{"role": "system", "content": "You are Ann."}, {"role": "user", "content": "Hello"}]
SILLY_TAVERN = {
    "temperature": 1, "max_tokens": 16, "presence_penalty": 0, "frequency_penalty": 0, "top_p": 1,
    "top_k": 0, "stop": [], "logit_bias": {}, "seed": 3, "n": 1, "min_p": 0.05,
}  # fmt: skip
"""Its fields for a custom endpoint, and one of *Include Body Parameters*."""


def test_the_fields_of_sillytavern_are_taken() -> None:
    async def use(client: Client) -> None:
        body = {"messages": MESSAGES, **SILLY_TAVERN}
        async with client.session.post(
            client.url + "/v1/chat/completions", json={**body, "stream": True}
        ) as response:
            raw = await response.text()
        assert response.status == 200, raw
        assert raw.endswith("data: [DONE]\n\n")

    run(use, say("Hello", end=LENGTH))

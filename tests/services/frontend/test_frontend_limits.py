"""Limits of keys: what is let in, what is told of them, and what a request costs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai
import pytest
from support.frontend.frontend_scripted import Client, rejected, run, say
from support.frontend.key_files import Keys

from penstock.client.sink import Sink
from penstock.protocol.keys.record import KeyLimits
from penstock.protocol.wire.messages.requests import Work
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.limits import divided
from penstock.services.frontend.keys.local_limits import Charge, LocalLimits
from penstock.services.frontend.keys.sliding_window import SLOT_S, WINDOW_S, SlidingWindow
from penstock.services.frontend.keys.standing import duration

TEXT, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
ONE = {"prompt": [1, 2, 3], "max_tokens": 10}
"""May take 13 tokens, and takes 5: the script says two."""
HELLO = [{"role": "user", "content": "x"}]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_no_minute_has_more_than_the_limit_and_none_is_much_less_than_full() -> None:
    for seed in range(20):
        chance, window, limit = random.Random(seed), SlidingWindow(), 1000
        now, let_in = 0.0, []
        while now < 300:
            now += chance.expovariate(2.0)
            amount = chance.randrange(1, 120)
            if window.free_in(now, amount, limit) == 0:
                window.charge(now, amount)
                let_in.append((now, amount))
        for began, _ in let_in:
            within = sum(amount for at, amount in let_in if began <= at < began + WINDOW_S)
            assert within <= limit
        assert sum(amount for _, amount in let_in) > 0.85 * limit * 300 / WINDOW_S


def test_what_is_free_when_it_is_said_to_be_is_free_then() -> None:
    window = SlidingWindow()
    for second in range(10):
        window.charge(float(second), 10)
    wait = window.free_in(9.0, 25, 100)
    assert wait == 2 + SLOT_S + WINDOW_S - 9
    assert window.free_in(9.0 + wait - 2 * SLOT_S, 25, 100) > 0
    assert window.free_in(9.0 + wait, 25, 100) == 0


def test_what_was_taken_beyond_the_charge_is_paid_for_over_time() -> None:
    window = SlidingWindow()
    window.charge_owing(0.0, 400, 100)
    assert window.used(0.0, 100) == 400
    free = next(now for now in range(1, 1000) if window.free_in(float(now), 1, 100) == 0)
    assert 150 <= free <= 182  # the 300 that are owed take three minutes


def test_a_correction_counts_where_the_charge_was() -> None:
    window = SlidingWindow()
    slot = window.charge(0.0, 100)
    window.correct(0.0, slot, 60)
    assert window.used(30.0, 100) == 40
    assert window.used(61.0, 100) == 0
    window.correct(61.0, slot, 40)  # it has been over for long
    assert window.used(61.0, 100) == 0


def test_a_day_ends_at_midnight() -> None:
    clock = {"wall": 86_400.0 * 10 + 86_390}
    limits = KeyLimits(tokens_per_day=100)
    local = LocalLimits(wall=lambda: clock["wall"])
    key = KnownKey("key-1", "ann", limits=limits)
    charge = local.charge(key, limits, 80)
    refusal = local.refusal(key, limits, 30)
    assert refusal is not None
    assert (refusal.limit, refusal.used, refusal.retry_s) == ("day", 80, 10.0)
    clock["wall"] += 11
    assert local.refusal(key, limits, 30) is None
    local.settle(key, charge, 90, took_place=True)  # of yesterday
    assert local.refusal(key, limits, 100) is None


class Clock:
    """Seconds of both clocks, which a test sets forward."""

    def __init__(self) -> None:
        self.now = 86_400.0 * 10

    def local(self) -> LocalLimits:
        return LocalLimits(now=lambda: self.now, wall=lambda: self.now)

    def let_in(self, local: LocalLimits, key: KnownKey, part: KeyLimits, tokens: int) -> Charge:
        """Waits as long as it is told to."""
        for _ in range(100):
            refusal = local.refusal(key, part, tokens)
            if refusal is None:
                return local.charge(key, part, tokens)
            assert refusal.retry_s > 0
            self.now += refusal.retry_s
        raise AssertionError("it is refused for ever")


@pytest.mark.parametrize("limit", ["tokens_per_minute", "tokens_per_day"])
def test_what_fits_the_limit_but_no_frontends_part_is_let_in_after_a_wait_and_paid_for(
    limit: str,
) -> None:
    part, clock = divided(KeyLimits(**{limit: 300}), 3), Clock()
    key, local = KnownKey("key-1", "ann"), clock.local()
    clock.let_in(local, key, part, 10)
    began = clock.now
    for _ in range(4):
        charge = clock.let_in(local, key, part, 250)
        local.settle(key, charge, 250, took_place=True)
    clock.let_in(local, key, part, 1)
    period = WINDOW_S if limit == "tokens_per_minute" else 86_400
    # 10 and 4 * 250 tokens at 100 a period, and the period of the last one's beginning.
    assert 10 * period <= clock.now - began <= 15 * period


def test_what_a_large_request_did_not_use_of_its_charge_is_given_back_whole() -> None:
    part, clock = divided(KeyLimits(tokens_per_minute=300, tokens_per_day=3000), 3), Clock()
    key, local = KnownKey("key-1", "ann"), clock.local()
    charge = clock.let_in(local, key, part, 290)
    assert local.refusal(key, part, 1) is not None
    clock.now += 90  # its part of the minute is over, and half a minute of the rest is paid
    local.settle(key, charge, 5, took_place=True)
    assert local.refusal(key, part, 100) is None
    charge = clock.let_in(local, key, part, 290)
    local.settle(key, charge, 5, took_place=True)
    assert local.refusal(key, part, 95) is None
    assert local.refusal(key, part, 96) is not None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0ms"), (0.12, "120ms"), (1.5, "1.5s"), (59.99, "60s"), (360, "6m0s"), (3600, "1h0m0s")],
)
def test_durations_are_written_as_openai_does(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_requests_a_minute_are_counted_and_the_third_is_told_when_to_come_back(keys: Keys) -> None:
    ann, bob = keys.add("ann", requests_per_minute=2), keys.add("bob", requests_per_minute=2)

    async def use(client: Client) -> None:
        for left in ("1", "0"):
            status, _, response = await client.post(TEXT, ONE, headers=ann)
            assert status == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == left
            assert response.headers["x-ratelimit-reset-requests"].startswith(("59", "60", "1m"))
            assert "x-ratelimit-limit-tokens" not in response.headers
        status, answer, response = await client.post(TEXT, ONE, headers=ann)
        assert status == 429
        assert answer["error"]["code"] == "rate_limit_exceeded"
        said = "The key ann has begun 2 requests in the last minute and may begin 2; try again in"
        assert answer["error"]["message"].startswith(said)
        assert 55 <= int(response.headers["Retry-After"]) <= 61
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        async with client.session.post(
            client.url + TEXT, json={**ONE, "stream": True}, headers=bob
        ) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "1"
            await stream.read()
        status, _, response = await client.post(TEXT, {**ONE, "n": -1}, headers=bob)
        assert status == 400
        status, _, _ = await client.get("/v1/models", headers=ann)
        assert status == 200
        _, text, _ = await client.get("/metrics", headers={"x-api-key": "of-the-flag"})
        assert b'penstock_requests_limited_total{limit="requests"} 1.0' in text

    gateway = run(use, config=keys.config)
    assert len(gateway.works) == 3


def test_tokens_are_reserved_and_what_was_not_used_is_given_back(keys: Keys) -> None:
    ann = keys.add("ann", tokens_per_minute=23)

    async def use(client: Client) -> None:
        for left in (10, 5):  # after the first, which took 5: 23 - 5 - 13
            status, _, response = await client.post(TEXT, ONE, headers=ann)
            assert status == 200
            assert response.headers["x-ratelimit-remaining-tokens"] == str(left)
        status, _, response = await client.post(TEXT, ONE, headers=ann)
        assert (status, response.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
        status, answer, response = await client.post(TEXT, ONE, headers=ann)
        assert status == 429
        assert "has used 15 of its 23 tokens a minute, and this request may take 13" in str(answer)
        smaller = {**ONE, "max_tokens": 2}
        status, _, _ = await client.post(TEXT, smaller, headers=ann)
        assert status == 200

    run(use, config=keys.config)


def test_a_request_that_is_refused_elsewhere_costs_nothing(keys: Keys) -> None:
    ann = keys.add("ann", requests_per_minute=2, tokens_per_minute=13)
    answers = [400, 503, 200, 200]

    async def script(work: Work, sink: Sink) -> None:
        if (status := answers.pop(0)) != 200:
            sink.on_rejected(rejected(status))
        else:
            await say("x", prompt_tokens=3)(work, sink)

    async def use(client: Client) -> None:
        for expected in (400, 503, 200, 429):
            status, _, _ = await client.post(TEXT, ONE, headers=ann)
            assert status == expected
        status, _, _ = await client.post(TEXT, {**ONE, "max_tokens": 1}, headers=ann)
        assert status == 200

    run(use, script, config=keys.config)


def test_a_request_that_is_larger_than_the_limit_is_told_so_and_not_to_come_back(
    keys: Keys,
) -> None:
    ann = keys.add("ann", tokens_per_minute=12)

    async def use(client: Client) -> None:
        status, answer, response = await client.post(TEXT, ONE, headers=ann)
        assert status == 429
        assert "may take 13 tokens (prompt and max_tokens), and the key ann has 12 a minute" in str(
            answer
        )
        assert response.headers["x-should-retry"] == "false"
        assert "Retry-After" not in response.headers
        chat = {"messages": HELLO}  # says no max_tokens: it is let in, and pays afterwards
        status, _, _ = await client.post(CHAT, chat, headers=ann)
        assert status == 200

    run(use, config=keys.config)


def test_so_many_requests_run_at_the_same_time_and_those_on_a_websocket_count(keys: Keys) -> None:
    ann = keys.add("ann", concurrent=2)
    go_on = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        await go_on.wait()
        await say("x")(work, sink)

    async def use(client: Client) -> None:
        async with client.session.ws_connect(client.url + "/v1/stream", headers=ann) as socket:
            first = asyncio.create_task(client.post(TEXT, ONE, headers=ann))
            while not client.gateway.works:
                await asyncio.sleep(0)
            for name in ("1", "2"):
                await socket.send_json({"id": name, "type": "completion", "body": ONE})
            frame = await socket.receive_json()
            assert (frame["type"], frame["id"]) == ("error", "2")
            said = "The key ann has 2 requests open, and may have 2 at the same time"
            assert said in frame["error"]["message"]
            go_on.set()
            assert (await first)[0] == 200
            while frame["type"] != "end":
                frame = await socket.receive_json()
        status, _, _ = await client.post(TEXT, ONE, headers=ann)
        assert status == 200

    run(use, script, config=keys.config)


def test_counting_tokens_is_a_request_and_uses_none(keys: Keys) -> None:
    ann = keys.add("ann", requests_per_minute=1, tokens_per_minute=1)

    async def use(client: Client) -> None:
        status, _, response = await client.post("/tokenize", {"prompt": "x" * 100}, headers=ann)
        assert (status, response.headers["x-ratelimit-remaining-tokens"]) == (200, "1")
        status, _, _ = await client.post("/tokenize", {"prompt": "x"}, headers=ann)
        assert status == 429

    from support.frontend.frontend_scripted import of_any_task

    run(use, of_any_task(say("x")), config=keys.config)


def test_anthropics_clients_get_their_headers_and_errors(keys: Keys) -> None:
    import anthropic  # takes each process that collects this file more than two seconds

    ann = keys.key("ann", requests_per_minute=1, tokens_per_minute=1000)
    bob = keys.key("bob", models=["other"])
    ask: dict[str, Any] = {"model": "org/model", "max_tokens": 5, "messages": HELLO}

    async def use(client: Client) -> None:
        async with anthropic.AsyncAnthropic(base_url=client.url, max_retries=0, api_key="-") as api:

            def of(key: str) -> anthropic.AsyncAnthropic:
                return api.with_options(api_key=key)

            raw = await of(ann).messages.with_raw_response.create(**ask)
            assert raw.headers["anthropic-ratelimit-requests-limit"] == "1"
            assert raw.headers["anthropic-ratelimit-tokens-remaining"].isdigit()
            assert raw.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
            with pytest.raises(anthropic.RateLimitError) as limited:
                await of(ann).messages.create(**ask)
            assert limited.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
            with pytest.raises(anthropic.PermissionDeniedError, match="may not use the model"):
                await of(bob).messages.create(**ask)
            with pytest.raises(anthropic.AuthenticationError):
                await of(ann + "x").messages.create(**ask)

    run(use, config=keys.config)


def test_openais_clients_raise_their_own_errors_and_come_back_when_told(keys: Keys) -> None:
    ann, bob = keys.key("ann", concurrent=1), keys.key("bob", models=["other"])
    ask: dict[str, Any] = {"model": "org/model", "messages": HELLO}
    go_on = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        await go_on.wait()
        await say("x")(work, sink)

    async def use(client: Client) -> None:
        async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="-") as api:

            def of(key: str, retries: int = 0) -> openai.AsyncOpenAI:
                return api.with_options(api_key=key, max_retries=retries)

            first = asyncio.create_task(of(ann).chat.completions.create(**ask))
            while not client.gateway.works:
                await asyncio.sleep(0.001)
            with pytest.raises(openai.RateLimitError) as limited:
                await of(ann).chat.completions.create(**ask)
            assert limited.value.code == "rate_limit_exceeded"
            patient = asyncio.create_task(of(ann, retries=2).chat.completions.create(**ask))
            with pytest.raises(openai.PermissionDeniedError, match="may not use the model"):
                await of(bob).chat.completions.create(**ask)
            with pytest.raises(openai.AuthenticationError):
                await of(ann + "x").chat.completions.create(**ask)
            go_on.set()
            await first
            assert (await patient).choices[0].message.content == "x"

    run(use, script, config=keys.config)

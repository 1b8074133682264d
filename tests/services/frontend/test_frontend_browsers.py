"""Web pages that make a browser call the server: their own page may, others only when named."""

from __future__ import annotations

from typing import Any

import pytest
from frontend_scripted import Client, run

from penstock.protocol.config.fields import ServerConfig

TEXT = "/v1/completions"
ONE = {"prompt": "x"}
CHAT_PAGE = "https://chat.example.org"
NAMED = ServerConfig(allowed_origins=[CHAT_PAGE])


def code(answer: Any) -> str:
    return str(answer["error"]["code"])


def test_a_local_server_answers_to_local_names_only() -> None:
    async def use(client: Client) -> None:
        port = client.port
        ours = ("localhost", f"localhost:{port}", "127.0.0.1", f"[::1]:{port}", "LOCALHOST",
                "penstock.localhost", "127.9.9.9:1")  # fmt: skip
        for host in ours:
            assert (await client.post(TEXT, ONE, headers={"Host": host}))[0] == 200, host
        foreign = ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1",
                   "localhost.evil.example", "[::2]:80", "x/v9?a", "evil@localhost")  # fmt: skip
        for host in foreign:
            for path in ("/", "/live", "/metrics", "/v1/models"):
                status, answer, _ = await client.get(path, headers={"Host": host})
                assert (status, code(answer)) == (403, "foreign_host"), (host, path)
            status, answer, _ = await client.post(TEXT, ONE, headers={"Host": host})
            assert (status, code(answer)) == (403, "foreign_host"), host

    assert len(run(use).works) == 7


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(host="0.0.0.0", insecure=True),
        ServerConfig(api_key=["k"]),
        ServerConfig(allowed_origins=["https://gpu.example.org"]),
    ],
    ids=["open", "keys", "named"],
)
def test_a_server_that_others_may_reach_answers_to_any_name_that_may_be_its_own(
    config: ServerConfig,
) -> None:
    async def use(client: Client) -> None:
        headers = {"Host": "gpu.example.org:8000", "x-api-key": "k"}
        assert (await client.post(TEXT, ONE, headers=headers))[0] == 200

    run(use, config=config)


def test_a_page_whose_name_was_pointed_at_the_server_is_refused() -> None:
    """Its origin equals the host that it asks, so only the name tells it apart."""

    async def use(client: Client) -> None:
        name = f"evil.example:{client.port}"
        headers = {"Host": name, "Origin": f"http://{name}"}
        assert (await client.post(TEXT, ONE, headers=headers))[0] == 403

    assert run(use).works == []


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("cross-site", "no-cors", 403),
        ("same-site", "cors", 403),
        ("cross-site", "navigate", 200),
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
        ("", "", 200),
    ],
)
def test_what_a_foreign_page_embeds_is_refused_and_what_a_link_opens_is_not(
    site: str, mode: str, status: int
) -> None:
    async def use(client: Client) -> None:
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
        headers = {name: value for name, value in headers.items() if value}
        assert (await client.get("/metrics", headers=headers))[0] == status

    run(use)


def test_a_foreign_page_is_refused_with_every_method_and_type_of_body() -> None:
    async def use(client: Client) -> None:
        for method in ("POST", "GET", "DELETE", "PUT", "OPTIONS", "HEAD"):
            for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
                headers = {
                    "Origin": "https://evil.example",
                    "Content-Type": kind,
                    "Access-Control-Request-Method": "POST",
                }
                async with client.session.request(
                    method, client.url + TEXT, headers=headers, data=b'{"prompt": "x"}'
                ) as response:
                    assert response.status == 403, (method, kind)
                    assert not [h for h in response.headers if h.lower().startswith("access-")]

    for config in (ServerConfig(), NAMED):
        assert run(use, config=config).works == []


def test_a_page_that_is_named_may_call_and_read_the_answer() -> None:
    async def use(client: Client) -> None:
        page = {"Origin": CHAT_PAGE}
        asks = {**page, "Access-Control-Request-Method": "POST"}
        async with client.session.options(client.url + TEXT, headers=asks) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == CHAT_PAGE
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert "authorization" in response.headers["Access-Control-Allow-Headers"]
        for body, status in ((ONE, 200), ({}, 400)):
            found, _, response = await client.post(TEXT, body, headers=page)
            assert found == status
            assert response.headers["Access-Control-Allow-Origin"] == CHAT_PAGE
            assert response.headers["Vary"] == "Origin"
        _, _, response = await client.post(TEXT, ONE)
        assert "Access-Control-Allow-Origin" not in response.headers
        assert response.headers["Vary"] == "Origin"

    run(use, config=NAMED)


def test_a_page_that_is_named_still_needs_the_key() -> None:
    async def use(client: Client) -> None:
        page = {"Origin": CHAT_PAGE}
        asks = {**page, "Access-Control-Request-Method": "POST"}
        async with client.session.options(client.url + TEXT, headers=asks) as response:
            assert response.status == 204
        assert (await client.post(TEXT, ONE, headers=page))[0] == 401
        assert (await client.post(TEXT, ONE, headers={**page, "x-api-key": "k"}))[0] == 200

    config = ServerConfig(allowed_origins=[CHAT_PAGE], api_key=["k"])
    assert len(run(use, config=config).works) == 1

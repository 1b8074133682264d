"""Web pages that make a browser call the server: their own page may, others only when named."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from support.frontend.frontend_scripted import Client, run

from penstock.protocol.config.server_fields import ServerConfig

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


def test_a_page_that_is_named_may_send_the_headers_that_sdks_add_and_read_how_to_retry() -> None:
    async def use(client: Client) -> None:
        page = {"Origin": CHAT_PAGE}
        asks = {**page, "Access-Control-Request-Method": "POST"}
        wanted = "authorization,content-type,x-stainless-lang,openai-organization"
        asks["Access-Control-Request-Headers"] = wanted
        async with client.session.options(client.url + TEXT, headers=asks) as response:
            allowed = response.headers["Access-Control-Allow-Headers"].lower()
            assert set(wanted.split(",")) <= {name.strip() for name in allowed.split(",")}
        _, _, response = await client.post(TEXT, ONE, headers=page)
        exposed = response.headers["Access-Control-Expose-Headers"]
        assert {"request-id", "retry-after-ms", "x-should-retry"} <= set(exposed.split(", "))
        asks["Access-Control-Request-Headers"] = "x-bad: b"
        async with client.session.options(client.url + TEXT, headers=asks) as response:
            assert "x-bad" not in response.headers["Access-Control-Allow-Headers"]

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


BODY = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_does_not_say_that_it_is_json_is_refused(path: str, stream: bool) -> None:
    """All that a page may send without asking first, and what no page sends but is not JSON."""
    foreign = (
        None, "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x", "text/xml", "application/xml", "text/json",
        "application/octet-stream", "text/plain; application/json", "application/json, text/plain",
        "x", "",
    )  # fmt: skip
    ours = ("application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json")
    prompt = "messages" if "chat" in path else "prompt"
    body = json.dumps({prompt: json.loads(BODY)[prompt], "stream": stream}).encode()

    async def post(client: Client, kind: str | None) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "" if kind is None else f"Content-Type: {kind}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1]), answer

    async def use(client: Client) -> None:
        for kind in foreign:
            status, answer = await post(client, kind)
            assert (status, b"Content-Type: application/json`" in answer) == (415, True), kind
            assert (b"`curl -d`" in answer) == (kind == "application/x-www-form-urlencoded")
        assert client.gateway.works == []
        for kind in ours:
            assert (await post(client, kind))[0] == 200, kind

    assert len(run(use).works) == len(ours)


def test_what_has_no_body_or_no_route_needs_no_type() -> None:
    async def use(client: Client) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.get(client.url + "/v1/models") as response:
                assert response.status == 200
            for path, status in (("/nothing", 404), ("/v1/models", 405)):
                async with session.post(client.url + path, data=b"x") as response:
                    assert response.status == status
            untyped = {"skip_auto_headers": ["Content-Type"]}
            for path, status in (
                (f"/v1/responses/resp_{'0' * 32}/cancel", 404),
                ("/v1/completions", 400),
            ):
                async with session.post(client.url + path, **untyped) as response:
                    assert response.status == status

    run(use)

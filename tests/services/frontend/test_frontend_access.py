"""Request ids, API keys, foreign origins, and what the server says about itself."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from support.frontend.frontend_scripted import Client, rejected, run, say

from penstock.client.gateway_interface import Readiness, ServedModel
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.messages.membership import ProcessMetrics
from penstock.services.frontend.app import OPEN_ROUTES, routes
from penstock.services.frontend.dialects.registry import BUILT_IN

TEXT = "/v1/completions"
ONE = {"prompt": "x"}
KEYS = ServerConfig(api_key=["key-one", "key-two"])


def test_a_harmless_request_id_is_echoed_on_every_kind_of_answer() -> None:
    async def use(client: Client) -> None:
        headers = {"x-request-id": "Abc_1-2"}
        for path in ("/live", "/nothing", "/v1/models", "/v1/completions"):
            _, _, response = await client.get(path, headers=headers)
            assert response.headers["x-request-id"] == "Abc_1-2"
        for body in (ONE, {**ONE, "n": -1}):
            _, _, response = await client.post(TEXT, body, headers=headers)
            assert response.headers["x-request-id"] == "Abc_1-2"
        async with client.session.post(
            client.url + TEXT, json={**ONE, "stream": True}, headers=headers
        ) as response:
            assert response.headers["x-request-id"] == "Abc_1-2"
            await response.read()

    run(use)


def test_any_other_request_id_is_replaced_by_a_fresh_one() -> None:
    async def use(client: Client) -> None:
        seen = set()
        for given in ("", "a b", "x" * 129, "host:80", "é", "a/b", None):
            headers = {} if given is None else {"x-request-id": given}
            _, _, response = await client.get("/live", headers=headers)
            seen.add(response.headers["x-request-id"])
        assert len(seen) == 7
        assert all(one.startswith("req-") for one in seen)

    run(use)


def test_answers_do_not_name_the_software_below() -> None:
    async def use(client: Client) -> None:
        _, _, response = await client.get("/live")
        assert response.headers["Server"] == "penstock"

    run(use)


NO_KEYS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer "},
    {"Authorization": "Basic key-one"},
    {"Authorization": "Bearer key-one x"},
    {"x-api-key": "key-on"},
    {"x-api-key": "KEY-ONE"},
    {"Authorization": "Bearer é"},
]


@pytest.mark.parametrize("each", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_without_a_valid_key_every_route_but_the_probes_is_a_401(each: int) -> None:
    """Every method of every path without any key, and with so many of the wrong ones: with one, the
    next path has another, and each has many paths."""
    wrong = itertools.cycle(NO_KEYS[1:])

    async def use(client: Client) -> None:
        paths = {path.replace("{model:.+}", "x") for _, path, _ in routes(BUILT_IN)}
        odd = {
            "/nothing",
            "//v1/models",
            "/v1/../v1/models",
            "/V1/models",
            "/live/",
            "/v1%2fmodels",
        }
        assert len(paths) > 3 * len(NO_KEYS)
        tried = [
            (path, headers)
            for path in sorted(paths | odd)
            for headers in (NO_KEYS[0], *itertools.islice(wrong, each))
        ]
        for (path, headers), method in itertools.product(tried, ("GET", "POST", "HEAD", "OPTIONS")):
            async with client.session.request(
                method, client.url + path, headers=headers
            ) as response:
                if path in OPEN_ROUTES and method in ("GET", "HEAD"):
                    assert response.status == 200, (method, path, headers)
                else:
                    assert response.status == 401, (method, path, headers)
                assert "x-request-id" in response.headers

    assert run(use, config=KEYS).works == []


def test_each_of_the_keys_opens_as_bearer_or_as_x_api_key() -> None:
    async def use(client: Client) -> None:
        for key in KEYS.api_key:
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                status, _, _ = await client.post(TEXT, ONE, headers=headers)
                assert status == 200
        status, answer, response = await client.post(TEXT, ONE)
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
        assert response.headers["WWW-Authenticate"] == "Bearer"

    run(use, config=KEYS)


def test_a_page_of_another_origin_is_refused_and_one_of_this_host_is_not() -> None:
    async def use(client: Client) -> None:
        for origin in ("http://evil.example", "null", "http://[bad", f"{client.url}1", ""):
            status, answer, _ = await client.post(TEXT, ONE, headers={"Origin": origin})
            assert status == 403, origin
            assert answer["error"]["code"] == "foreign_origin"
        status, _, response = await client.post(TEXT, ONE, headers={"Origin": client.url})
        assert status == 200
        assert "Access-Control-Allow-Origin" not in response.headers

    assert len(run(use).works) == 1


def test_models_are_listed_under_every_name_and_found_with_an_encoded_slash() -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.get("/v1/models")
        assert status == 200
        assert answer["object"] == "list"
        assert [card["id"] for card in answer["data"]] == ["org/model", "alias"]
        assert answer["data"][1]["root"] == "org/model"
        assert answer["data"][0]["max_model_len"] == 64
        from yarl import URL

        for path in ("/v1/models/org%2Fmodel", "/v1/models/org/model", "/v1/models/alias"):
            url = URL(client.url + path, encoded=True)
            async with client.session.get(url) as response:
                assert response.status == 200, path
                card = await response.json()
                assert card["object"] == "model"
        status, answer, _ = await client.get("/v1/models/none")
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"

    run(use)


def test_live_speaks_for_the_process_and_ready_for_the_system() -> None:
    async def use(client: Client) -> None:
        for path in ("/health", "/ready"):
            status, answer, _ = await client.get(path)
            assert (status, answer["ready"]) == (200, True)
        client.gateway.readiness = Readiness(False, {"engine": "loading 45%", "tokenizer": "ready"})
        for path in ("/health", "/ready"):
            status, answer, _ = await client.get(path)
            assert status == 503
            assert answer["parts"]["engine"] == "loading 45%"
        client.gateway.readiness = Readiness(True, {})
        client.gateway.is_draining = True
        status, answer, _ = await client.get("/ready")
        assert (status, answer["status"]) == (503, "draining")
        status, answer, _ = await client.get("/live")
        assert (status, answer["status"]) == (200, "live")

    run(use)


def test_the_version_is_told() -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.get("/version")
        assert status == 200
        assert answer["version"].count(".") == 2

    run(use)


def test_metrics_render_the_snapshot_of_all_processes() -> None:
    async def use(client: Client) -> None:
        for incarnation in (7, 8):
            other = Registry()
            other.inc("http_requests_total", "/live", "200", amount=10)
            client.gateway.others.append(ProcessMetrics("frontend", incarnation, other.report()))
        await client.get("/live")
        status, text, response = await client.get("/metrics")
        assert status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b'penstock_http_requests_total{route="/live",status="200"} 21.0\n' in text

    run(use)


def test_paths_and_methods_of_clients_make_no_new_series() -> None:
    async def use(client: Client) -> None:
        for method in ("PATCH", "PROPFIND", "LOCK", "DELETE", "PUT"):
            async with client.session.request(method, client.url + "/live") as response:
                assert response.status == 405
        for number in range(30):
            await client.get(f"/p{number}")
            await client.get(f"/v1/models/m{number}")
        _, text, _ = await client.get("/metrics")
        series = [line for line in text.splitlines() if b"http_requests_total{" in line]
        assert len(series) == 3, series

    run(use)


def test_metrics_that_nobody_can_tell_are_a_503() -> None:
    async def use(client: Client) -> None:
        async def metrics() -> Any:
            from penstock.client.gateway_interface import Overloaded

            raise Overloaded(rejected(503, "the router is gone", kind="server_error"))

        client.gateway.metrics = metrics  # type: ignore[method-assign]
        status, answer, _ = await client.get("/metrics")
        assert (status, answer["error"]["message"]) == (503, "the router is gone")

    run(use)


def test_two_servers_can_share_one_listening_socket() -> None:
    import socket

    import aiohttp
    from support.frontend.frontend_scripted import ScriptedGateway

    from penstock.services.frontend.app import make_app, start

    async def main() -> None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        runners = []
        for one in (sock, sock.dup()):
            gateway = ScriptedGateway()
            runners.append(await start(make_app(ServerConfig(), gateway, gateway.registry), one))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/live") as response:
                assert response.status == 200
            await runners[0].cleanup()
        async with (
            aiohttp.ClientSession() as second,
            second.get(f"http://127.0.0.1:{port}/live") as response,
        ):
            assert response.status == 200
        await runners[1].cleanup()

    asyncio.run(main())


def test_a_model_with_many_aliases_is_still_named_in_bounds() -> None:
    async def use(client: Client) -> None:
        names = [f"alias-{number}" for number in range(200)]
        client.gateway.served = [ServedModel("m", names, 64, 100)]
        status, answer, _ = await client.post(TEXT, {**ONE, "model": "none"})
        assert status == 404
        assert len(answer["error"]["message"]) < 400

    run(use)


def test_whatever_a_client_expects_it_is_answered() -> None:
    async def use(client: Client) -> None:
        body = b'{"prompt":"x"}'
        for path in (TEXT, "/nothing"):
            for expectation in (b"100-continue", b"a miracle"):
                reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
                writer.write(
                    b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: %b\r\n"
                    b"Content-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (path.encode(), expectation, len(body), body)
                )
                answer = await reader.read()
                writer.close()
                asked = answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
                assert asked == (expectation == b"100-continue")
                assert b"x-request-id: req-" in answer
                assert (b"HTTP/1.1 200 OK" in answer) == (path == TEXT)

    run(use, say("yes"))


def test_the_keys_of_a_file_open_and_one_with_a_comma_does_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may call\nof,ann\nof-bob # until May\n")
    path.chmod(0o600)
    config = ServerConfig(api_key=[f"file:{path}", "of,carl"])

    async def use(client: Client) -> None:
        for key, status in (
            ("of,ann", 200), ("of-bob", 200), ("of,carl", 200), ("of", 401), (f"file:{path}", 401),
        ):  # fmt: skip
            got, _, _ = await client.get("/v1/models", headers={"x-api-key": key})
            assert got == status, key

    run(use, config=config)

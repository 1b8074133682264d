"""The playground's page, and the data that it shows, over HTTP."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from support.frontend.frontend_scripted import Client, ScriptedGateway, serving

import penstock.services.frontend
from penstock.client.gateway_interface import Readiness
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.sampling import PARAMETERS, parse_field
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, ProcessMetrics
from penstock.services.frontend.playground import FILES, UNSEEN

PAGE = Path(penstock.services.frontend.__file__).with_name("page")
MAX_BYTES = 130_000
MAX_LIBRARY_BYTES = 60_000
LIBRARY = {"marked.js", "marked-license.txt"}
KEYS = ServerConfig(api_key=["key-one"])
PATHS = ["/", *(f"/playground/{name}" for name in FILES if name != "index.html")]


class ShownGateway(ScriptedGateway):
    """A scripted gateway with members."""

    def __init__(self) -> None:
        super().__init__()
        self.peers: list[Peer] = []

    def members(self) -> list[Peer]:
        return self.peers


def peer(service: str, incarnation: int, **fields: Any) -> Peer:
    identity = Identity(1000 + incarnation, "host", fields.pop("engine", ""))
    phase, note = fields.pop("phase", "ready"), fields.pop("note", "")
    return Peer(service, "ipc://x", incarnation, identity, phase, note, Capacity(), 0)


def use(
    check: Any, gateway: ShownGateway | None = None, config: ServerConfig | None = None
) -> None:
    async def main() -> None:
        async with serving(gateway or ShownGateway(), config) as client:
            async with asyncio.timeout(60):
                await check(client)

    asyncio.run(main())


def test_the_page_is_small_and_every_file_of_it_is_served() -> None:
    on_disk = {path.name: path.stat().st_size for path in PAGE.iterdir() if path.is_file()}
    assert set(on_disk) == set(FILES)
    library = sum(on_disk[name] for name in LIBRARY)
    assert library < MAX_LIBRARY_BYTES
    assert sum(on_disk.values()) - library < MAX_BYTES


def test_the_page_and_its_files_come_without_a_key_and_forbid_all_that_is_not_theirs() -> None:
    async def check(client: Client) -> None:
        for path in PATHS:
            status, body, response = await client.get(path)
            name = path.rpartition("/")[2] or "index.html"
            assert status == 200
            assert body == (PAGE / name).read_bytes()
            policy = dict(
                part.strip().split(" ", 1)
                for part in response.headers["Content-Security-Policy"].split(";")
            )
            assert policy["default-src"] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert policy["frame-ancestors"] == "'none'"
            sources = {v for k, v in policy.items() if k.endswith("-src") and k != "default-src"}
            assert sources == {"'self'"}
            assert response.headers["X-Content-Type-Options"] == "nosniff"

    use(check, config=KEYS)


def test_each_file_has_its_media_type() -> None:
    async def check(client: Client) -> None:
        for path, kind in (
            ("/", "text/html"),
            ("/playground/main.js", "text/javascript"),
            ("/playground/base.css", "text/css"),
            ("/playground/icon.svg", "image/svg+xml"),
            ("/playground/marked-license.txt", "text/plain"),
        ):
            _, _, response = await client.get(path)
            assert response.content_type == kind

    use(check)


def test_a_file_that_the_browser_has_already_is_not_sent_again() -> None:
    async def check(client: Client) -> None:
        _, _, first = await client.get("/playground/main.js")
        etag = first.headers["ETag"]
        status, body, _ = await client.get("/playground/main.js", headers={"If-None-Match": etag})
        assert (status, body) == (304, b"")
        other = {"If-None-Match": '"another"'}
        status, body, _ = await client.get("/playground/main.js", headers=other)
        assert status == 200 and body

    use(check)


@pytest.mark.parametrize(
    "path",
    [
        "/playground/index.html",
        "/playground/",
        "/playground/missing.js",
        "/playground/%2e%2e/playground.py",
        "/playground/..%2fplayground.py",
        "/playground/%2fetc%2fpasswd",
        "/playground/main.js%00",
    ],
)
def test_any_other_name_is_a_404(path: str) -> None:
    async def check(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        answer = await reader.read()
        writer.close()
        assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), answer

    use(check)


def test_no_script_or_style_stands_in_the_page_itself_and_nothing_comes_from_elsewhere() -> None:
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""]
    assert not re.search(r"(?:src|href)=\"(?:\w+:|//)", html)
    for path in PAGE.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc",
            path.read_text(),
        ), path.name
    for path in PAGE.glob("*.css"):
        assert not re.search(r"url\(|@import", path.read_text()), path.name


def test_the_data_routes_want_the_key() -> None:
    async def check(client: Client) -> None:
        for path in ("/playground/schema", "/playground/status"):
            assert (await client.get(path))[0] == 401
            assert (await client.get(path, headers={"x-api-key": "key-one"}))[0] == 200

    use(check, config=KEYS)


def test_the_schema_has_every_sampling_parameter_with_its_help_and_its_bounds() -> None:
    async def check(client: Client) -> None:
        _, schema, _ = await client.get("/playground/schema")
        properties = schema["properties"]
        assert list(properties) == [name for name in PARAMETERS if name not in UNSEEN]
        assert all(one["description"] for one in properties.values())
        assert properties["temperature"]["type"] == "number"
        assert properties["stop"]["type"] == "array"
        assert properties["ignore_eos"]["type"] == "boolean"
        for name, one in properties.items():
            if one.get("type") not in ("number", "integer"):
                continue
            parse_field(name, one["maximum"])
            if "minimum" in one:
                parse_field(name, one["minimum"])
            with pytest.raises(ValueError, match="is allowed"):
                parse_field(name, one.get("minimum", one.get("exclusiveMinimum")) - 1)

    use(check)


def test_the_status_sums_the_living_and_counts_the_dead_ones_tokens() -> None:
    gateway = ShownGateway()
    first, second, dead = Registry(), Registry(), Registry()
    for registry, running, waiting, used in ((first, 2, 5, 10), (second, 1, 0, 4)):
        registry.set("requests_running", running)
        registry.set("requests_waiting", waiting, "new")
        registry.set("queue_depth", waiting, "scheduler")
        registry.set("kv_blocks_used", used)
        registry.set("kv_blocks", 100)
        registry.counter("generation_tokens_total").value = 1000
        registry.counter("prefix_cache_query_tokens_total").value = 40
        registry.counter("prefix_cache_hit_tokens_total").value = 16
    dead.set("requests_running", 50)
    dead.set("engine_info", 1, "cpu", "float32")
    first.set("engine_info", 1, "NVIDIA H200", "bfloat16")
    second.set("engine_info", 1, "NVIDIA H200", "bfloat16")
    dead.counter("generation_tokens_total").value = 7
    tokenizer = Registry()
    tokenizer.set("queue_depth", 3, "tokenizer")
    gateway.others = [
        ProcessMetrics("scheduler", 7, first.report()),
        ProcessMetrics("scheduler", 8, second.report()),
        ProcessMetrics("scheduler", 0, dead.report()),
        ProcessMetrics("tokenizer", 5, tokenizer.report()),
    ]
    gateway.peers = [
        peer("worker", 9, engine="0", phase="loading", note="reading weights 45%"),
        peer("scheduler", 8, engine="1"),
        peer("scheduler", 7, engine="0"),
        peer("router", 3),
        peer("tokenizer", 5),
        peer("frontend", 1),
        peer("launcher", 2),
    ]

    async def check(client: Client) -> None:
        gateway.registry.set("queue_depth", 11, "frontend")
        _, status, _ = await client.get("/playground/status")
        assert status["running"] == 3
        assert status["waiting"] == 5 + 3
        assert (status["kv_blocks_used"], status["kv_blocks_total"]) == (14, 200)
        assert status["generation_tokens"] == 2007
        assert (status["devices"], status["dtypes"]) == (["NVIDIA H200"], ["bfloat16"])
        assert status["prefix_cache_query_tokens"] == 80
        assert status["prefix_cache_hit_tokens"] == 32
        assert status["models"] == [{"name": "org/model", "max_model_len": 64}]
        rows = [(one["service"], one["pid"], one["load"]) for one in status["processes"]]
        assert rows == [
            ("frontend", 1001, 11),
            ("tokenizer", 1005, 3),
            ("router", 1003, 0),
            ("scheduler", 1007, 7),
            ("scheduler", 1008, 1),
            ("worker", 1009, 0),
            ("launcher", 1002, 0),
        ]
        worker = status["processes"][5]
        assert (worker["phase"], worker["note"]) == ("loading", "reading weights 45%")

    use(check, gateway)


def test_the_status_says_what_is_missing_while_the_server_is_not_ready() -> None:
    gateway = ShownGateway()
    gateway.readiness = Readiness(False, {"router": "ready", "engine": "absent"})
    gateway.served = []
    gateway.is_draining = True

    async def check(client: Client) -> None:
        code, status, _ = await client.get("/playground/status")
        assert code == 200
        assert status["ready"] is False
        assert status["parts"] == {"router": "ready", "engine": "absent"}
        assert status["models"] == []
        assert (status["devices"], status["dtypes"]) == ([], [])
        assert status["running"] == 0
        assert status["draining"] is True

    use(check, gateway)

"""The fields of the APIs that clients reach: addresses, keys, limits, TLS, proxies."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="Address that the HTTP server listens on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="HTTP port; 0 takes a free one and prints it.")
    ] = 8000
    uds: Annotated[
        str,
        Meta(
            description="Path of a UNIX socket that HTTP is served on, in place of --host and "
            "--port."
        ),
    ] = ""
    uds_mode: Annotated[
        str,
        Meta(
            pattern="^[0-7]{3}$",
            description="Permissions of that socket, in octal: who may write to it may connect.",
        ),
    ] = "600"
    tls_cert: Annotated[
        str,
        Meta(
            description="File of the certificates (PEM) that HTTP and gRPC are served with, over "
            "TLS; read again when it changes."
        ),
    ] = ""
    tls_key: Annotated[str, Meta(description="File of the private key (PEM) of --tls-cert.")] = ""
    root_path: Annotated[
        str,
        Meta(
            description="Path (/llm) below which a proxy serves the API, where the proxy leaves "
            "it in what it passes on."
        ),
    ] = ""
    trusted_proxies: Annotated[
        list[str],
        Meta(
            description="Addresses and networks (10.0.0.0/8) of proxies whose X-Forwarded-For says "
            "who asks; unix: whoever connects to --uds."
        ),
    ] = []
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Serve gRPC as well, on this port; 0 takes a free one and prints it."),
    ] = None
    grpc_uds: Annotated[
        str,
        Meta(
            description="Path of a UNIX socket that gRPC is served on, in place of a port; with "
            "one frontend."
        ),
    ] = ""
    grpc_host: Annotated[
        str, Meta(description="Address that gRPC listens on; by default that of --host.")
    ] = ""
    grpc_tokenizer: Annotated[
        str,
        Meta(
            description="Folder of tokenizer files that gateways may fetch over gRPC; serve names "
            "its model's."
        ),
    ] = ""
    api_key: Annotated[
        list[str],
        Meta(
            description="A key that clients may use, or file:PATH for a file with one key a line."
        ),
    ] = []
    keys_file: Annotated[
        str,
        Meta(
            description="A file of clients' keys with names, roles and limits, as `penstock keys` "
            "makes it; a change is taken without a restart."
        ),
    ] = ""
    insecure: Annotated[
        bool, Meta(description="Serve without an API key on an address that other hosts reach.")
    ] = False
    published_host: Annotated[
        str,
        Meta(description="Address at which a proxy publishes a port that nothing else reaches."),
    ] = ""
    expected_models: Annotated[
        list[str],
        Meta(
            description="Models that /ready waits for before they were ever ready; serve names "
            "its own."
        ),
    ] = []
    allowed_origins: Annotated[
        list[str],
        Meta(description="Origins (https://HOST[:PORT]) whose web pages may call the API (CORS)."),
    ] = []
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=2**31 - 1, description="Largest request body; a larger one gets 413.")
    ] = 8 * 1024 * 1024
    response_store: Annotated[
        str,
        Meta(
            description="Where /v1/responses keeps responses: memory (of each frontend; several "
            "that serve starts share a folder that ends with it), off, a folder or a server "
            "(valkey://HOST:PORT/DB, redis://, file:PATH with the URL in it), which all "
            "share."
        ),
    ] = "memory"
    response_store_bytes: Annotated[
        int,
        Meta(
            ge=1024 * 1024,
            le=2**45,
            description="Most bytes of all kept responses: beyond them the client that holds the "
            "most loses its oldest. On a Valkey or Redis server: most bytes of one response.",
        ),
    ] = 256 * 1024 * 1024
    limits_url: Annotated[
        str,
        Meta(
            description="A Valkey or Redis server (valkey://HOST:PORT/DB, redis://, file:PATH with "
            "the URL in it) that counts the limits of keys for all frontends; without one each "
            "frontend lets in an equal part."
        ),
    ] = ""
    request_timeout_s: Annotated[
        float,
        Meta(gt=0.0, le=86_400.0, description="Most time for a request, until its last token."),
    ] = 3600.0
    keep_alive_comment_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=3600.0,
            description="Send a comment this often on a stream that has nothing to say.",
        ),
    ] = 10.0

    @property
    def has_grpc(self) -> bool:
        """Whether gRPC is served."""
        return self.grpc_port is not None or bool(self.grpc_uds)

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_key or self.keys_file)

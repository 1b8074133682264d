"""gRPC over TLS, with the certificates of HTTP."""

from __future__ import annotations

import grpc

from penstock.services.frontend.tls import Certificates, Pair


def credentials_of(certificates: Certificates) -> grpc.ServerCredentials:
    """With whatever pair the certificates have at the time of a handshake."""
    given = certificates.pair

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """The pair, if it is another one; asked at each handshake, in a thread of gRPC's."""
        nonlocal given
        certificates.look()
        found = certificates.pair
        if found is given:
            return None
        given = found
        return _configuration(found)

    # What it is typed for leaves out that None means no change.
    return grpc.dynamic_ssl_server_credentials(_configuration(given), changed)  # type: ignore[arg-type]


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])

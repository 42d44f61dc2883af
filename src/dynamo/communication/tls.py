"""TLS contexts made from PEM files."""

from __future__ import annotations

import ssl

from dynamo.communication.options import TlsFiles
from dynamo.core.errors import ConfigError


def mutual_tls_contexts(tls: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts for listening and dialling between Dynamo processes.

    Each end must show a certificate signed by the deployment's CA. Host names are not checked.
    Blocks. Raises `ConfigError`.
    """
    if not (tls.ca and tls.cert and tls.key):
        raise ConfigError(
            "TLS between processes is mutual and needs a CA, a certificate and a key",
            hint="set security.tls_ca, security.tls_cert and security.tls_key",
        )
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    for context in (server_context, client_context):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        _load_certificates(context, tls)
    return server_context, client_context


def client_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the context for dialling a server, whose host name is checked.

    Trusts `tls.ca` alone if it is set, else the system's CAs. Blocks. Raises `ConfigError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls.ca else ssl.create_default_context()
    _load_certificates(context, tls)
    return context


def _load_certificates(context: ssl.SSLContext, tls: TlsFiles) -> None:
    try:
        if tls.ca:
            context.load_verify_locations(tls.ca)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot load the certificate files {tls.ca!r}, {tls.cert!r}, {tls.key!r}: {error}",
            hint="name PEM files that this process may read",
        ) from None

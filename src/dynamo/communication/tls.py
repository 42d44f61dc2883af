"""TLS contexts out of PEM files."""

from __future__ import annotations

import ssl

from dynamo.communication.options import TlsFiles
from dynamo.core.errors import ConfigError


def mutual_tls_contexts(tls: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For listening and for dialling between our own processes: each end shows a certificate that
    the deployment's own CA signed; names are not compared, being signed by it is what counts.
    Blocks. Raises `ConfigError`."""
    if not (tls.ca and tls.cert and tls.key):
        raise ConfigError(
            "TLS between processes is mutual",
            hint="set security.tls_ca, security.tls_cert and security.tls_key",
        )
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialling.check_hostname = False
    for context in (listening, dialling):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        _load_certificates(context, tls)
    return listening, dialling


def client_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """For dialling a server whose name its certificate bears, signed by `ca` alone; without it, by
    whom the system trusts. Blocks. Raises `ConfigError`."""
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
            f"certificate files {tls.ca!r}, {tls.cert!r}, {tls.key!r}: {error}",
            hint="PEM files that this process may read",
        ) from None

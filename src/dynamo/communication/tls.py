"""TLS contexts made from PEM files."""

from __future__ import annotations

import ssl
from pathlib import Path

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


_PEM_HINT = "name PEM files that this process may read, and a key without a password"


def client_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the context for dialling a server, whose host name is checked.

    Trusts `tls.ca` alone if it is set, else the system's CAs. Blocks. Raises `ConfigError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls.ca else ssl.create_default_context()
    _load_certificates(context, tls)
    return context


def _load_certificates(context: ssl.SSLContext, tls: TlsFiles) -> None:
    for path in filter(None, (tls.ca, tls.cert, tls.key)):
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"cannot read {path!r}: {error.strerror}", hint=_PEM_HINT) from None
    what = f"the CA {tls.ca!r}"
    try:
        if tls.ca:
            context.load_verify_locations(tls.ca)
        what = f"the certificate {tls.cert!r} with the key {tls.key!r}"
        if tls.cert:
            # Without a password, OpenSSL would ask for that of an encrypted key, and wait.
            context.load_cert_chain(tls.cert, tls.key or None, password="")
    except (OSError, ssl.SSLError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            message = f"the key {tls.key!r} is not that of the certificate {tls.cert!r}"
            raise ConfigError(
                message, hint="name the key that the certificate was made for"
            ) from None
        raise ConfigError(f"cannot load {what}: {error}", hint=_PEM_HINT) from None

"""Why a server could not be reached, and what to do about it."""

from __future__ import annotations

from dynamo_client.config import Origin
from dynamo_client.errors import DynamoCertificateError, DynamoConnectionError

START_SERVER_HINT = "is a server running there? `dynamo run` starts one"
TRUST_CERTIFICATE_HINT = (
    "SSL_CERT_FILE=FILE.pem names the certificates to trust beside the system's"
)


def unreachable_error(url: str, origin: Origin, error: OSError) -> DynamoConnectionError:
    """The error of a connection that was not made."""
    if origin.secure:
        from ssl import SSLCertVerificationError

        if isinstance(error, SSLCertVerificationError):
            return DynamoCertificateError(
                f"the certificate of {url} is not trusted: {error.verify_message}",
                hint=TRUST_CERTIFICATE_HINT,
            )
    message = f"cannot connect to {url}: {error or 'it takes too long'}"
    return DynamoConnectionError(message, hint=_proxy_hint(origin) or START_SERVER_HINT)


def _proxy_hint(origin: Origin) -> str:
    """Others may come there through a proxy that the environment names; this client does not."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    scheme = "https" if origin.secure else "http"
    name = scheme if scheme in proxies else "all"
    if name not in proxies or proxy_bypass(origin.host):
        return ""
    return f"{name}_proxy is set, but this client connects directly: it goes through no proxy"

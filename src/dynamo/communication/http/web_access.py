"""The web pages that may call a server, recognised by Host, Origin and Sec-Fetch-Site.

A browser sends requests of any page to any address, loopback too. The header `Origin` names the
page, but is missing in some requests, such as those for images and for the page's own server. A
page whose DNS name was changed to this server's address (DNS rebinding) is recognised by `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Self

from dynamo.communication.addresses import is_loopback
from dynamo.communication.http.request import Request
from dynamo.core.errors import Forbidden
from dynamo.core.settings.schema import ServerSettings

ANY = "*"
LOOPBACK_ORIGINS = "loopback"
MAX_ACCEPTED_HOSTS = 256
MAX_SHOWN_CHARS = 100
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[a-z0-9._-]*)(:\d{0,5})?")
_LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")


class WebAccess:
    """The rules of one listener. `check` raises `Forbidden` for requests of unknown web pages.

    - Host: with `checks_hosts`, clients use an IP address, localhost, a name without a dot (no
      public DNS name is one), or one of `allowed_hosts`.
    - Origin: one of `origins`, or the server's own origin.
    - Other pages may link to the server, but neither embed nor send anything.
    """

    def __init__(
        self,
        origins: Sequence[str],
        allowed_hosts: Sequence[str],
        *,
        checks_hosts: bool,
        needs_key: bool = False,
    ) -> None:
        self.any_origin = ANY in origins
        self._loopback_origins = LOOPBACK_ORIGINS in origins
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._checks_hosts = checks_hosts and ANY not in self._allowed_hosts
        self._needs_key = needs_key
        self._accepted_hosts: set[bytes] = set()

    @classmethod
    def of_api(cls, listen_host: str, server: ServerSettings) -> Self:
        """Return the rules of a listener that asks for `server.api_keys`, if there are any."""
        needs_key = bool(server.api_keys)
        checks_hosts = bool(server.allowed_hosts) or (is_loopback(listen_host) and not needs_key)
        origins, hosts = server.cors_origins, server.allowed_hosts
        return cls(origins, hosts, checks_hosts=checks_hosts, needs_key=needs_key)

    @classmethod
    def of_status_port(cls, listen_host: str, server: ServerSettings) -> Self:
        """Return the rules of a status port, which asks for no key."""
        return cls(server.cors_origins, server.allowed_hosts, checks_hosts=is_loopback(listen_host))

    def check(self, request: Request) -> None:
        """Raise `Forbidden` for a request that an unknown web page may have sent."""
        headers = request.headers
        host = headers.get(b"host", b"")
        if host not in self._accepted_hosts:
            self._check_host(host)
        if b"origin" in headers:
            if not self.allows_origin(headers[b"origin"], host):
                raise Forbidden(
                    f"web pages of {_show(headers[b'origin'])} may not call this server",
                    hint="server.cors_origins lists the origins that may",
                )
        elif headers.get(b"sec-fetch-site") == b"cross-site":
            self._check_cross_site(request)

    def allows_origin(self, origin: bytes, host: bytes) -> bool:
        """Return whether pages of `origin` may call the server, which they address by `host`."""
        text = origin.decode("latin-1").lower()
        return (
            self.any_origin
            or text in self._origins
            or (self._loopback_origins and bool(_LOOPBACK_ORIGIN.fullmatch(text)))
            or self._is_own_origin(text, host.decode("latin-1").lower())
        )

    def _is_own_origin(self, origin: str, host: str) -> bool:
        if not host or origin not in (f"http://{host}", f"https://{host}"):
            return False
        name = _host_name(host)
        return self._is_certain(name) or (self._needs_key and not self._checks_hosts)

    def _check_host(self, host: bytes) -> None:
        if self._checks_hosts and host:
            name = _host_name(host.decode("latin-1").lower())
            if not name or ("." in name and not self._is_certain(name)):
                raise Forbidden(
                    f"the host name {_show(host)} is not in server.allowed_hosts",
                    hint="call the server by IP address or localhost, or add the name",
                )
        if len(self._accepted_hosts) >= MAX_ACCEPTED_HOSTS:
            self._accepted_hosts.clear()
        self._accepted_hosts.add(host)

    def _is_certain(self, name: str) -> bool:
        """Return whether no page of a foreign site can have this host name."""
        return (
            name == "localhost"
            or name.endswith(".localhost")
            or name in self._allowed_hosts
            or ANY in self._allowed_hosts
            or _is_ip_address(name)
        )

    def _check_cross_site(self, request: Request) -> None:
        headers = request.headers
        is_link = (
            request.method in ("GET", "HEAD")
            and headers.get(b"sec-fetch-mode") == b"navigate"
            and headers.get(b"sec-fetch-dest") == b"document"
        )
        if not is_link and not self.any_origin:
            raise Forbidden(
                "web pages of other sites may link to this server and not embed or send anything",
                hint="server.cors_origins lists the origins that may, with fetch in mode cors",
            )


def _host_name(host: str) -> str:
    """Return the name in a lower-case Host header without port and brackets; "" if malformed."""
    match = _HOST.fullmatch(host)
    return match[1].strip("[]") if match else ""


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _show(value: bytes) -> str:
    return repr(value[:MAX_SHOWN_CHARS].decode("latin-1"))

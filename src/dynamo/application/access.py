"""API keys, cross-origin headers (CORS), and what keeps callers apart."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping, Sequence

from msgspec.structs import replace

from dynamo.application.exchange import Exchange
from dynamo.application.http_errors import Headers
from dynamo.application.routes import Route
from dynamo.communication.http import HeaderCheck, Request, WebAccess
from dynamo.core.errors import Unauthorized
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.text import TextOptions

PREFLIGHT_HEADERS: Headers = (
    ("access-control-allow-methods", "GET, POST, DELETE, OPTIONS"),
    ("access-control-max-age", "86400"),
)
SALT_BYTES = 16
EXPOSED_HEADERS = "x-request-id, x-dynamo-worker, x-dynamo-prefill-worker, retry-after"


def caller_key(request: Request) -> str:
    """Return the key of a request, a bearer token or x-api-key; "" without one."""
    scheme, _, key = (request.header(b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.header(b"x-api-key") or ""
    return key.strip()


class ApiKeys:
    """The accepted keys; without any, every request is accepted.

    Keys are compared by digest, so that response times reveal nothing about a key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = {_digest(key) for key in keys}
        self.required = bool(keys)
        self.are_several = len(self._digests) > 1

    def owner(self, request: Request) -> str:
        """Return a digest of the caller's key; without keys, all callers are the same one."""
        return _digest(caller_key(request)).hex() if self.required else ""

    def check(self, request: Request) -> None:
        """Raise `Unauthorized` unless the request carries a known key."""
        key = caller_key(request)
        if not key:
            raise Unauthorized(
                "the request has no API key",
                hint="send the header Authorization: Bearer KEY, or x-api-key: KEY",
            )
        if _digest(key) not in self._digests:
            raise Unauthorized("the API key is unknown")

    def check_headers(self, request: Request) -> None:
        """Raise `Unauthorized` before the body of a request without a known key is received."""
        headers = request.headers
        if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
            self.check(request)

    def protect_routes(
        self, table: Mapping[str, Mapping[str, Route]]
    ) -> dict[str, dict[str, Route]]:
        """Return the same routes behind the key check."""
        return {
            path: {method: self._protected(route) for method, route in methods.items()}
            for path, methods in table.items()
        }

    def _protected(self, route: Route) -> Route:
        if not self._digests:
            return route

        def checked(exchange: Exchange) -> Awaitable[object]:
            self.check(exchange.request)
            return route(exchange)

        return checked


def make_header_check(web_access: WebAccess, keys: ApiKeys) -> HeaderCheck:
    """Return the check of web pages and keys that runs before a request's body is received."""
    if not keys.required:
        return web_access.check

    def check_headers(request: Request) -> None:
        web_access.check(request)
        keys.check_headers(request)

    return check_headers


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Cors:
    """The headers by which browsers let web pages read answers."""

    def __init__(self, web_access: WebAccess) -> None:
        self._web_access = web_access

    def response_headers(self, request: Request) -> Headers:
        """Return the CORS headers of an answer to a request with an Origin header."""
        exposed = ("access-control-expose-headers", EXPOSED_HEADERS)
        if self._web_access.any_origin:
            return (("access-control-allow-origin", "*"), exposed)
        origin, host = request.headers[b"origin"], request.headers.get(b"host", b"")
        if not self._web_access.allows_origin(origin, host):
            return (("vary", "origin"),)
        allowed = ("access-control-allow-origin", origin.decode("latin-1"))
        return (allowed, exposed, ("vary", "origin"))

    def preflight_headers(self, request: Request) -> Headers:
        """Return the headers that answer a browser's preflight request."""
        requested = (
            request.header(b"access-control-request-headers") or "authorization, content-type"
        )
        return (*PREFLIGHT_HEADERS, ("access-control-allow-headers", requested))


class CallerLimits:
    """Keeps callers apart. `needed` is False if only a request with a priority can need `apply`.

    - `priority` is clamped to `server.priority_range`.
    - With several API keys, the cache salt contains a digest of the caller's key. Blocks and cached
      tokens are then those of the same key. `share_cache` is `engine.share_cache`.
    - With several API keys, new structured outputs are tried in turns of the callers.
    """

    def __init__(self, server: ServerSettings, *, share_cache: bool) -> None:
        self._lowest, self._highest = server.priority_range
        self._several = len(set(server.api_keys)) > 1
        self._separates_caches = self._several and not share_cache
        self.needed = self._several or not self._lowest <= 0 <= self._highest

    def apply(self, options: TextOptions, request: Request) -> TextOptions:
        """Return the options that the caller of `request` may have."""
        priority = min(max(options.priority, self._lowest), self._highest)
        if not self._several:
            return replace(options, priority=priority)
        caller, salt = hashlib.sha256(caller_key(request).encode()), options.salt
        if self._separates_caches:
            digest = hashlib.blake2b(salt.encode(), key=caller.digest(), digest_size=SALT_BYTES)
            salt = digest.hexdigest()
        return replace(options, priority=priority, salt=salt, caller=caller.hexdigest())

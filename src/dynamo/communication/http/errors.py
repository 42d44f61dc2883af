"""Errors that only HTTP has, and the default rendering of errors."""

from __future__ import annotations

from dynamo.core.errors import ConfigError, TooLarge


class HeadersTooLarge(TooLarge):
    """The headers exceed the limits on bytes or number."""

    code = "headers_too_large"


class PortInUse(ConfigError):
    """Another socket listens on `port`."""

    code = "port_in_use"

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"port {port} on {host} is in use",
            hint="choose another with --http-port, or stop the process that holds it",
        )
        self.port = port


STATUS_BY_CODE = {
    "invalid_request": 400,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "headers_too_large": 431,
    "overloaded": 503,
}

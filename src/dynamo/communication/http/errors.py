"""What only HTTP can say."""

from __future__ import annotations

import msgspec

from dynamo.core.errors import ConfigError, DynamoError, TooLarge


class HeadersTooLarge(TooLarge):
    """More header bytes, or more headers, than the limits allow."""

    code = "headers_too_large"


class PortInUse(ConfigError):
    """Somebody else listens there. `host` and `port` say where, so that a caller may name who."""

    code = "port_in_use"

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"port {port} on {host} is in use",
            hint="choose another with --http-port, or stop the process that holds it",
        )
        self.host = host
        self.port = port


_STATUS = {
    "invalid_request": 400,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "headers_too_large": 431,
}


def plain_error(error: DynamoError, request_id: str) -> tuple[int, bytes]:
    """Status and JSON body of an error, where no application says better."""
    body = {"message": error.message, "code": error.code, "request_id": request_id}
    return _STATUS.get(error.code, 500), msgspec.json.encode({"error": body})

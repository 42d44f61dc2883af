"""The address of the server, timeouts and retries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class DynamoConfig:
    """The configuration of a client. `base_url` may end with `/v1`. `timeout` in seconds limits a
    whole reply, or each gap within a stream. A failed call is repeated up to `max_retries` times,
    after `retry_delay` seconds that double each time."""

    base_url: str = "http://localhost:8000"
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 30
    max_retries: int = 3
    retry_delay: float = 1.0


class Origin(NamedTuple):
    """The peer of a connection."""

    secure: bool
    host: str
    port: int

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default_port = DEFAULT_PORTS["https" if self.secure else "http"]
        return host if self.port == default_port else f"{host}:{self.port}"


def parse_base_url(base_url: str) -> tuple[Origin, str]:
    """Split a base URL into the origin and the prefix of every path. Raises `ValueError`."""
    text = base_url if "://" in base_url else f"http://{base_url}"
    parts = urlsplit(text)
    host = parts.hostname
    if parts.scheme not in DEFAULT_PORTS or not host or " " in host or parts.port == 0:
        raise ValueError(f"base_url {base_url!r} is not like http://localhost:8000")
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Origin(parts.scheme == "https", host, port), prefix

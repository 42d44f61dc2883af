"""Limits on what clients may send and leave unread."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from dynamo.core.settings.schema import ServerSettings


class HttpLimits(msgspec.Struct, frozen=True):
    """Limits in bytes, counts and seconds. The settings of `server` explain them.

    `min_body_rate` is the slowest upload in bytes per second that is not taken for an attack.
    `max_pipelined` requests are read ahead on one connection before reading pauses.
    """

    max_body_bytes: int = 4 << 20
    max_buffered_bytes: int = 256 << 20
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    header_timeout_s: float = 15.0
    idle_timeout_s: float = 75.0
    stream_backlog_bytes: int = 1 << 20
    stall_timeout_s: float = 60.0
    congested_after_s: float = 0.25
    linger_s: float = 2.0
    min_body_rate: int = 1024
    max_pipelined: int = 16
    send_buffer_bytes: int = 64 << 10
    notsent_lowat_bytes: int = 16 << 10
    high_water_bytes: int = 4 << 10

    @classmethod
    def without_bodies(cls, server: ServerSettings) -> HttpLimits:
        """Return the limits of a server whose routes take no body."""
        limits = cls.from_settings(server)
        return replace(limits, max_body_bytes=16 << 10, max_buffered_bytes=1 << 20)

    @classmethod
    def from_settings(cls, server: ServerSettings) -> HttpLimits:
        """Return the limits that the settings contain."""
        return cls(
            max_body_bytes=server.max_body_bytes or cls().max_body_bytes,
            max_buffered_bytes=server.max_buffered_bytes,
            max_header_bytes=server.max_header_bytes,
            max_headers=server.max_headers,
            header_timeout_s=server.header_timeout,
            idle_timeout_s=server.idle_timeout,
            stream_backlog_bytes=server.stream_backlog_bytes,
            stall_timeout_s=server.stall_s,
        )

    @property
    def timeout_check_interval_s(self) -> float:
        """Interval between checks for timeouts and silent streams."""
        shortest = min(
            self.header_timeout_s, self.idle_timeout_s, self.stall_timeout_s, self.linger_s
        )
        return min(0.5, max(0.05, shortest / 4))

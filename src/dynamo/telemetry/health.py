"""The bodies of `/health` and `/ready`, for the HTTP server and for status ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

import dynamo
from dynamo.core.clock import Clock


class HealthReport:
    """Builds health bodies with `reasons` for being unhealthy, by name, and further `facts`."""

    def __init__(
        self,
        clock: Clock,
        reasons: Callable[[], Mapping[str, str]],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._clock = clock
        self._reasons = reasons
        self._facts = facts
        self._started = clock.now()

    def body(self) -> dict[str, Any]:
        """Return the JSON body. The process is healthy if there are no reasons."""
        reasons = dict(self._reasons())
        return {
            "status": "unhealthy" if reasons else "healthy",
            "version": dynamo.__version__,
            "uptime": _uptime(self._clock.now() - self._started),
            "reasons": reasons,
            **self._facts(),
        }


def ready_answer(reason: str) -> tuple[int, bytes]:
    """Return status and body of `/ready`: 503 with the reason why requests should not come."""
    if reason:
        return 503, msgspec.json.encode({"status": "not ready", "reason": reason})
    return 200, b'{"status":"ready"}'


def _uptime(seconds: float) -> str:
    """Return hh:mm:ss. Hours may have more than two digits."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"

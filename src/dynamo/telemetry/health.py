"""What /health says, whichever port it is asked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dynamo
from dynamo.core.clock import Clock


class HealthReport:
    """`reasons`: why the process is not well, by name; `facts`: what else there is to tell."""

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
        """Its JSON; well where there are no `reasons`."""
        reasons = dict(self._reasons())
        return {
            "status": "unhealthy" if reasons else "healthy",
            "version": dynamo.__version__,
            "uptime": _uptime(self._clock.now() - self._started),
            "reasons": reasons,
            **self._facts(),
        }


def _uptime(seconds: float) -> str:
    """hh:mm:ss; hours grow beyond two digits."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"

"""/health, /live, /version, /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

import dynamo
from dynamo.application.exchange import Exchange
from dynamo.application.gateway import Gateway
from dynamo.core.clock import Clock

METRICS_TYPE = ("content-type", "text/plain; version=0.0.4; charset=utf-8")

Facts = Callable[[], Mapping[str, Any]]


class Status:
    """`reasons` says why this process is not well; `facts` adds what only others know (workers,
    planes, gpu_memory_usage); `metrics_text` renders all processes that share the port."""

    def __init__(
        self,
        gateway: Gateway,
        clock: Clock,
        *,
        active: Callable[[], int],
        reasons: Callable[[], Mapping[str, str]],
        facts: Facts,
        metrics_text: Callable[[], Awaitable[str]],
    ) -> None:
        self._gateway = gateway
        self._clock = clock
        self._active = active
        self._reasons = reasons
        self._facts = facts
        self._metrics_text = metrics_text
        self._started = clock.now()

    async def health(self, exchange: Exchange) -> None:
        """GET /health: 200 when a request would be served."""
        reasons = dict(self._reasons())
        if self._gateway.reason:
            reasons.setdefault("models", self._gateway.reason)
        body = {
            "status": "unhealthy" if reasons else "healthy",
            "version": dynamo.__version__,
            "uptime": uptime(self._clock.now() - self._started),
            "gpu_memory_usage": None,
            "active_requests": self._active(),
            "models": list(self._gateway.models),
            "reasons": reasons,
            **self._facts(),
        }
        retry = (("retry-after", "1"),) if reasons else ()
        exchange.send_json(503 if reasons else 200, msgspec.json.encode(body), retry)

    async def live(self, exchange: Exchange) -> None:
        """GET /live: the process answers."""
        exchange.send_json(200, b'{"status":"live"}')

    async def version(self, exchange: Exchange) -> None:
        """GET /version."""
        exchange.send_json(200, msgspec.json.encode({"version": dynamo.__version__}))

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics."""
        text = await self._metrics_text()
        exchange.response.send(200, (METRICS_TYPE, *exchange.headers), text.encode())


def uptime(seconds: float) -> str:
    """hh:mm:ss; hours grow beyond two digits."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"

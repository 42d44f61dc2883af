"""The HTTP surface of a router of its own: health, metrics, explanations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

import dynamo
from dynamo.application.access import Keys
from dynamo.application.errors import on_error
from dynamo.application.exchange import Exchange
from dynamo.application.ids import RequestIds, sanitised
from dynamo.application.routes import Route, Routes, WrongMethod
from dynamo.application.routing import RoutingPages, RoutingSource
from dynamo.application.status import METRICS_TYPE, uptime
from dynamo.communication.http import Request, Response
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, InternalError
from dynamo.core.settings.schema import Server
from dynamo.telemetry.metrics import Registry

log = logging.getLogger(__name__)


class RoutingApplication:
    """`handle` and `on_error` go to an `HttpServer`. `reasons`: why the process is not well;
    `facts`: more for /health."""

    def __init__(
        self,
        server: Server,
        source: RoutingSource,
        clock: Clock,
        registry: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.on_error = on_error
        self._clock = clock
        self._registry = registry
        self._reasons = reasons
        self._facts = facts
        self._started = clock.now()
        self._ids = RequestIds()
        self._keys = Keys(server.api_keys)
        explained = {
            path: {method: self._keyed(route) for method, route in methods.items()}
            for path, methods in RoutingPages(source).table().items()
        }
        self._routes = Routes(
            {
                **explained,
                "/health": {"GET": self.health},
                "/live": {"GET": self.live},
                "/metrics": {"GET": self.metrics},
                "/version": {"GET": self.version},
            }
        )

    async def handle(self, request: Request, response: Response) -> None:
        """One request."""
        given = sanitised(request.header(b"x-request-id"))
        own = given or self._ids.new()
        exchange = Exchange(request, response, own, own, ())
        try:
            await self._routes.find(request.method, request.path)(exchange)
        except WrongMethod as error:
            exchange.fail(error, (("allow", error.allowed),))
        except DynamoError as error:
            exchange.fail(error)
        except Exception:
            log.exception("request failed", extra={"fields": {"request_id": own}})
            exchange.fail(InternalError("internal error", hint="the router's log says more"))

    async def health(self, exchange: Exchange) -> None:
        """GET /health: 200 when it can choose."""
        reasons = dict(self._reasons())
        body = {
            "status": "unhealthy" if reasons else "healthy",
            "version": dynamo.__version__,
            "uptime": uptime(self._clock.now() - self._started),
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
        text = self._registry.render()
        exchange.response.send(200, (METRICS_TYPE, *exchange.headers), text.encode())

    def _keyed(self, route: Route) -> Route:
        async def checked(exchange: Exchange) -> None:
            self._keys.check(exchange.request)
            await route(exchange)

        return checked

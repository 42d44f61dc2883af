"""The HTTP surface of a router of its own: health, metrics, explanations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dynamo.application.access import Keys
from dynamo.application.errors import on_error
from dynamo.application.exchange import Exchange
from dynamo.application.ids import RequestIds, sanitised
from dynamo.application.routes import Routes
from dynamo.application.routing import RoutingPages, RoutingSource
from dynamo.application.status import Status
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
        self._ids = RequestIds()
        explained = Keys(server.api_keys).guard(RoutingPages(source).table())
        status = Status(clock, registry, reasons=reasons, facts=facts)
        self._routes = Routes({**explained, **status.table()})

    async def handle(self, request: Request, response: Response) -> None:
        """One request."""
        given = sanitised(request.header(b"x-request-id"))
        own = given or self._ids.new()
        exchange = Exchange(request, response, own, own, ())
        try:
            await self._routes.find(request.method, request.path)(exchange)
        except DynamoError as error:
            exchange.fail(error)
        except Exception:
            log.exception("request failed", extra={"fields": {"request_id": own}})
            exchange.fail(InternalError("internal error", hint="the router's log says more"))

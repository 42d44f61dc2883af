"""The HTTP surface of a router of its own: health, metrics, explanations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dynamo.application.access import ApiKeys
from dynamo.application.errors import render_error
from dynamo.application.exchange import Exchange
from dynamo.application.ids import RequestIds, sanitise_request_id
from dynamo.application.routes import RouteTable
from dynamo.application.routing import RoutingHandler, RoutingSource
from dynamo.application.status import StatusHandler
from dynamo.communication.http import Request, Response
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, InternalError
from dynamo.core.settings.schema import ServerSettings
from dynamo.telemetry.metrics import Registry

log = logging.getLogger(__name__)


class RouterApplication:
    """`handle` and `on_error` go to an `HttpServer`. `reasons`: why the process is not well;
    `facts`: more for /health."""

    def __init__(
        self,
        server: ServerSettings,
        source: RoutingSource,
        clock: Clock,
        registry: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.on_error = render_error
        self._request_ids = RequestIds()
        explained = ApiKeys(server.api_keys).protect_routes(RoutingHandler(source).routes())
        status = StatusHandler(clock, registry, reasons=reasons, facts=facts)
        self._routes = RouteTable({**explained, **status.routes()})

    async def handle(self, request: Request, response: Response) -> None:
        """One request."""
        given = sanitise_request_id(request.header(b"x-request-id"))
        own = given or self._request_ids.generate()
        exchange = Exchange(request, response, own, own, ())
        try:
            await self._routes.find(request.method, request.path)(exchange)
        except DynamoError as error:
            exchange.send_error(error)
        except Exception:
            log.exception("request failed", extra={"fields": {"request_id": own}})
            exchange.send_error(InternalError("internal error", hint="the router's log says more"))

"""The application: every request comes in here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo.application.access import Cors, Keys
from dynamo.application.errors import on_error
from dynamo.application.exchange import Exchange
from dynamo.application.gateway import Gateway
from dynamo.application.generation import Generation
from dynamo.application.ids import RequestIds, sanitised
from dynamo.application.metrics import FrontendMetrics
from dynamo.application.models import Models
from dynamo.application.routes import Route, Routes
from dynamo.application.routing import RoutingPages, RoutingSource
from dynamo.application.status import Status
from dynamo.application.tokens import Tokens
from dynamo.communication.http import Request, Response
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, InternalError, ServerStopped
from dynamo.core.settings.schema import Server
from dynamo.telemetry.logs import request_id
from dynamo.telemetry.metrics import Registry

log = logging.getLogger(__name__)

BAD = 400
CLIENT_LEFT = 499


class Application:
    """`handle` and `on_error` go to an `HttpServer`.

    `reasons`: why the process is not well, by name; `facts`: more for /health (workers, planes);
    `metrics_text`: /metrics of all processes that share the port (default: this one's); `routing`:
    who answers for /router.
    """

    def __init__(
        self,
        server: Server,
        gateway: Gateway,
        clock: Clock,
        registry: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]] = dict,
        facts: Callable[[], Mapping[str, Any]] = dict,
        metrics_text: Callable[[], Awaitable[str]] | None = None,
        routing: RoutingSource | None = None,
    ) -> None:
        self.on_error = on_error
        self.metrics = FrontendMetrics(registry)
        self.generation = Generation(server, gateway, clock, self.metrics)
        admission = self.generation.admission
        registry.gauge(
            "dynamo_frontend_inflight_requests",
            "Generation requests being answered",
            callback=lambda: admission.running,
        )
        registry.gauge(
            "dynamo_frontend_queued_requests",
            "Generation requests waiting for a place",
            callback=lambda: admission.waiting,
        )
        self._clock = clock
        self._log_requests = server.log_requests
        self._cors = Cors(server.cors_origins)
        self._ids = RequestIds()
        self._reasons = reasons
        self._facts = facts
        self._gateway = gateway
        status = Status(
            clock, registry, reasons=self._unwell, facts=self._told, metrics_text=metrics_text
        )
        self._routes = Routes({**self._keyed(server, routing), **status.table()})

    def limit(self, server: Server) -> None:
        """From now on these limits hold, and this of `log_requests`."""
        self.generation.limit(server)
        self._log_requests = server.log_requests

    def _keyed(self, server: Server, routing: RoutingSource | None) -> dict[str, dict[str, Route]]:
        models, tokens = Models(self._gateway), Tokens(self._gateway, server.unknown_roles)
        generating: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": self.generation.chat},
            "/v1/completions": {"POST": self.generation.complete},
        }
        self._generating = frozenset(generating)
        pages = RoutingPages(routing).table() if routing is not None else {}
        return Keys(server.api_keys).guard(
            {
                **generating,
                "/v1/models": {"GET": models.every},
                "/v1/models/": {"GET": models.one},
                "/tokenize": {"POST": tokens.tokenize},
                "/detokenize": {"POST": tokens.detokenize},
                **pages,
            }
        )

    def _unwell(self) -> Mapping[str, str]:
        reason = self._gateway.reason
        unserved = {"models": reason} if reason else {}
        return {**unserved, **self._reasons()}

    def _told(self) -> Mapping[str, Any]:
        return {
            "gpu_memory_usage": None,
            "active_requests": self.generation.admission.running,
            "models": list(self._gateway.models),
            **self._facts(),
        }

    async def handle(self, request: Request, response: Response) -> None:
        """One request."""
        headers = request.headers
        given = sanitised(request.header(b"x-request-id")) if b"x-request-id" in headers else ""
        own = self._ids.unique(given) if given else self._ids.new()
        shared = self._cors.headers(request) if b"origin" in headers else ()
        exchange = Exchange(request, response, own, given or own, shared)
        request_id.set(own)
        started = self._clock.now()
        status = CLIENT_LEFT
        try:
            if request.method == "OPTIONS":
                route: Route = self._preflight
            else:
                route = self._routes.find(request.method, request.path)
            await route(exchange)
        except DynamoError as error:
            exchange.fail(error)
        except asyncio.CancelledError:
            if response.open:  # the client has not left: this server does
                hint = "send it again; --drain gives requests in flight more time"
                exchange.fail(ServerStopped("the server stopped amid the answer", hint=hint))
            raise
        except Exception:
            log.exception("request failed")
            exchange.fail(InternalError("internal error", hint="the server's log says more"))
        finally:
            if response.ended:
                status = exchange.failed or response.status
            self._ended(exchange, status, self._clock.now() - started)

    async def _preflight(self, exchange: Exchange) -> None:
        headers = (*exchange.headers, *self._cors.preflight(exchange.request))
        exchange.response.send(204, headers, b"")

    def _ended(self, exchange: Exchange, status: int, seconds: float) -> None:
        path = exchange.request.path
        if exchange.model or (path in self._generating and status >= BAD):
            self.metrics.requests.labels(exchange.model, path, str(status)).inc()
        if self._log_requests:
            fields: dict[str, Any] = {
                "method": exchange.request.method,
                "path": path,
                "status": status,
                "seconds": round(seconds, 6),
            }
            if exchange.shown_id != exchange.id:
                fields["client_id"] = exchange.shown_id
            if exchange.model:
                fields |= {"model": exchange.model, "stream": exchange.streams}
            if exchange.code:
                fields["code"] = exchange.code
            log.info("request", extra={"fields": fields})

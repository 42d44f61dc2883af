"""The application: every request comes in here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo.application.access import ApiKeys, Cors
from dynamo.application.exchange import Exchange, RequestIds, sanitise_request_id
from dynamo.application.frontend_metrics import FrontendMetrics
from dynamo.application.gateway import Gateway
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.http_errors import render_error
from dynamo.application.models_handler import ModelsHandler
from dynamo.application.routes import Route, RouteTable
from dynamo.application.routing import RoutingHandler, RoutingSource
from dynamo.application.status import StatusHandler
from dynamo.application.tokenization import TokenizationHandler
from dynamo.communication.http import Request, Response
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, InternalError, ServerStopped
from dynamo.core.settings.schema import ServerSettings
from dynamo.telemetry.logs import request_id
from dynamo.telemetry.metrics import Registry


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


log = logging.getLogger(__name__)

FIRST_ERROR_STATUS = 400
CLIENT_CLOSED_REQUEST = 499


class Application:
    """`handle` and `on_error` go to an `HttpServer`.

    `reasons`: why the process is not well, by name; `facts`: more for /health (workers, planes);
    `metrics_text`: /metrics of all processes that share the port (default: this one's); `routing`:
    who answers for /router.
    """

    def __init__(
        self,
        server: ServerSettings,
        gateway: Gateway,
        clock: Clock,
        registry: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]] = dict,
        facts: Callable[[], Mapping[str, Any]] = dict,
        metrics_text: Callable[[], Awaitable[str]] | None = None,
        routing: RoutingSource | None = None,
    ) -> None:
        self.on_error = render_error
        self.metrics = FrontendMetrics(registry)
        self.generation = GenerationHandler(server, gateway, clock, self.metrics)
        admission = self.generation.concurrency
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
        self._request_ids = RequestIds()
        self._reasons = reasons
        self._facts = facts
        self._gateway = gateway
        status = StatusHandler(
            clock,
            registry,
            reasons=self._unhealthy_reasons,
            facts=self._health_facts,
            metrics_text=metrics_text,
        )
        self._routes = RouteTable(
            {**self._authenticated_routes(server, routing), **status.routes()}
        )

    def update_settings(self, server: ServerSettings) -> None:
        """From now on these limits hold, and this of `log_requests`."""
        self.generation.update_settings(server)
        self._log_requests = server.log_requests

    def _authenticated_routes(
        self, server: ServerSettings, routing: RoutingSource | None
    ) -> dict[str, dict[str, Route]]:
        models, tokens = (
            ModelsHandler(self._gateway),
            TokenizationHandler(self._gateway, server.unknown_roles),
        )
        generating: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": self.generation.chat},
            "/v1/completions": {"POST": self.generation.complete},
        }
        self._generation_paths = frozenset(generating)
        pages = RoutingHandler(routing).routes() if routing is not None else {}
        return ApiKeys(server.api_keys).protect_routes(
            {
                **generating,
                "/v1/models": {"GET": models.list_models},
                "/v1/models/": {"GET": models.get_model},
                "/tokenize": {"POST": tokens.tokenize},
                "/detokenize": {"POST": tokens.detokenize},
                **pages,
            }
        )

    def _unhealthy_reasons(self) -> Mapping[str, str]:
        reason = self._gateway.not_ready_reason
        unserved = {"models": reason} if reason else {}
        return {**unserved, **self._reasons()}

    def _health_facts(self) -> Mapping[str, Any]:
        return {
            "gpu_memory_usage": None,
            "active_requests": self.generation.concurrency.running,
            "models": list(self._gateway.models),
            **self._facts(),
        }

    async def handle(self, request: Request, response: Response) -> None:
        """One request."""
        headers = request.headers
        given = (
            sanitise_request_id(request.header(b"x-request-id"))
            if b"x-request-id" in headers
            else ""
        )
        own = self._request_ids.make_unique(given) if given else self._request_ids.generate()
        shared = self._cors.response_headers(request) if b"origin" in headers else ()
        exchange = Exchange(request, response, own, given or own, shared)
        request_id.set(own)
        started = self._clock.now()
        status = CLIENT_CLOSED_REQUEST
        try:
            if request.method == "OPTIONS":
                route: Route = self._preflight
            else:
                route = self._routes.find(request.method, request.path)
            await route(exchange)
        except DynamoError as error:
            exchange.send_error(error)
        except asyncio.CancelledError:
            if response.open:  # the client has not left: this server does
                hint = "send it again; --drain gives requests in flight more time"
                exchange.send_error(ServerStopped("the server stopped amid the answer", hint=hint))
            raise
        except Exception:
            log.exception("request failed")
            exchange.send_error(InternalError("internal error", hint="the server's log says more"))
        finally:
            if response.ended:
                status = exchange.error_status or response.status
            self._record_response(exchange, status, self._clock.now() - started)

    async def _preflight(self, exchange: Exchange) -> None:
        headers = (*exchange.headers, *self._cors.preflight_headers(exchange.request))
        exchange.response.send(204, headers, b"")

    def _record_response(self, exchange: Exchange, status: int, seconds: float) -> None:
        path = exchange.request.path
        if exchange.model or (path in self._generation_paths and status >= FIRST_ERROR_STATUS):
            self.metrics.requests.labels(exchange.model, path, str(status)).inc()
        if self._log_requests:
            fields: dict[str, Any] = {
                "method": exchange.request.method,
                "path": path,
                "status": status,
                "seconds": round(seconds, 6),
            }
            if exchange.client_request_id != exchange.request_id:
                fields["client_id"] = exchange.client_request_id
            if exchange.model:
                fields |= {"model": exchange.model, "stream": exchange.streaming}
            if exchange.error_code:
                fields["code"] = exchange.error_code
            log.info("request", extra={"fields": fields})

"""The HTTP applications of a frontend and of a router process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from random import random
from types import MappingProxyType
from typing import Any

from dynamo.application.access import ApiKeys, CallerLimits, Cors, make_header_check
from dynamo.application.adapters import AdaptersHandler, OrderSender
from dynamo.application.embeddings import EmbeddingHandler
from dynamo.application.exchange import Exchange, RequestIds, sanitise_request_id
from dynamo.application.front_page import FrontPage, LocateConsole
from dynamo.application.frontend_metrics import FrontendMetrics
from dynamo.application.gateway import Gateway, UnloadedModel
from dynamo.application.generation.deadlines import TIMEOUT_HEADER
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.generation.replies import keep_waiting
from dynamo.application.large_bodies import LargeBodies
from dynamo.application.messages.handler import ANTHROPIC_ERRORS, MessagesHandler
from dynamo.application.responses.handler import ResponsesHandler
from dynamo.application.responses.store import ResponseStore
from dynamo.application.routes import Route
from dynamo.application.status import MetricsSource, ModelsHandler, StatusHandler
from dynamo.application.tokenization import TokenizationHandler
from dynamo.communication.http import LARGE_BODY_BYTES, Request, Response, WebAccess
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, InternalError, InvalidRequest, ServerStopped
from dynamo.core.settings.schema import ResponsesSettings, ServerSettings
from dynamo.telemetry.logs import request_id
from dynamo.telemetry.metrics import Registry
from dynamo.telemetry.trace_context import begin_trace, take_over_trace


class RouterApplication:
    """The HTTP application of a router's or observer's process on `host`: its `routes`, /health and
    /metrics. Browsers that ask for / get to `page_path`. `open_pages` need no key.

    `reasons` returns why the process is unhealthy, by name; `facts` returns more fields of /health.
    """

    def __init__(
        self,
        server: ServerSettings,
        host: str,
        routes: Mapping[str, Mapping[str, Route]],
        clock: Clock,
        registry: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]],
        facts: Callable[[], Mapping[str, Any]],
        page_path: str = "",
        open_pages: Mapping[str, Mapping[str, Route]] = MappingProxyType({}),
    ) -> None:
        self._request_ids = RequestIds()
        keys = ApiKeys(server.api_keys)
        self.check_headers = make_header_check(WebAccess.of_api(host, server), keys)
        pages = keys.protect_routes(routes)
        status = StatusHandler(
            clock,
            registry,
            reasons=reasons,
            facts=facts,
            ready=lambda: "; ".join(reasons().values()),
        )
        table = {**open_pages, **pages, **status.routes()}
        self._routes = FrontPage(table, page_path=page_path).table

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request."""
        exchange = self._open_exchange(request, response)
        try:
            await self._routes.find(request.method, request.path)(exchange)
        except DynamoError as error:
            exchange.send_error(error)
        except Exception:
            log.exception("request failed", extra={"fields": {"request_id": exchange.request_id}})
            exchange.send_error(InternalError("internal error", hint="see the log"))

    def on_error(self, error: DynamoError, request: Request, response: Response) -> None:
        """Answer a request that failed before `handle`."""
        self._open_exchange(request, response).send_error(error)

    def _open_exchange(self, request: Request, response: Response) -> Exchange:
        client_id = sanitise_request_id(request.header(b"x-request-id"))
        own_id = client_id or self._request_ids.generate()
        return Exchange(request, response, own_id, own_id, ())


log = logging.getLogger(__name__)

MESSAGES_PATH = "/v1/messages"
"""Errors below this path have Anthropic's format, all others OpenAI's."""
FIRST_ERROR_STATUS = 400
MIN_TIMEOUT_S = 0.001
CLIENT_CLOSED_REQUEST = 499


class Application:
    """The HTTP application of a frontend. An `HttpServer` calls `handle`, `on_error` and
    `check_headers`.

    `reasons` returns why the process is unhealthy, by name. `facts` returns more fields of /health
    (workers, planes), and `ready` why requests should not come. `metrics_source` knows the metrics
    of the other processes; None leaves out what it answers. `pages`: further routes that need a
    key, as those of the observer.
    `locate_console` returns the URL of the observer, whose console browsers get to from /.
    `share_cache` is `engine.share_cache`. Without a `response_store`, responses are kept in memory.
    `trace_ratio`: the share of requests whose traces are exported; None: there is no collector.
    """

    trace_ratio: float | None = None

    def __init__(
        self,
        server: ServerSettings,
        gateway: Gateway,
        clock: Clock,
        registry: Registry,
        *,
        metrics: FrontendMetrics | None = None,
        reasons: Callable[[], Mapping[str, str]] = dict,
        facts: Callable[[], Mapping[str, Any]] = dict,
        ready: Callable[[], str] = str,
        metrics_source: MetricsSource | None = None,
        pages: Mapping[str, Mapping[str, Route]] = MappingProxyType({}),
        locate_console: LocateConsole | None = None,
        share_cache: bool = False,
        response_store: ResponseStore | None = None,
        adapter_orders: OrderSender | None = None,
    ) -> None:
        self.metrics = metrics or FrontendMetrics(registry)
        self.generation = GenerationHandler(
            server, gateway, clock, self.metrics, CallerLimits(server, share_cache=share_cache)
        )
        self._declare_gauges(registry)
        self._clock = clock
        self._log_requests = server.log_requests
        self._keys = ApiKeys(server.api_keys)
        self._cors = Cors(access := WebAccess.of_api(server.http_host, server))
        self.check_headers = make_header_check(access, self._keys)
        self._large_bodies = LargeBodies(gateway)
        self._request_ids = RequestIds()
        self._reasons, self._facts = reasons, facts
        self._gateway = gateway
        status = StatusHandler(
            clock,
            registry,
            reasons=self._unhealthy_reasons,
            facts=self._health_facts,
            ready=ready,
            metrics_source=metrics_source,
        )
        further = {**AdaptersHandler(adapter_orders).routes(), **pages}
        protected = self._authenticated_routes(server, response_store, further)
        table = {**protected, **status.routes()}
        front_page = FrontPage(table, needs_key=self._keys.required, locate_console=locate_console)
        self._routes = front_page.table

    def update_settings(self, server: ServerSettings, ttft_slo: float = 0.0) -> None:
        """Apply limits, the log_requests switch and `router.ttft_slo`, which may be reloaded."""
        self.generation.update_settings(server, ttft_slo)
        self._log_requests = server.log_requests

    def _declare_gauges(self, registry: Registry) -> None:
        concurrency = self.generation.concurrency
        registry.gauge(
            "dynamo_frontend_inflight_requests",
            "Generation requests in progress",
            callback=lambda: concurrency.running,
        )
        registry.gauge(
            "dynamo_frontend_queued_requests",
            "Generation requests that wait for server.max_concurrent_requests",
            callback=lambda: concurrency.waiting,
        )

    async def close(self, drain_s: float) -> None:
        """Wait for responses in the background at most `drain_s`, then close their store."""
        await self._responses.close(drain_s)

    def _authenticated_routes(
        self,
        server: ServerSettings,
        response_store: ResponseStore | None,
        further: Mapping[str, Mapping[str, Route]],
    ) -> dict[str, dict[str, Route]]:
        store = response_store or ResponseStore(None, ResponsesSettings(), self._clock.wall)
        self._responses = ResponsesHandler(
            self._gateway, self.generation, store, self._keys, self._clock
        )
        models = ModelsHandler(self._gateway)
        tokens = TokenizationHandler(
            self._gateway, server.unknown_roles, self.generation.concurrency
        )
        messages = MessagesHandler(self.generation)
        generation: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": self.generation.chat},
            "/v1/completions": {"POST": self.generation.complete},
            "/v1/messages": {"POST": messages.create},
            **self._responses.routes(),
        }
        self.generation_paths = frozenset(generation)
        embeddings = EmbeddingHandler(self._gateway, self.generation)
        return self._keys.protect_routes(
            {
                **generation,
                "/v1/messages/count_tokens": {"POST": messages.count_tokens},
                "/v1/models": {"GET": models.list_models},
                "/v1/models/": {"GET": models.get_model},
                "/v1/embeddings": {"POST": embeddings.embed},
                "/v1/score": {"POST": embeddings.score},
                "/v1/rerank": {"POST": embeddings.rerank},
                "/tokenize": {"POST": tokens.tokenize},
                "/detokenize": {"POST": tokens.detokenize},
                "/tokenizer_info": {"GET": tokens.describe},
                **further,
            }
        )

    def _unhealthy_reasons(self) -> Mapping[str, str]:
        reason = self._gateway.not_ready_reason
        models = {"models": reason} if reason else {}
        return {**models, **self._reasons()}

    def _health_facts(self) -> Mapping[str, Any]:
        return {
            "gpu_memory_usage": None,
            "active_requests": self.generation.concurrency.running,
            "models": [*self._gateway.models, *self._gateway.embedding_models],
            **self._facts(),
        }

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request."""
        exchange = self._open_exchange(request, response)
        request_id.set(exchange.request_id)
        exchange.started_s = started = self._clock.now()
        status = CLIENT_CLOSED_REQUEST
        try:
            if request.method == "OPTIONS":
                route: Route = self._preflight
            else:
                route = self._routes.find(request.method, request.path)
            if len(request.body) > LARGE_BODY_BYTES:
                await self._large_bodies.check(request)
            try:
                await route(exchange)
            except UnloadedModel as error:
                await self._answer_when_loaded(exchange, route, error)
        except DynamoError as error:
            exchange.send_error(error)
        except RecursionError:
            exchange.send_error(InvalidRequest("the request is nested too deeply"))
        except asyncio.CancelledError:
            if response.open:  # the client is still connected: this server stops
                hint = "send the request again; --drain gives requests in flight more time"
                exchange.send_error(
                    ServerStopped("the server stopped during the answer", hint=hint)
                )
            raise
        except Exception:
            log.exception("request failed")
            exchange.send_error(InternalError("internal error", hint="see the server's log"))
        finally:
            if response.ended:
                status = exchange.error_status or response.status
            self._record_response(exchange, status, self._clock.now() - started)

    async def _answer_when_loaded(
        self, exchange: Exchange, route: Route, error: UnloadedModel
    ) -> None:
        """Answer a request whose model is loaded first. Its deadline stays. A stream gets its head
        and comment lines meanwhile."""
        if (load := self._gateway.load) is None:
            raise error
        generation, request = self.generation, exchange.request
        exchange.model, body = error.model, request.decoded_body
        if exchange.streaming and request.path in self.generation_paths:
            exchange.response.on_silence = partial(keep_waiting, exchange)
        async with AsyncExitStack() as stack:
            async with generation.open_context(exchange, error.model) as context:
                started, timeout_s = self._clock.now(), context.timeout_s or 0.0
                await stack.enter_async_context(load(error.model, timeout_s))
                exchange.load_s = self._clock.now() - started
                left_s = max(timeout_s - exchange.load_s, MIN_TIMEOUT_S)
            request.headers = {**request.headers, TIMEOUT_HEADER: b"%.3f" % left_s}
            request.body, body = body, b""
            await route(exchange)

    def on_error(self, error: DynamoError, request: Request, response: Response) -> None:
        """Answer a request that failed before `handle`, e.g. one with a malformed head."""
        exchange = self._open_exchange(request, response)
        exchange.send_error(error)
        token = request_id.set(exchange.request_id)
        self._record_response(exchange, exchange.error_status, 0.0)
        request_id.reset(token)

    def _open_exchange(self, request: Request, response: Response) -> Exchange:
        headers, ids, client_id = request.headers, self._request_ids, ""
        if b"x-request-id" in headers:
            client_id = sanitise_request_id(request.header(b"x-request-id"))
        own_id = ids.make_unique(client_id) if client_id else ids.generate()
        cors_headers = self._cors.response_headers(request) if b"origin" in headers else ()
        exchange = Exchange(request, response, own_id, client_id or own_id, cors_headers)
        ratio, trace = self.trace_ratio, None
        if b"traceparent" in headers:
            trace = take_over_trace(headers, own_id, exported=ratio is not None)
        if trace is None and ratio and random() < ratio:
            trace = begin_trace(own_id)
        if trace is not None:
            exchange.join_trace(trace)
        if request.path.startswith(MESSAGES_PATH):
            exchange.use_error_format(ANTHROPIC_ERRORS)
        return exchange

    async def _preflight(self, exchange: Exchange) -> None:
        headers = (*exchange.headers, *self._cors.preflight_headers(exchange.request))
        exchange.response.send(204, headers, b"")

    def _record_response(self, exchange: Exchange, status: int, seconds: float) -> None:
        path = exchange.request.path
        if exchange.model or (path in self.generation_paths and status >= FIRST_ERROR_STATUS):
            self.metrics.requests.labels(exchange.model, path, str(status)).inc()
            stories = self.generation.stories
            if stories is not None and exchange.story is None and status >= FIRST_ERROR_STATUS:
                stories.tell_failure(exchange, self._clock.now())
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

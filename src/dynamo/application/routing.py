"""The routes /router/...: routing decisions, reports and samples of workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs, quote

import msgspec

from dynamo.application.exchange import Exchange, compress
from dynamo.application.routes import Route
from dynamo.core.errors import InvalidRequest, NotFound

EXPLAIN_PREFIX = "/router/explain/"


class RoutingSource(Protocol):
    """The source of routing data: `operations.observer.DeploymentObserver`."""

    def explain(self, request_id: str) -> Sequence[Any]: ...
    async def report(self, seconds: float | None = None) -> Any: ...
    async def timeline(
        self, since: float = 0.0, seconds: float | None = None, worker: str = "", columns: str = ""
    ) -> Any: ...


ROUTING_PATHS = (EXPLAIN_PREFIX, "/router/explain", "/router/report", "/router/timeline")
STORY_PATHS = ("/requests/", "/requests", "/causes", "/slo", "/activity")


class RoutingHandler:
    """Answers /router/...: samples of workers, decisions and reports."""

    def __init__(self, source: RoutingSource) -> None:
        self._source = source

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        routes = (self.explain, self.recent, self.report, self.timeline)
        return {path: {"GET": route} for path, route in zip(ROUTING_PATHS, routes, strict=True)}

    async def explain(self, exchange: Exchange) -> None:
        """GET /router/explain/{request_id}: every decision for a request."""
        name = exchange.request.path.removeprefix(EXPLAIN_PREFIX)
        decisions = self._source.explain(name)
        if not decisions:
            raise NotFound(
                f"no decision is recorded for request {name[:100]!r}",
                hint="use the answer's x-request-id; the last 2,000 requests are kept",
            )
        exchange.send_value({"request_id": name, "decisions": decisions})

    async def recent(self, exchange: Exchange) -> None:
        """GET /router/explain: the decisions for the last requests."""
        exchange.send_value({"decisions": self._source.explain("")})

    async def report(self, exchange: Exchange) -> None:
        """GET /router/report?seconds=N: a report on the last N seconds, or on all records."""
        seconds = query_number(exchange, "seconds")
        exchange.send_value(await self._source.report(seconds))

    async def timeline(self, exchange: Exchange) -> None:
        """GET /router/timeline: series of all workers, of the last 15 minutes, after the Unix time
        `since`, or of the last `seconds`; only those of a `worker`, only some `columns`."""
        since = query_number(exchange, "since") or 0.0
        seconds = query_number(exchange, "seconds")
        query = parse_qs(exchange.request.query)
        timeline = await self._source.timeline(
            since, seconds, query.get("worker", [""])[-1], query.get("columns", [""])[-1]
        )
        encoding, body = compress(exchange.request, msgspec.json.encode(timeline))
        exchange.send_json(200, body, encoding)


class RoutingRedirect:
    """Sends clients of /router/... and of the observer's other routes to the observer. `locate`
    returns its URL, or raises `NotFound`."""

    def __init__(self, locate: Callable[[], Awaitable[str]]) -> None:
        self._locate = locate

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        return {path: {"GET": self.redirect} for path in (*ROUTING_PATHS, *STORY_PATHS)}

    async def redirect(self, exchange: Exchange) -> None:
        """GET /router/... and the like: 307 to the same path of the observer."""
        request = exchange.request
        query = f"?{request.query}" if request.query else ""
        url = f"{await self._locate()}{quote(request.path)}{query}"
        body = msgspec.json.encode({"location": url})
        exchange.send_json(307, body, (("location", url),))


def query_number(exchange: Exchange, name: str) -> float | None:
    """Return a number of the query, None without it. Raises `InvalidRequest`."""
    values = parse_qs(exchange.request.query).get(name)
    if not values:
        return None
    try:
        value = float(values[-1])
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidRequest(f"a number, not {values[-1][:40]!r}", field=name)
    return value

"""The routes /router/...: routing decisions, reports, samples and a page that shows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import parse_qs, quote

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.routes import Route
from dynamo.core.errors import InvalidRequest, NotFound

DATA_PLACEHOLDER = b"{{data}}"
LIVE_PLACEHOLDER = b"{{live}}"


@cache
def read_page(name: str) -> bytes:
    """Return an HTML page of this package, with placeholders."""
    return files(__package__).joinpath(name).read_bytes()


def render_page(data: bytes, *, live: bool) -> bytes:
    """Return the HTML page with `data` inside, a JSON object with `timeline` and perhaps `report`.

    A `report` of null says that no decisions are recorded: the page then leaves out what follows
    from them. A `live` page polls its server for newer samples.
    """
    safe = data.replace(b"<", b"\\u003c")
    return (
        read_page("routing_page.html")
        .replace(LIVE_PLACEHOLDER, b"true" if live else b"false")
        .replace(DATA_PLACEHOLDER, safe)
    )


EXPLAIN_PREFIX = "/router/explain/"
VIEW_REPORT_S = 300.0
HTML_CONTENT_TYPE = "text/html; charset=utf-8"


class RoutingSource(Protocol):
    """The source of routing data: `operations.observer.DeploymentObserver`."""

    async def explain(self, request_id: str) -> Sequence[Any]: ...
    async def report(self, seconds: float | None = None) -> Any: ...
    async def timeline(self, since: float = 0.0, seconds: float | None = None) -> Any: ...


ROUTING_PATHS = (
    EXPLAIN_PREFIX,
    "/router/explain",
    "/router/report",
    "/router/timeline",
    "/router/view",
)
STORY_PATHS = ("/requests/", "/requests", "/causes", "/slo", "/activity")


class RoutingHandler:
    """Answers /router/...: samples of workers, decisions and reports."""

    def __init__(self, source: RoutingSource) -> None:
        self._source = source

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        routes = (self.explain, self.recent, self.report, self.timeline, self.view)
        return {path: {"GET": route} for path, route in zip(ROUTING_PATHS, routes, strict=True)}

    async def explain(self, exchange: Exchange) -> None:
        """GET /router/explain/{request_id}: every decision for a request."""
        name = exchange.request.path.removeprefix(EXPLAIN_PREFIX)
        decisions = await self._source.explain(name)
        if not decisions:
            raise NotFound(
                f"no decision is recorded for request {name[:100]!r}",
                hint="use the answer's x-request-id; the last 2,000 requests are kept",
            )
        exchange.send_value({"request_id": name, "decisions": decisions})

    async def recent(self, exchange: Exchange) -> None:
        """GET /router/explain: the decisions for the last requests."""
        exchange.send_value({"decisions": await self._source.explain("")})

    async def report(self, exchange: Exchange) -> None:
        """GET /router/report?seconds=N: a report on the last N seconds, or on all records."""
        seconds = query_number(exchange, "seconds")
        exchange.send_value(await self._source.report(seconds))

    async def timeline(self, exchange: Exchange) -> None:
        """GET /router/timeline: series of all workers, of the last 15 minutes, after the Unix time
        `since`, or of the last `seconds`."""
        since = query_number(exchange, "since") or 0.0
        seconds = query_number(exchange, "seconds")
        exchange.send_value(await self._source.timeline(since, seconds))

    async def view(self, exchange: Exchange) -> None:
        """GET /router/view: timeline and report as a page that updates itself."""
        timeline = await self._source.timeline()
        report = await self._source.report(VIEW_REPORT_S)
        data = msgspec.json.encode({"timeline": timeline, "report": report})
        body = render_page(data, live=True)
        exchange.send(HTML_CONTENT_TYPE, body)


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

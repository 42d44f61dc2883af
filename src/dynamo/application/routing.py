"""The routes /router/...: routing decisions, reports, samples and a page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import parse_qs

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
    """The source of routing data: `services.routing_queries.RoutingQueries`."""

    @property
    def records_decisions(self) -> bool: ...
    async def explain(self, request_id: str) -> Sequence[Any]: ...
    async def report(self, seconds: float | None = None) -> Any: ...
    async def timeline(self, since: float = 0.0, seconds: float | None = None) -> Any: ...


class RoutingHandler:
    """Answers /router/...: samples of workers in every router mode, and decisions and reports in
    those that record them."""

    def __init__(self, source: RoutingSource) -> None:
        self._source = source

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        return {
            "/router/explain/": {"GET": self.explain},
            "/router/explain": {"GET": self.recent},
            "/router/report": {"GET": self.report},
            "/router/timeline": {"GET": self.timeline},
            "/router/view": {"GET": self.view},
        }

    async def explain(self, exchange: Exchange) -> None:
        """GET /router/explain/{request_id}: every decision for a request."""
        self._require_decisions()
        name = exchange.request.path.removeprefix(EXPLAIN_PREFIX)
        decisions = await self._source.explain(name)
        if not decisions:
            raise NotFound(
                f"no decision is recorded for request {name[:100]!r}",
                hint="use the answer's x-request-id; the last thousand requests are recorded",
            )
        exchange.send_value({"request_id": name, "decisions": decisions})

    async def recent(self, exchange: Exchange) -> None:
        """GET /router/explain: the decisions for the last requests."""
        self._require_decisions()
        exchange.send_value({"decisions": await self._source.explain("")})

    async def report(self, exchange: Exchange) -> None:
        """GET /router/report?seconds=N: a report on the last N seconds, or on all records."""
        self._require_decisions()
        seconds = _query_number(exchange, "seconds")
        exchange.send_value(await self._source.report(seconds))

    async def timeline(self, exchange: Exchange) -> None:
        """GET /router/timeline: series of all workers, of the last 15 minutes, after the Unix time
        `since`, or of the last `seconds`."""
        since = _query_number(exchange, "since") or 0.0
        seconds = _query_number(exchange, "seconds")
        exchange.send_value(await self._source.timeline(since, seconds))

    async def view(self, exchange: Exchange) -> None:
        """GET /router/view: timeline and report, if there is one, as a page that updates itself."""
        timeline = await self._source.timeline()
        recorded = self._source.records_decisions
        report = await self._source.report(VIEW_REPORT_S) if recorded else None
        data = msgspec.json.encode({"timeline": timeline, "report": report})
        body = render_page(data, live=True)
        exchange.send(HTML_CONTENT_TYPE, body)

    def _require_decisions(self) -> None:
        if not self._source.records_decisions:
            raise NotFound(
                "this router mode does not look at workers, so no decisions are recorded",
                hint="start with --router-mode kv",
            )


def _query_number(exchange: Exchange, name: str) -> float | None:
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

"""The routes of an observer: stories of requests, routing decisions, and samples of workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs, quote

import msgspec

from dynamo.application.exchange import Exchange, compress
from dynamo.application.routes import Route
from dynamo.core.errors import InvalidRequest, NotFound

EXPLAIN_PREFIX, REQUESTS_PREFIX = "/router/explain/", "/requests/"
PATHS = {
    EXPLAIN_PREFIX: "all decisions for a request; its id (x-request-id) follows",
    "/router/explain": "the last routing decisions",
    "/router/report": "a report on these decisions; `?seconds=N` for the last N seconds",
    "/router/timeline": "every worker's cache and load over time; `?since=UNIX`, `?seconds=N`",
    REQUESTS_PREFIX: "what became of a request; its id (x-request-id) or trace id follows",
    "/requests": "the newest requests; `?slow=SECONDS`, `?failed=1`, `?worker=NAME`, `?limit=N`",
    "/causes": "what made requests late or fail; `?seconds=N` for the last N seconds",
    "/slo": "the share of requests that were answered right and in time",
    "/activity": "workers, pace and slow requests now, for `dynamo top`; `?seconds=N`",
}
"""The routes of an observer, with what the reference says of them."""
MAX_LISTED = 200


class ObserverSource(Protocol):
    """The source of answers: `operations.observer.DeploymentObserver`."""

    def explain(self, request_id: str) -> Sequence[Any]: ...
    async def report(self, seconds: float | None = None) -> Any: ...
    async def timeline(
        self, since: float = 0.0, seconds: float | None = None, worker: str = "", columns: str = ""
    ) -> Any: ...
    def find(self, name: str, *, maybe: bool = False) -> Sequence[Any]: ...
    def list_stories(
        self, slow: float, *, failed: bool, worker: str, limit: int
    ) -> Sequence[Any]: ...
    def group_causes(self, seconds: float) -> Sequence[Any]: ...
    async def report_slo(self) -> Any: ...
    def show_activity(self, seconds: float) -> Any: ...


class ObserverHandler:
    """Answers questions on requests, routing and workers."""

    def __init__(self, source: ObserverSource) -> None:
        self._source = source

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        routes = (
            self.explain, self.recent, self.report, self.timeline,
            self.find, self.list_stories, self.causes, self.slo, self.activity,
        )  # fmt: skip
        return {path: {"GET": route} for path, route in zip(PATHS, routes, strict=True)}

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
        exchange.send_value(await self._source.report(_number(exchange, "seconds")))

    async def timeline(self, exchange: Exchange) -> None:
        """GET /router/timeline: series of all workers, of the last 15 minutes, after the Unix time
        `since`, or of the last `seconds`; only those of a `worker`, only some `columns`."""
        since, seconds = _number(exchange, "since") or 0.0, _number(exchange, "seconds")
        worker, columns = _text(exchange, "worker"), _text(exchange, "columns")
        timeline = await self._source.timeline(since, seconds, worker, columns)
        encoding, body = compress(exchange.request, msgspec.json.encode(timeline))
        exchange.send_json(200, body, encoding)

    async def find(self, exchange: Exchange) -> None:
        """GET /requests/{id}: the stories of a request id or trace id, the newest first."""
        name = exchange.request.path.removeprefix(REQUESTS_PREFIX)
        exchange.send_value({"requests": self._source.find(name)})

    async def list_stories(self, exchange: Exchange) -> None:
        """GET /requests?slow=SECONDS&failed=1&worker=NAME&limit=200: the newest that match.
        `?id=`: those of a request id, perhaps none."""
        if name := _text(exchange, "id"):
            exchange.send_value({"requests": self._source.find(name, maybe=True)})
            return
        stories = self._source.list_stories(
            _number(exchange, "slow") or 0.0,
            failed=_text(exchange, "failed") not in ("", "0"),
            worker=_text(exchange, "worker"),
            limit=int(_number(exchange, "limit") or MAX_LISTED),
        )
        exchange.send_value({"requests": stories})

    async def causes(self, exchange: Exchange) -> None:
        """GET /causes?seconds=N: what made the requests of the last N seconds late."""
        seconds = _number(exchange, "seconds")
        causes = self._source.group_causes(3600.0 if seconds is None else seconds)
        exchange.send_value({"causes": causes})

    async def slo(self, exchange: Exchange) -> None:
        """GET /slo: the share of requests that were answered right and in time."""
        exchange.send_value(await self._source.report_slo())

    async def activity(self, exchange: Exchange) -> None:
        """GET /activity?seconds=60: what the deployment does now, for `dynamo top`."""
        seconds = _number(exchange, "seconds")
        exchange.send_value(self._source.show_activity(60.0 if seconds is None else seconds))


class ObserverRedirect:
    """Sends clients of the observer's routes to the observer. `locate` returns its URL, or raises
    `NotFound`."""

    def __init__(self, locate: Callable[[], Awaitable[str]]) -> None:
        self._locate = locate

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        return {path: {"GET": self.redirect} for path in PATHS}

    async def redirect(self, exchange: Exchange) -> None:
        """GET /router/... and the like: 307 to the same path of the observer."""
        request = exchange.request
        query = f"?{request.query}" if request.query else ""
        url = f"{await self._locate()}{quote(request.path)}{query}"
        body = msgspec.json.encode({"location": url})
        exchange.send_json(307, body, (("location", url),))


def _text(exchange: Exchange, name: str) -> str:
    """Return a value of the query, "" without it."""
    return parse_qs(exchange.request.query).get(name, [""])[-1]


def _number(exchange: Exchange, name: str) -> float | None:
    """Return a number of the query, None without it. Raises `InvalidRequest`."""
    text = _text(exchange, name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidRequest(f"a number, not {text[:40]!r}", field=name)
    return value

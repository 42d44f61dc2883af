"""The routes of an observer: the stories of requests, and why they took long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs

from dynamo.application.exchange import Exchange
from dynamo.application.routes import Route
from dynamo.application.routing import STORY_PATHS, query_number

MAX_LISTED = 200


class StorySource(Protocol):
    """The source of stories: `operations.observer.DeploymentObserver`."""

    def find(self, name: str, *, maybe: bool = False) -> Sequence[Any]: ...
    def list_stories(
        self, slow: float, *, failed: bool, worker: str, limit: int
    ) -> Sequence[Any]: ...
    def group_causes(self, seconds: float) -> Sequence[Any]: ...
    async def report_slo(self) -> Any: ...
    def show_activity(self, seconds: float) -> Any: ...


class ObserverHandler:
    """Answers /requests, /causes, /slo and /activity."""

    def __init__(self, source: StorySource) -> None:
        self._source = source

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        routes = (self.find, self.list_stories, self.causes, self.slo, self.activity)
        return {path: {"GET": route} for path, route in zip(STORY_PATHS, routes, strict=True)}

    async def find(self, exchange: Exchange) -> None:
        """GET /requests/{id}: the stories of a request id or trace id, the newest first."""
        name = exchange.request.path.removeprefix(STORY_PATHS[0])
        exchange.send_value({"requests": self._source.find(name)})

    async def list_stories(self, exchange: Exchange) -> None:
        """GET /requests?slow=SECONDS&failed=1&worker=NAME&limit=200: the newest that match.
        `?id=`: those of a request id, perhaps none."""
        query = parse_qs(exchange.request.query)
        if name := query.get("id", [""])[-1]:
            exchange.send_value({"requests": self._source.find(name, maybe=True)})
            return
        slow = query_number(exchange, "slow") or 0.0
        worker, failed = query.get("worker", [""])[-1], query.get("failed", ["0"])[-1] != "0"
        limit = int(query_number(exchange, "limit") or MAX_LISTED)
        stories = self._source.list_stories(slow, failed=failed, worker=worker, limit=limit)
        exchange.send_value({"requests": stories})

    async def causes(self, exchange: Exchange) -> None:
        """GET /causes?seconds=N: what made the requests of the last N seconds late."""
        seconds = query_number(exchange, "seconds")
        causes = self._source.group_causes(3600.0 if seconds is None else seconds)
        exchange.send_value({"causes": causes})

    async def slo(self, exchange: Exchange) -> None:
        """GET /slo: the share of requests that were answered right and in time."""
        exchange.send_value(await self._source.report_slo())

    async def activity(self, exchange: Exchange) -> None:
        """GET /activity?seconds=60: what the deployment does now, for `dynamo top`."""
        seconds = query_number(exchange, "seconds")
        exchange.send_value(self._source.show_activity(60.0 if seconds is None else seconds))

"""Faults of an API server, on request of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo.communication.http import Response
from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.kinds import Object


@dataclass
class Faults:
    """Faults of the next requests. Fields are set by a test at any time."""

    code: int = 0
    """Answer of all requests, such as 429, 500 or 401; 0: none."""
    code_of_watches: int = 0
    """Answer of watches alone, such as 410."""
    retry_after_s: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    """Requests wait while this event is cleared."""
    lost_answers: int = 0
    """So many writes are done and not answered."""
    stale_lists: dict[str, list[Object]] = field(default_factory=dict)
    """Items of the next lists, by the id of their kind."""

    def __post_init__(self) -> None:
        self.hanging.set()

    async def before(
        self, method: str, path: str, query: Mapping[str, str], response: Response
    ) -> bool:
        """Fail or delay a request. True: its answer is to be lost. Raises `ApiFailure`."""
        del path, response
        await self.hanging.wait()
        is_watch = query.get("watch") in ("true", "1")
        code = self.code or (self.code_of_watches if is_watch else 0)
        if code:
            text = "the server has received too many requests" if code == 429 else "a fault"
            raise ApiFailure(code, text, retry_after_s=self.retry_after_s)
        if self.lost_answers and method != "GET":
            self.lost_answers -= 1
            return True
        return False

    def stale(self, kind: str, items: list[Object]) -> list[Object]:
        """Return the items of a list: those of now, or stale ones."""
        return self.stale_lists.pop(kind, items)

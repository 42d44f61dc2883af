"""The stories that an observer keeps: the last ones, those that went wrong, and the slowest."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import chain, count
from typing import NamedTuple

from dynamo.telemetry.story import EndedStory

MAX_LAST, MAX_BAD, MAX_SLOW = 2_000, 500, 500
SLOW_PER_HOUR = 100
HOUR_S = 3600


class KeptStory(NamedTuple):
    """A story and the process that served its request."""

    story: EndedStory
    process: str


def is_moved(story: EndedStory) -> bool:
    """Return whether a request had more attempts than choices."""
    return len(story.attempts) > story.choices * story.prompts


class StoryStore:
    """The last stories, and, with budgets of their own, those that failed or moved and the slowest
    of each model and hour. A burst of good ones pushes none of those out."""

    def __init__(self) -> None:
        self._last: deque[KeptStory] = deque(maxlen=MAX_LAST)
        self._bad: deque[KeptStory] = deque(maxlen=MAX_BAD)
        self._slow: dict[tuple[int, str], list[tuple[int, int, KeptStory]]] = {}
        self._numbers = count()

    def add(self, entry: KeptStory) -> None:
        """Add a story."""
        story = entry.story
        self._last.append(entry)
        if story.end or is_moved(story):
            self._bad.append(entry)
            return
        key = int(story.wall_s) // HOUR_S, story.model
        slowest = self._slow.setdefault(key, [])
        ranked = (story.ended_us, next(self._numbers), entry)
        if len(slowest) < SLOW_PER_HOUR:
            heapq.heappush(slowest, ranked)
        else:
            heapq.heappushpop(slowest, ranked)
        while sum(map(len, self._slow.values())) > MAX_SLOW and len(self._slow) > 1:
            del self._slow[min(self._slow)]

    def all(self) -> list[KeptStory]:
        """Return all stories, the newest first."""
        slow = (entry for slowest in self._slow.values() for _, _, entry in slowest)
        entries = chain(self._last, self._bad, slow)
        stories = {(entry.story.request_id, entry.process): entry for entry in entries}
        return sorted(stories.values(), key=lambda entry: -entry.story.wall_s)

    def find(self, name: str) -> list[KeptStory]:
        """Return the stories with this request id, of the server or the client, or trace id, the
        newest first."""
        return self.select(
            lambda entry: name in (entry.story.request_id, entry.story.client_id, entry.story.trace)
        )

    def select(self, wanted: Callable[[KeptStory], bool]) -> list[KeptStory]:
        """Return the stories that are `wanted`, the newest first."""
        return [entry for entry in self.all() if wanted(entry)]

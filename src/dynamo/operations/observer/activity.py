"""The present of a deployment: its workers, and the pace of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.values import Load
from dynamo.operations.observer.timeline import LOAD_COLUMNS
from dynamo.telemetry.slo import FAILED
from dynamo.telemetry.story import EndedStory

KEPT_S = 120
MAX_TIMES = 200
"""So many times to the first token are kept of a second."""


class Second(msgspec.Struct):
    """The requests that ended in a second. Times in microseconds."""

    at: int
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    longest_gap_us: int = 0
    ttft_us: list[int] = []


class PaceRecorder:
    """Keeps a `Second` for each of the last `KEPT_S` seconds in which requests ended."""

    def __init__(self) -> None:
        self._seconds: dict[int, Second] = {}

    def add(self, story: EndedStory) -> None:
        """Count a request in the second of its end."""
        at = int(story.wall_s + story.ended_us / 1e6)
        second = self._seconds.get(at)
        if second is None:
            second = self._seconds[at] = Second(at)
            if len(self._seconds) > KEPT_S:
                del self._seconds[min(self._seconds)]
        second.requests += 1
        second.failed += story.slo == FAILED
        second.tokens += story.output_tokens
        second.longest_gap_us = max(second.longest_gap_us, story.gap_us)
        if story.first_us is not None and len(second.ttft_us) < MAX_TIMES:
            second.ttft_us.append(story.first_us)

    def show(self, now: float, seconds: int) -> Mapping[str, Sequence[Any]]:
        """Return the last seconds, one value each. `ttft`, `ttft_p95` and `gap` (the longest) are
        in seconds, None where no request ended. The present second is left out: its stories come
        later."""
        until = int(now) - 1
        rows = [self._seconds.get(at, Second(at)) for at in range(until - seconds, until)]
        sorted_times = [sorted(row.ttft_us) for row in rows]
        return {
            "at": [row.at for row in rows],
            "requests": [row.requests for row in rows],
            "failed": [row.failed for row in rows],
            "tokens": [row.tokens for row in rows],
            "ttft": [_quantile(times, 0.5) for times in sorted_times],
            "ttft_p95": [_quantile(times, 0.95) for times in sorted_times],
            "gap": [row.longest_gap_us / 1e6 if row.requests else None for row in rows],
        }


def _quantile(times: Sequence[int], share: float) -> float | None:
    return times[min(len(times) - 1, int(len(times) * share))] / 1e6 if times else None


def show_workers(
    loads: Mapping[str, Load], routed: Mapping[str, int], views: Mapping[str, str]
) -> Mapping[str, Mapping[str, Any]]:
    """Return the last load reports by worker. `routed`: how often it was chosen so far. `view`:
    how its cache is known to routers. `tiers` are its blocks in each memory tier, and for how many
    there is room."""
    return {
        name: {
            **{column: getattr(load, column) for column in LOAD_COLUMNS},
            "routed": routed.get(name, 0),
            "view": views.get(name, ""),
            "tiers": {tier.name: (tier.blocks, tier.capacity_blocks) for tier in load.tiers},
        }
        for name, load in sorted(loads.items())
    }

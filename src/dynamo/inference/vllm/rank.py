"""A data-parallel rank of vLLM: its load and the view of its prefix cache."""

from __future__ import annotations

from typing import Any

from dynamo.inference.engines.rank import ViewedRank

HUNG_S = 300.0
"""A rank hangs if it makes no step for this time after a request. Routers avoid it long before."""
MIN_WAIT_S = 20.0
"""Requests must have waited for so much of this time: a client may cancel one before its step."""


class VllmRank(ViewedRank):
    """A rank of an AsyncLLM. vLLM reports only while it computes, so that an idle rank is known by
    the requests that it was given."""

    preemptions = _running = 0
    _usage = _checked_s = _waited_s = 0.0
    _last_steps = -1
    _waiting_since_s: float | None = None

    def hangs(self, now: float) -> bool:
        """Whether the rank hangs at the time `now`. Call this often. Requests of a hung rank move
        elsewhere, and probes come and go."""
        elapsed_s, self._checked_s = now - self._checked_s, now
        if self.steps != self._last_steps:
            self._last_steps = self.steps
            self._waiting_since_s, self._waited_s = None, 0.0
        if self.answers:
            if self._waiting_since_s is None:
                self._waiting_since_s = now
            else:
                self._waited_s += elapsed_s
        if self._waiting_since_s is None or self._waited_s < MIN_WAIT_S:
            return False
        return now - self._waiting_since_s > HUNG_S

    def on_statistics(self, scheduler: Any, iteration: Any) -> None:
        """Take over vLLM's statistics of one step; each may be None."""
        self.steps += 1
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._usage = scheduler.kv_cache_usage
        if iteration is not None:
            self.preemptions += getattr(iteration, "num_preempted_reqs", 0)

    def count_running(self) -> int:
        return min(self._running, len(self.answers))

    def count_active_blocks(self) -> int:
        return round(self._usage * self.total_blocks) if self.answers else 0

"""The slots of one worker: how many more requests it can take at once."""

from __future__ import annotations

from math import inf

from dynamo.core.values import EngineInfo, Load

DEFAULT_MAX_REQUESTS = 1 << 20
"""Slots of a worker that announces no engine."""
MAX_REPORT_AGE_S = 1.0
"""A busy worker reports ten times a second. Older reports are ignored."""
NO_REPORTS = (0, 0, 0)
MIN_MEMORY_USE_RATIO = 0.05
FULL_MEMORY_SHARE = 0.9
"""A worker with waiting requests and this share of its KV blocks in use has no free slot."""


class WorkerCapacity:
    """The slots of one worker, or of one of its data-parallel ranks.

    `occupied` is the number of own requests that are answered here, `peak` the largest one since
    the last report; the ledger counts them. `foreign_requests` occupy slots but were not sent by
    this process. `reserved_tokens`: predicted size of the KV cache of the own requests.
    """

    __slots__ = (
        "_info",
        "_kv_capacity_tokens",
        "_last_report_s",
        "_max_requests",
        "_memory_full",
        "_memory_use_ratio",
        "_previous_peak",
        "_recent_foreign_requests",
        "foreign_requests",
        "free_slots",
        "occupied",
        "peak",
        "reserved_tokens",
    )

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._kv_capacity_tokens = 0
        self._max_requests = DEFAULT_MAX_REQUESTS
        self.occupied = self.peak = self._previous_peak = 0
        self.free_slots = 0
        self.foreign_requests = 0
        self.reserved_tokens = 0.0
        self._memory_use_ratio = 1.0
        self._memory_full = False
        self._recent_foreign_requests = NO_REPORTS
        self._last_report_s = -inf

    def configure(self, info: EngineInfo | None, max_requests: int) -> None:
        """Set the engine's sizes. `max_requests` 0 means no limit beyond the engine's."""
        self._info = info
        self._max_requests = info.max_num_seqs if info else DEFAULT_MAX_REQUESTS
        if max_requests:
            self._max_requests = min(self._max_requests, max_requests)
        self._kv_capacity_tokens = info.num_blocks * info.block_tokens if info else 0

    def on_load_report(self, load: Load, now: float) -> None:
        """Apply a load report, which is older than the requests known here.

        The peak of our requests since the report before the last is subtracted from the load. The
        largest of the last three remainders counts as foreign, because another frontend soon
        refills a slot in which its request has just ended.
        """
        self._last_report_s = now
        own = self.occupied
        peak = max(self.peak, self._previous_peak, own)
        self._previous_peak, self.peak = self.peak, own
        foreign = max(0, load.running + load.waiting - peak)
        self._recent_foreign_requests = (*self._recent_foreign_requests[1:], foreign)
        self.foreign_requests = max(self._recent_foreign_requests)
        self._memory_full = (
            load.waiting > 0 and load.active_blocks > FULL_MEMORY_SHARE * load.total_blocks > 0
        )
        info = self._info
        if info and self.reserved_tokens and own and not self.foreign_requests:
            share = min(1.0, load.active_blocks * info.block_tokens / self.reserved_tokens)
            ratio = self._memory_use_ratio + 0.1 * (share - self._memory_use_ratio)
            self._memory_use_ratio = max(MIN_MEMORY_USE_RATIO, ratio)

    def is_occupied(self, now: float) -> bool:
        """Whether requests are here. An idle worker is silent, so that its last report, of requests
        of others, is not replaced."""
        if self.occupied:
            return True
        return self.foreign_requests > 0 and now - self._last_report_s <= MAX_REPORT_AGE_S

    def count_free_slots(self, mean_kv_tokens: float, now: float) -> int:
        """Return how many more requests of `mean_kv_tokens` fit."""
        if now - self._last_report_s > MAX_REPORT_AGE_S:
            self.foreign_requests, self._memory_full = 0, False
            self._recent_foreign_requests = NO_REPORTS
        if self._memory_full:
            return 0
        occupied = self.occupied + self.foreign_requests
        free = self._max_requests - occupied
        if self._kv_capacity_tokens and occupied and free > 0:
            needed = mean_kv_tokens * self._memory_use_ratio
            left = self._kv_capacity_tokens - self.reserved_tokens * self._memory_use_ratio
            if left < free * needed:
                free = int(left / needed)
        return max(0, free)

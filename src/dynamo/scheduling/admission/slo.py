"""The service level objectives of admission."""

from __future__ import annotations

from math import inf

import msgspec

from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings


class SloLimits(msgspec.Struct, frozen=True):
    """The service level objectives that admission enforces. Without a `ttft_s`, a request with a
    predicted wait above `max_queue_wait_s` is rejected. `max_worker_requests` 0: the engine's."""

    ttft_s: float = inf
    max_queue_wait_s: float = 30.0
    max_worker_requests: int = 0
    queue_order: str = "fcfs"
    queue_bound: int = 4096
    disaggregation: DisaggregationSettings = DisaggregationSettings()

    @classmethod
    def from_settings(cls, router: RouterSettings) -> SloLimits:
        """Return the limits that the settings of the router contain."""
        return cls(
            ttft_s=router.ttft_slo or inf,
            max_queue_wait_s=router.max_queue_wait,
            max_worker_requests=router.max_worker_requests,
            queue_order=router.queue_order,
            queue_bound=router.queue_bound,
            disaggregation=router.disaggregation,
        )

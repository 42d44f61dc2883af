"""What is promised to a request, and so when it is better not taken."""

from __future__ import annotations

from math import inf

import msgspec

from dynamo.core.settings.schema_router import RouterSettings


class SloLimits(msgspec.Struct, frozen=True):
    """Seconds. `ttft_s`: a first token within that (inf: nothing is promised, and then nobody waits
    in queues longer than about `queue_wait_s`); `worker_cap`: requests that one worker is given at
    a time (0: as many as its engine works on); `order`, `bound`: of those that wait."""

    ttft_s: float = inf
    max_queue_wait_s: float = 30.0
    max_worker_requests: int = 0
    queue_order: str = "fcfs"
    queue_bound: int = 4096

    @classmethod
    def from_settings(cls, router: RouterSettings) -> SloLimits:
        """As the settings say."""
        return cls(
            ttft_s=router.ttft_slo or inf,
            max_queue_wait_s=router.max_queue_wait,
            max_worker_requests=router.max_worker_requests,
            queue_order=router.queue_order,
            queue_bound=router.queue_bound,
        )

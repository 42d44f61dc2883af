"""What is promised to a request, and so when it is better not taken."""

from __future__ import annotations

from math import inf

import msgspec

from dynamo.core.settings.schema_router import Router


class Promise(msgspec.Struct, frozen=True):
    """Seconds. `ttft_s`: a first token within that (inf: nothing is promised, and then nobody waits
    in queues longer than about `queue_wait_s`); `worker_cap`: requests that one worker is given at
    a time (0: as many as its engine works on); `order`, `bound`: of those that wait."""

    ttft_s: float = inf
    queue_wait_s: float = 30.0
    worker_cap: int = 0
    order: str = "fcfs"
    bound: int = 4096

    @classmethod
    def of(cls, router: Router) -> Promise:
        """As the settings say."""
        return cls(
            ttft_s=router.ttft_slo or inf,
            queue_wait_s=router.max_queue_wait,
            worker_cap=router.max_worker_requests,
            order=router.queue_order,
            bound=router.queue_bound,
        )

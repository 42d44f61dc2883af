"""The queued requests, in one queue for each set of required labels.

Requests that require other labels wait for other workers, so they never block each other. Within
one queue, only the first request can be next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from math import inf

from dynamo.core.labels import LABELS_KEY
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.features import find_excluded_workers
from dynamo.scheduling.router.queue import QueueOrderKey, WaitingQueue
from dynamo.scheduling.workers.durations import DequeueRate
from dynamo.telemetry.story import Story

DispatchKey = str
"""The key of one choice from admission to its first attempt: request id/choice. The keys of its
attempts in the ledger begin with it."""


class QueuedRequest:
    """A request without a worker yet. `labels` is its text of required labels, or "".

    Its first token is due `ttft_limit_s` after `arrived_s`. `slot_ready` is set while the request
    is in the queue; its result is set at dequeue. `cancel_timer` cancels the queue's time limit.
    `ahead`: requests before it at its arrival. `awaits_start`: there was no worker at its arrival,
    and a supervisor is expected to start one.
    """

    def __init__(
        self,
        request: GenerateRequest,
        now: float,
        ttft_limit_s: float,
        metadata: Mapping[str, str],
    ) -> None:
        self.request = request
        self.key: DispatchKey = f"{request.request_id}/{request.choice}"
        self.arrived_s = now
        self.ttft_limit_s = ttft_limit_s
        self.labels = metadata.get(LABELS_KEY, "")
        self.excluded_workers: frozenset[str] = frozenset()
        self.order_key = QueueOrderKey(now)
        self.queue_number = 0
        self.predicted_prefill_s = 0.0
        self.predicted_first_token_s: float | None = None
        self.awaits_start = False
        self.ahead = 0
        self.slot_ready: asyncio.Future[None] | None = None
        self.cancel_timer: Callable[[], None] | None = None

    def note_wait(self, story: Story | None) -> None:
        """Tell the story of the request what it waits for."""
        if story is not None:
            story.waited_for = "start" if self.awaits_start else "slot"
            story.ahead = self.ahead

    def set_order_key(self, prompt_tokens: int) -> None:
        """Set the key of the queue's order for a prompt of this length."""
        priority, due_s = self.request.priority, self.arrived_s + self.ttft_limit_s
        self.order_key = QueueOrderKey(self.arrived_s, prompt_tokens, priority, due_s)


class LabelQueues:
    """Hold queued requests by labels. `bound` limits their total number, `count`. `rate` is that at
    which the present workers take them."""

    def __init__(self, order: str, bound: int) -> None:
        self._order = order
        self._bound = bound
        self._queues = {"": WaitingQueue[QueuedRequest](order, bound)}
        self._excluded: dict[str, frozenset[str]] = {"": frozenset()}
        self._workers: frozenset[str] = frozenset()
        self.count = 0
        self.rate = DequeueRate()
        self._last_number = 0

    def push(self, queued: QueuedRequest) -> None:
        """Add a request by its `order_key`. Raises `Overloaded` when all queues are full."""
        queue = self._queues.get(queued.labels)
        if queue is None:
            queue = WaitingQueue(self._order, self._bound)
        if self.count >= self._bound:
            raise queue.overload_error()
        if not self.count:
            self.rate.skip_gap()
        self._last_number += 1
        queued.queue_number = self._last_number
        queue.push(str(queued.queue_number), queued, queued.order_key)
        self._queues[queued.labels] = queue
        self._excluded[queued.labels] = queued.excluded_workers
        self.count += 1

    def pop(self, queued: QueuedRequest, now: float | None = None) -> bool:
        """Remove a request. Returns False if it is not queued. Pass `now` if it has a slot."""
        queue = self._queues.get(queued.labels)
        if queue is None or queue.pop(str(queued.queue_number), now) is None:
            return False
        self.count -= 1
        if now is not None:
            self.rate.record_dequeue(now, self.count)
        if queued.labels and not queue:
            del self._queues[queued.labels], self._excluded[queued.labels]
        return True

    def first_requests(self, now: float) -> list[QueuedRequest]:
        """Return the first request of each queue, in the queue's order."""
        first = [request for queue in self._queues.values() for request in queue.ordered(now, 1)]
        if len(first) > 1:
            sort_key = self._queues[""].sort_key
            first.sort(key=lambda queued: (sort_key(queued.order_key), queued.queue_number))
        return first

    def count_ahead(self, queued: QueuedRequest) -> int:
        """Return the number of queued requests that take a slot of a suitable worker before.

        Of a queue with other labels, the share of its workers that suit counts.
        """
        ahead = 0.0
        for labels, queue in self._queues.items():
            before = queue.count_ahead(queued.order_key)
            excluded, share = self._excluded[labels], 1.0
            if before and excluded != queued.excluded_workers:
                suitable = len(self._workers - excluded - queued.excluded_workers)
                share = suitable / max(1, len(self._workers - excluded))
            ahead += before * share
        return round(ahead)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        """Match the labels of all queued requests with the present instances."""
        if self._workers != instances.keys():
            self._workers = frozenset(instances)
            self.rate.reset()
        for labels in self._excluded:
            self._excluded[labels] = find_excluded_workers(instances, labels)
        for queued in self:
            queued.excluded_workers = self._excluded[queued.labels]

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate over a copy of all requests, queue by queue."""
        return iter([item for queue in self._queues.values() for item in queue.ordered(inf)])

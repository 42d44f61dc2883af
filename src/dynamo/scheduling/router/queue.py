"""Requests that have not been placed yet, and their queues: order, bound, starvation."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import takewhile
from math import dist, inf, log2
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from dynamo.core.errors import ConfigError, DynamoError, Overloaded
from dynamo.scheduling.router.clustering import EPS
from dynamo.scheduling.router.features import NO_CONSTRAINTS
from dynamo.scheduling.workers.durations import DequeueRate
from dynamo.scheduling.workers.prompt import Prompt

if TYPE_CHECKING:
    from dynamo.scheduling.router.policy import Decision
    from dynamo.scheduling.workers.tier_queues import BlockLoad


class PendingRequest:
    """A request in the placement solver. `overlaps`: worker -> leading prompt blocks that it need
    not compute, as of `overlaps_updated_s`. `loads`: the part of them that lies below its device.
    `excluded`: ids of instances and names of ranks that the request must not go to.
    `constraints`: requested labels, for selectors. `decision_future`: resolved with the decision.
    `priority` and `deadline_s` order the queue; times are in seconds of the router's clock."""

    __slots__ = (
        "arrived_s",
        "block_tokens",
        "constraints",
        "deadline_s",
        "decision_future",
        "excluded",
        "id",
        "loads",
        "max_tokens",
        "overlaps",
        "overlaps_updated_s",
        "priority",
        "prompt",
    )

    def __init__(
        self,
        id: str,  # noqa: A002
        prompt: Prompt,
        block_tokens: int,
        now: float,
        excluded: AbstractSet[str] = frozenset(),
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.block_tokens = block_tokens
        self.excluded = excluded
        self.arrived_s = now
        self.overlaps_updated_s = now
        self.overlaps: dict[str, int] = {}
        self.loads: dict[str, BlockLoad] = {}
        self.constraints = NO_CONSTRAINTS
        self.priority = self.max_tokens = 0
        self.deadline_s = inf
        self.decision_future: asyncio.Future[Decision] | None = None

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the worker with the longest overlap would compute, at least 1."""
        blocks = max(self.overlaps.values(), default=0)
        return max(1, self.prompt.tokens - blocks * self.block_tokens)

    def uncached_tokens(self, worker: str) -> int:
        """Return the prompt tokens that `worker` would compute; the last token always."""
        tokens = self.prompt.tokens - self.overlaps.get(worker, 0) * self.block_tokens
        return max(1, tokens)

    def tier_blocks(self, worker: str) -> dict[str, int]:
        """Return tier -> prompt blocks that `worker` would load from it."""
        load = self.loads.get(worker)
        return load.by_tier() if load else {}

    def is_short_everywhere(self, workers: int, most_tokens: int) -> bool:
        """Whether all `workers` have the same overlap, and would compute at most `most_tokens`. A
        request that loads blocks is not, since the queues of its tiers differ."""
        if self.loads:
            return False
        depths = self.overlaps.values()
        overlap = next(iter(depths), 0)
        return (
            self.prompt.tokens - overlap * self.block_tokens <= most_tokens
            and len(depths) in {0, workers}
            and len(set(depths)) <= 1
        )


T = TypeVar("T")

PRIORITY_STEP_S = 1.0
"""Time that one step of priority is worth in orders by time."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0


class QueueOrderKey(msgspec.Struct, frozen=True):
    """The sort properties of a queued item. Times are on the caller's clock, `prefill_tokens` are
    prompt tokens to compute, and a higher `priority` goes first."""

    arrived_s: float
    prefill_tokens: int = 0
    priority: int = 0
    deadline_s: float = inf
    max_tokens: int = 0


QueueOrderable = QueueOrderKey | PendingRequest


def first_come_first_served(item: QueueOrderable) -> float:
    """Order by arrival."""
    return item.arrived_s - PRIORITY_STEP_S * item.priority


def weighted_shortest_first(item: QueueOrderable) -> float:
    """Order by work over weight: Smith's rule, which minimises the weighted mean wait."""
    if item.priority >= 0:
        return item.prefill_tokens / (1 + item.priority)
    return float(item.prefill_tokens * (1 - item.priority))


def earliest_deadline_first(item: QueueOrderable) -> float:
    """Order by deadline; items without a deadline come last, by arrival."""
    return item.deadline_s - PRIORITY_STEP_S * item.priority


QUEUE_ORDERS: dict[str, Callable[[QueueOrderable], float]] = {
    "fcfs": first_come_first_served,
    "shortest": weighted_shortest_first,
    "deadline": earliest_deadline_first,
}

CLUSTER_S, MAX_MEMBERS = 1.0, 64


class ClusterOrder:
    """Orders similar requests together: by the arrival of the first one of their cluster. A request
    joins the cluster of a recent one whose prompt and answer have about its lengths, for a time."""

    def __init__(self) -> None:
        self._members: deque[tuple[tuple[float, float], float]] = deque(maxlen=MAX_MEMBERS)

    def __call__(self, item: QueueOrderable) -> float:
        point = log2(item.prefill_tokens + 1), log2(item.max_tokens + 1)
        begin_s = item.arrived_s
        for member, since_s in self._members:
            if 0 <= item.arrived_s - since_s <= CLUSTER_S and dist(point, member) <= EPS:
                begin_s = since_s
                break
        if (point, begin_s) not in self._members:
            self._members.append((point, begin_s))
        return begin_s - PRIORITY_STEP_S * item.priority


QUEUE_ORDERS_WITH_STATE: dict[str, Callable[[], Callable[[QueueOrderable], float]]] = {
    "clusters": ClusterOrder
}
"""Orders of which each queue has its own."""

_SortKey = tuple[float, float, int]


class WaitingQueue(Generic[T]):
    """A bounded priority queue. Items that have waited `starvation_s` go before all others, oldest
    first, so that no order starves an item. The caller passes all times."""

    def __init__(self, order: str = "fcfs", bound: int = 1024, starvation_s: float = inf) -> None:
        """`order` is a key of QUEUE_ORDERS or QUEUE_ORDERS_WITH_STATE. Raises `ConfigError` for
        others."""
        if order in QUEUE_ORDERS_WITH_STATE:
            self.sort_key = QUEUE_ORDERS_WITH_STATE[order]()
        elif order in QUEUE_ORDERS:
            self.sort_key = QUEUE_ORDERS[order]
        else:
            known = ", ".join((*QUEUE_ORDERS, *QUEUE_ORDERS_WITH_STATE))
            raise ConfigError(f"unknown queue order {order!r}", hint=f"known: {known}")
        self._bound = bound
        self._starvation_s = starvation_s
        self._sorted: list[tuple[_SortKey, str]] = []
        self._entries: dict[str, tuple[_SortKey, QueueOrderable, T]] = {}
        self._count = 0
        self._departures = DequeueRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def over_bound(self) -> bool:
        """Whether the queue is longer than its bound."""
        return len(self._entries) > self._bound

    def push(self, name: str, item: T, key: QueueOrderable, *, bounded: bool = True) -> None:
        """Add `item` as `name`, which must not be queued yet. Raises `Overloaded` when the queue is
        full, unless `bounded` is False."""
        if bounded and len(self._entries) >= self._bound:
            raise self.overload_error()
        if not self._entries:
            self._departures.skip_gap()
        self._count += 1
        sort_key = (self.sort_key(key), key.arrived_s, self._count)
        insort(self._sorted, (sort_key, name))
        self._entries[name] = (sort_key, key, item)

    def overload_error(self) -> Overloaded:
        """Return the error for an item that does not fit, with the time until a place is free."""
        return Overloaded(
            f"the queue is full: {self._bound} requests wait for a worker",
            hint="router.queue_bound is the limit; more workers shorten the queue",
            retry_after_s=self.estimate_wait_s(),
        )

    def count_ahead(self, key: QueueOrderable) -> int:
        """Return the number of items that would be before a new item with this key."""
        return bisect_left(self._sorted, ((self.sort_key(key), key.arrived_s, self._count + 1), ""))

    def pop(self, name: str, now: float | None = None) -> T | None:
        """Remove and return an item; None if it is not queued. Pass `now` if a worker was found:
        the times of such departures predict the wait."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        sort_key, _, item = entry
        del self._sorted[bisect_left(self._sorted, (sort_key, name))]
        if now is not None:
            self._departures.record_dequeue(now, len(self._entries))
        return item

    def ordered(self, now: float, limit: int | None = None) -> list[T]:
        """Return the first `limit` items in order (None: all)."""
        starving = self._starving(now)
        if not starving:
            return [self._entries[name][2] for _, name in self._sorted[:limit]]
        first = set(starving)
        names = starving + [name for _, name in self._sorted if name not in first]
        return [self._entries[name][2] for name in names[:limit]]

    def iter_ordered(self, now: float) -> Iterator[T]:
        """Iterate over all items in order. Items may be removed meanwhile."""
        if self._starving(now):
            return iter(self.ordered(now))
        entries = self._entries
        return (entries[name][2] for _, name in self._sorted.copy() if name in entries)

    def estimate_wait_s(self) -> float:
        """Return the predicted wait of the last item, from the recent departures."""
        wait_s = self._departures.predict_wait_s(len(self._entries) - 1)
        return min(max(wait_s, RETRY_MIN_S), RETRY_MAX_S)

    def _starving(self, now: float) -> list[str]:
        """Return the starving items; the dict is in order of arrival."""
        latest = now - self._starvation_s
        starving = takewhile(lambda entry: entry[1][1].arrived_s <= latest, self._entries.items())
        return [name for name, _ in starving]


class PendingRequestQueue:
    """All pending requests of a solver. A new request is not sorted until its first round ends
    without a worker for it. After that round, the request enters `queue`, or is rejected if the
    queue is full. A request that arrives during a round is new in the next one."""

    def __init__(self, queue: WaitingQueue[PendingRequest]) -> None:
        self._queue = queue
        self._arrived: dict[str, PendingRequest] = {}
        self._new: dict[str, PendingRequest] = {}
        self._all: dict[str, PendingRequest] = {}
        self._rejected: list[tuple[PendingRequest, DynamoError]] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[PendingRequest]:
        """Iterate in order of arrival."""
        return iter(self._all.values())

    def still_pending(self, requests: Iterable[PendingRequest]) -> list[PendingRequest]:
        """Return those of `requests` that were not removed."""
        return [request for request in requests if self._all.get(request.id) is request]

    def add(self, request: PendingRequest) -> None:
        """Add a new request."""
        self._arrived[request.id] = self._all[request.id] = request

    def remove(self, request: PendingRequest, now: float | None = None) -> None:
        """Remove a request; unknown requests are ignored. Pass `now` if it was placed."""
        if self._all.get(request.id) is request:
            del self._all[request.id]
            self._arrived.pop(request.id, None)
            self._new.pop(request.id, None)
            self._queue.pop(request.id, now)

    @property
    def new_requests(self) -> Collection[PendingRequest]:
        """The requests that arrived before this round and after the last one."""
        return self._new.values()

    def begin_round(self) -> None:
        """Begin a round with the requests that are pending now."""
        self._new.update(self._arrived)
        self._arrived.clear()

    def ordered(self, now: float) -> Iterable[PendingRequest]:
        """Return the requests of the round in queue order, also those beyond the bound: a request
        that finds a worker needs no place in the queue. Requests may be removed meanwhile; those
        that were not yielded yet may then be yielded although they are not pending."""
        if len(self._queue):
            self._push_new()
            return self._queue.iter_ordered(now)
        new = list(self._new.values())
        if len(new) > 1:
            new.sort(key=self._queue.sort_key)
        return new

    def end_round(self) -> None:
        """End a round: queue the new requests, and reject the latest of them beyond the bound."""
        self._push_new()
        queue, excess = self._queue, []
        while queue.over_bound and self._new:
            excess.append(self._new.popitem()[1])
            queue.pop(excess[-1].id)
        self._new.clear()
        for request in reversed(excess):
            del self._all[request.id]
            self._rejected.append((request, queue.overload_error()))

    def _push_new(self) -> None:
        for request in self._new.values():
            if request.id not in self._queue:
                self._queue.push(request.id, request, request, bounded=False)

    def reject(self, request: PendingRequest, error: DynamoError) -> None:
        """Remove a request and keep `error` for `pop_rejected`."""
        self.remove(request)
        self._rejected.append((request, error))

    def pop_rejected(self) -> list[tuple[PendingRequest, DynamoError]]:
        """Return the requests rejected since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

"""The first operator: takes a request whose promise can be kept, and holds it until a worker has a
place for it; turns it away at once otherwise.

Workers get no more than they have places for, so that whoever waits can still go to the worker that
becomes free first, whatever the router's mode is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Operator, Reply, SendRequest
from dynamo.core.values import GenerateRequest, Load
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission.capacity import ClusterCapacity
from dynamo.scheduling.admission.in_flight import InFlight
from dynamo.scheduling.admission.queued_request import DequeueRate, DispatchKey, QueuedRequest
from dynamo.scheduling.admission.slo import SloLimits
from dynamo.scheduling.router.attempt import AttemptListener
from dynamo.scheduling.router.labels import excluded_workers
from dynamo.scheduling.router.placement.queue import QueueOrderKey, WaitingQueue
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.router.worker_state import WorkerStates
from dynamo.telemetry import Registry

MAX_CHECKED_TTFT_S = 30.0
"""No prefill is weighed against a limit beyond this."""
RECHECK_INTERVAL_S = 0.25
"""While requests wait, places are counted anew so often, whatever was reported or not."""
NO_WORKERS_TIMEOUT_S = 30.0
"""Who waits already does so for so long when there is no worker any more."""
TTFT_RESERVE_SHARE = 0.05
"""Of a promised first token's time, for the way to the client."""
QUEUE_TIMEOUT_FACTOR = 2.0
"""Who waits longer than predicted, without a promise, goes after so many times the limit."""
MAX_RETRY_AFTER_S = 60.0
MAX_SCANNED_REQUESTS = 32
"""So many that wait are looked at for one that may go."""
WAIT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Admission(Operator):
    """Before everything that may send a request more than once: what was let in is not asked
    again. Its `follow` is for the router: who is with a worker is known by that."""

    def __init__(
        self,
        client: Client,
        policy: Policy | None,
        clock: Clock,
        limits: SloLimits | None = None,
        metrics: Registry | None = None,
    ) -> None:
        self.limits = limits or SloLimits()
        self._ttft_limit_s = inf
        self._client = client
        self._clock = clock
        self.capacity = ClusterCapacity(self.limits.max_worker_requests, clock.now)
        kept = policy.worker_states if policy is not None else None
        self._worker_states = kept or WorkerStates()
        self._owns_worker_states = kept is None
        self._in_flight = InFlight(clock, self.capacity, self._worker_states, self._dequeue_ready)
        self._queue: WaitingQueue[QueuedRequest] = WaitingQueue(
            self.limits.queue_order, self.limits.queue_bound
        )
        self._dispatching: dict[DispatchKey, QueuedRequest | None] = {}
        self._last_queue_number = 0
        self._last_retry_at_s = 0.0
        self._dequeue_rate = DequeueRate()
        self._no_workers_since_s: float | None = None
        self._cancel_recheck: Callable[[], None] | None = None
        self._declare_metrics(metrics or Registry())
        self._unsubscribe = client.on_change(self._on_instances_changed)
        self.update(self.limits)

    def _declare_metrics(self, registry: Registry) -> None:
        self._waiting_gauge = registry.gauge(
            "dynamo_admission_waiting_requests", "Requests that wait for a place at a worker"
        )
        self._wait_histogram = registry.histogram(
            "dynamo_admission_wait_seconds",
            "Waiting for a place, of those that waited",
            WAIT_BUCKETS_S,
        )
        self._rejection_counter = registry.counter(
            "dynamo_admission_rejected_total",
            "Requests turned away because what was promised could not be kept",
            ("reason",),
        )

    def update(self, promise: SloLimits) -> None:
        """This holds from now on, but for `order` and `bound`, which are those of the beginning.
        Who waits already has the old one."""
        self.limits = promise
        self._ttft_limit_s = promise.ttft_s * (1 - TTFT_RESERVE_SHARE)
        self.capacity.max_worker_requests = promise.max_worker_requests
        self._in_flight.updates_worker_states = self._owns_worker_states and promise.ttft_s < inf
        self._on_instances_changed()

    def close(self) -> None:
        """Follow the workers no more. Who waits goes on."""
        self._unsubscribe()

    def on_load_report(self, worker: str, load: Load, now: float) -> None:
        """A worker's own word about its load."""
        self.capacity.on_load_report(worker, load, now)
        if len(self._queue):
            self._dequeue_ready()

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        """Raises `Overloaded` where the request is not taken, saying when it might be."""
        key = (request.request_id, request.choice)
        ticket = None if self._can_skip_queue(context) else self._admit_or_enqueue(request, context)
        if ticket is None or ticket.slot_ready is None:
            self._dispatching[key] = ticket
        else:
            await self._wait_for_slot(ticket, ticket.slot_ready)
        try:
            full = self.capacity.full_workers if self.capacity.free_slots else None
            if not full:
                return await call_next(request, context, reply)
            try:  # any worker that has a place; where those are gone, any
                await call_next(request, replace(context, avoid=(*context.avoid, *full)), reply)
            except NoWorkers:
                await call_next(request, context, reply)
        finally:
            if key in self._dispatching:
                del self._dispatching[key]
                self._dequeue_ready()

    def track_attempt(self, instance: Instance, request: GenerateRequest) -> AttemptListener:
        """Return the listener that counts this attempt as in flight (a `ListenerFactory` of the
        router). From here on it occupies a slot of that worker."""
        queued = self._dispatching.pop((request.request_id, request.choice), None)
        predicted_s = None if queued is None else queued.predicted_first_token_s
        return self._in_flight.track(instance, request, predicted_s)

    def _can_skip_queue(self, context: Context) -> bool:
        """Nobody waits, any worker will do, there is a place, and a prefill is no matter."""
        if (
            context.metadata
            or self.capacity.free_slots <= len(self._dispatching)
            or len(self._queue)
        ):
            return False
        limit_s = context.timeout_s
        return self._ttft_limit_s >= MAX_CHECKED_TTFT_S and (
            limit_s is None or limit_s >= MAX_CHECKED_TTFT_S
        )

    def _admit_or_enqueue(self, request: GenerateRequest, context: Context) -> QueuedRequest:
        """Let in: at once where it has no `turn` to wait for. Raises `Overloaded`."""
        limit_s = self._ttft_limit_s
        if context.timeout_s is not None and context.timeout_s < limit_s:
            limit_s = context.timeout_s
        ticket = QueuedRequest(request, self._clock.now(), limit_s)
        if context.metadata:
            ticket.excluded_workers = excluded_workers(self._client.instances, context)
        if not self._client.instances:
            return ticket  # the router knows what to say
        prompt, between = len(request.token_ids) // TOKEN_BYTES, len(self._dispatching)
        if len(self._queue) or not self._has_free_slot(ticket):
            ticket.predicted_prefill_s = self._in_flight.predict_prefill_s(prompt, between)
            self._enqueue(ticket, prompt)
        elif limit_s < MAX_CHECKED_TTFT_S and (
            ticket.excluded_workers or self.capacity.idle_workers <= between
        ):
            self._reject_over_limit(
                ticket, 0.0, self._in_flight.predict_prefill_s(prompt, between, limit_s)
            )
        return ticket

    def _enqueue(self, ticket: QueuedRequest, prompt: int) -> None:
        """Queue, or be turned away."""
        request, now = ticket.request, ticket.arrived_s
        rank = QueueOrderKey(now, prompt, request.priority, now + ticket.ttft_limit_s)
        ahead = self._queue.count_ahead(rank) + len(self._dispatching)
        wait_s = self.capacity.predict_wait_s(ahead, request.stops.max_tokens)
        if self.capacity.has_foreign_requests:
            wait_s = max(wait_s, self._dequeue_rate.predict_wait_s(ahead))
        margin_s = min(self._in_flight.compute_margin_s(), ticket.ttft_limit_s / 2)
        predicted_s = wait_s + ticket.predicted_prefill_s
        self._reject_over_limit(ticket, wait_s, predicted_s + margin_s)
        ticket.predicted_first_token_s = now + predicted_s
        self._last_queue_number += 1
        ticket.queue_id = str(self._last_queue_number)
        try:
            self._queue.push(ticket.queue_id, ticket, rank)
        except Overloaded:
            self._rejection_counter.labels("queue_full").inc()
            raise
        ticket.slot_ready = asyncio.get_running_loop().create_future()
        if self._ttft_limit_s < inf:
            at = now + self._ttft_limit_s - ticket.predicted_prefill_s
        else:
            at = now + self.limits.max_queue_wait_s * QUEUE_TIMEOUT_FACTOR
        ticket.cancel_timer = self._clock.call_at(at, lambda: self._shed_overdue(ticket))
        self._waiting_gauge.inc()
        self._schedule_recheck()

    def _reject_over_limit(
        self, ticket: QueuedRequest, wait_s: float, first_token_s: float
    ) -> None:
        """Raises `Overloaded` where a promise would be broken and no worker is idle."""
        limit_s = ticket.ttft_limit_s
        if first_token_s > limit_s:
            over_s = first_token_s - limit_s
        elif self.limits.ttft_s == inf and wait_s > self.limits.max_queue_wait_s:
            over_s = wait_s - self.limits.max_queue_wait_s
        else:
            return
        if self.capacity.has_idle_worker(ticket.excluded_workers):
            return
        if first_token_s <= limit_s:
            reason, limit_s = "queue_wait", self.limits.max_queue_wait_s
            hint = "router.max_queue_wait is the limit; more workers would take it"
        elif limit_s < self._ttft_limit_s:
            reason, hint = "deadline", "the request's own time is the limit"
        else:
            reason, hint = "ttft", "router.ttft_slo is the promise; more workers would keep it"
        self._rejection_counter.labels(reason).inc()
        bound = ticket.request.stops.max_tokens
        raise Overloaded(
            f"a first token is expected in {first_token_s:.2f} s, which is beyond {limit_s:g} s",
            hint=hint,
            retry_after_s=self._retry_after_s(over_s, bound),
        )

    def _retry_after_s(self, over_s: float, bound: int) -> float:
        """In how long it should come again: those turned away are told one after the other, as
        places become free, so that they do not all come back at once."""
        now = self._clock.now()
        self._last_retry_at_s = max(
            now + over_s, self._last_retry_at_s + self.capacity.predict_gap_s(bound)
        )
        self._last_retry_at_s = min(self._last_retry_at_s, now + MAX_RETRY_AFTER_S)
        return self._last_retry_at_s - now

    async def _wait_for_slot(self, ticket: QueuedRequest, turn: asyncio.Future[None]) -> None:
        try:
            await turn
        except BaseException:
            if self._queue.pop(ticket.queue_id) is None:
                self._dispatching.pop(ticket.key, None)
                self._dequeue_ready()
            raise
        finally:
            self._waiting_gauge.dec()
            self._wait_histogram.observe(self._clock.now() - ticket.arrived_s)
            if ticket.cancel_timer is not None:
                ticket.cancel_timer()

    def _shed_overdue(self, ticket: QueuedRequest) -> None:
        """Its time has come, but no place: what was predicted did not happen."""
        turn = ticket.slot_ready
        if turn is None or turn.done() or self._queue.pop(ticket.queue_id) is None:
            return
        self._rejection_counter.labels("late").inc()
        if ticket.predicted_first_token_s is not None:
            self._in_flight.record_prediction_error(
                ticket.predicted_first_token_s, self._clock.now() + ticket.predicted_prefill_s
            )
        waited_s = self._clock.now() - ticket.arrived_s
        turn.set_exception(
            Overloaded(
                f"no worker became free in {waited_s:.3g} s",
                hint="router.ttft_slo and router.max_queue_wait are the limits; more workers would "
                "keep them",
                retry_after_s=self._retry_after_s(0.0, ticket.request.stops.max_tokens),
            )
        )

    def _dequeue_ready(self) -> None:
        """Whoever is first goes as long as there are places."""
        while len(self._queue) and self.capacity.free_slots > len(self._dispatching):
            for ticket in self._queue.ordered(self._clock.now(), MAX_SCANNED_REQUESTS):
                if self._has_free_slot(ticket):
                    break
            else:
                return
            self._queue.pop(ticket.queue_id, self._clock.now())
            self._dispatching[ticket.key] = ticket
            self.capacity.assign_next_slot(ticket.request.stops.max_tokens)
            self._dequeue_rate.record_dequeue(self._clock.now(), len(self._queue))
            if ticket.slot_ready is not None and not ticket.slot_ready.done():
                ticket.slot_ready.set_result(None)

    def _has_free_slot(self, ticket: QueuedRequest) -> bool:
        taken = len(self._dispatching)
        if not ticket.excluded_workers:
            return self.capacity.free_slots > taken
        desks = self.capacity.workers.items()
        return (
            sum(desk.free_slots for name, desk in desks if name not in ticket.excluded_workers)
            > taken
        )

    def _on_instances_changed(self) -> None:
        live = self._client.instances
        if self._owns_worker_states:
            self._worker_states.update_instances(
                live if self._in_flight.updates_worker_states else {}
            )
        self.capacity.update_workers(
            live, {book.name: book for book in self._worker_states.workers}
        )
        if live:
            self._no_workers_since_s = None
        elif self._no_workers_since_s is None:
            self._no_workers_since_s = self._clock.now()
        self._dequeue_ready()

    def _release_all(self) -> None:
        """No worker has come for long: the router knows what to say."""
        for ticket in self._queue.ordered(self._clock.now()):
            self._queue.pop(ticket.queue_id)
            if ticket.slot_ready is not None and not ticket.slot_ready.done():
                ticket.slot_ready.set_result(None)

    def _schedule_recheck(self) -> None:
        if self._cancel_recheck is None:
            self._cancel_recheck = self._clock.call_at(
                self._clock.now() + RECHECK_INTERVAL_S, self._recheck
            )

    def _recheck(self) -> None:
        self._cancel_recheck = None
        alone_s = self._no_workers_since_s
        if alone_s is not None and self._clock.now() - alone_s >= NO_WORKERS_TIMEOUT_S:
            self._release_all()
        if len(self._queue):
            self.capacity.refresh()
            self._dequeue_ready()
            self._schedule_recheck()

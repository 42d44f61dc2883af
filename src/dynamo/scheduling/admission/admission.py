"""The admission operator: accept a request that can meet its limits, and queue it for a slot.

Workers get no more requests than they have slots. A queued request can therefore still go to the
worker that becomes free first, in every mode of the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, NoWorkers, Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Operator, Reply, SendRequest
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import GenerateRequest, Load
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.admission.capacity import ClusterCapacity
from dynamo.scheduling.admission.first_tokens import FirstTokens, PromptWorkers
from dynamo.scheduling.admission.label_queues import DispatchKey, LabelQueues, QueuedRequest
from dynamo.scheduling.admission.worker_starts import WorkerStarts
from dynamo.scheduling.router.features import excluded_workers
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.telemetry import Registry
from dynamo.telemetry.story import current_story

MAX_CHECKED_TTFT_S = 30.0
"""Prefill times are not compared with limits above this."""
RECHECK_INTERVAL_S = 0.25
"""While requests wait, slots are recounted this often even without load reports."""
NO_WORKERS_TIMEOUT_S = 30.0
"""Queued requests are released, and so fail, after this time without any worker."""
TTFT_RESERVE_SHARE = 0.05
"""Share of the TTFT limit that is reserved for the way to the client."""
QUEUE_TIMEOUT_FACTOR = 2.0
"""Without a TTFT limit a request leaves the queue after this multiple of `max_queue_wait_s`."""
MAX_RETRY_AFTER_S = 60.0
WAIT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Admission(Operator):
    """Accept, queue or reject requests.

    The operator stands before migration, so that a retried request is not admitted twice. Between
    the queue and its first entry in the ledger a request is in `_dispatching`, which holds None for
    a request that skipped the queue.
    """

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        policy: Policy | None,
        clock: Clock,
        settings: RouterSettings | None = None,
        metrics: Registry | None = None,
        starts: WorkerStarts | None = None,
        prefill_client: Client | None = None,
    ) -> None:
        settings = settings or RouterSettings()
        self._client, self._ledger = client, ledger
        self._starts, self._clock = starts, clock
        self.capacity = ClusterCapacity(ledger.workers, settings.max_worker_requests, clock.now)
        self._prompt_workers = PromptWorkers(ledger, prefill_client, policy)
        self._first_tokens = FirstTokens(ledger, clock, self.capacity, self._prompt_workers)
        ledger.on_placed.append(self._on_placed)
        ledger.on_ended.append(self._on_ended)
        self._queue = LabelQueues(settings.queue_order, settings.queue_bound)
        self._dispatching: dict[DispatchKey, QueuedRequest | None] = {}
        self._last_retry_at_s = 0.0
        self._no_workers_since_s: float | None = None
        self._cancel_recheck: Callable[[], None] | None = None
        registry = metrics or Registry()
        self._waiting_gauge = registry.gauge(
            "dynamo_admission_waiting_requests", "Requests that wait for a slot at a worker"
        )
        self._wait_histogram = registry.histogram(
            "dynamo_admission_wait_seconds", "Time that queued requests waited", WAIT_BUCKETS_S
        )
        self._rejection_counter = registry.counter(
            "dynamo_admission_rejected_total",
            "Requests rejected by admission",
            ("reason",),
            known=("queue_full", "queue_wait", "deadline", "ttft", "late"),
        )
        clients = [client, prefill_client] if prefill_client is not None else [client]
        self._stop_listening = [each.on_change(self._on_instances_changed) for each in clients]
        self.update(settings)

    def update(self, settings: RouterSettings) -> None:
        """Apply reloaded limits, except the queue's order and bound. Queued requests keep the old
        ones. Without a `ttft_slo`, a predicted wait above `max_queue_wait` rejects a request."""
        self._limited = bool(settings.ttft_slo)
        self._ttft_limit_s = (settings.ttft_slo or inf) * (1 - TTFT_RESERVE_SHARE)
        self._max_queue_wait_s = settings.max_queue_wait
        self._disaggregation = settings.disaggregation
        self.capacity.max_worker_requests = settings.max_worker_requests
        self._on_instances_changed()

    def close(self) -> None:
        """Stop following the instances. Queued requests continue."""
        for stop in self._stop_listening:
            stop()

    def count_requests(self) -> tuple[int, int, int]:
        """Return how many requests are queued, are between queue and worker, and are at workers."""
        return self._queue.count, len(self._dispatching), len(self._ledger.requests)

    def on_load_report(self, worker: str, load: Load, now: float) -> None:
        """Follow a worker's load report, which the ledger has."""
        del load
        self.capacity.recount(worker, now)
        if self._queue.count:
            self._dequeue_ready()

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        """Send the request once it has a slot. Raises `Overloaded` with `retry_after_s` when the
        request is rejected."""
        if (story := current_story.get()) is not None:
            story.admitting_s, story.admitted = self._clock.now(), request
        key = f"{request.request_id}/{request.choice}"
        queued = None if self._can_skip_queue(context) else self._admit_or_enqueue(request, context)
        if queued is None or queued.slot_ready is None:
            self._dispatching[key] = queued
        else:
            await self._wait_for_slot(queued, queued.slot_ready)
        try:
            full = self.capacity.full_workers if self.capacity.free_slots else None
            if not full:
                return await call_next(request, context, reply)
            try:  # prefer workers with a free slot; without those, use any worker
                return await call_next(
                    request, replace(context, avoid=(*context.avoid, *full)), reply
                )
            except NoWorkers:
                return await call_next(request, context, reply)
        except NoWorkers:
            if self._client.instances or self._starts is None or not self._starts.is_expected:
                raise
        finally:
            if key in self._dispatching:
                del self._dispatching[key]
                self._dequeue_ready()
        return await self.send(request, context, reply, call_next)  # the last worker died

    def _on_placed(self, placed: PlacedRequest) -> None:
        """End the dispatch of a request that has a worker."""
        if placed.peer:
            return
        queued = self._dispatching.pop(placed.key.rpartition("/")[0], None)
        if queued is not None:
            placed.predicted_first_token_s = queued.predicted_first_token_s
        if self._ledger.models_prompts:
            self._first_tokens.add_excess(placed)
        self.capacity.reserve(placed, placed.placed_s)

    def _on_ended(self, placed: PlacedRequest, error: BaseException | None) -> None:
        """Learn from requests that ended well, and give the slot to the next one."""
        if placed.peer:
            return
        if placed.excess_ms:
            self._prompt_workers.remove_excess(placed)
        now = self._clock.now()
        if not isinstance(error, DynamoError):
            durations, tokens = self.capacity.durations, placed.output_tokens
            durations.observe(placed.max_tokens, now - placed.placed_s)
            if tokens and placed.first_token_s is not None:
                durations.observe_output(placed.max_tokens, tokens, now - placed.first_token_s)
        self.capacity.release(placed, now)
        self._dequeue_ready()

    def _can_skip_queue(self, context: Context) -> bool:
        """Whether a slot is free for a request without label constraints or a tight limit."""
        taken = len(self._dispatching)
        if context.metadata or self.capacity.free_slots <= taken or self._queue.count:
            return False
        timeout_s = context.timeout_s
        return self._ttft_limit_s >= MAX_CHECKED_TTFT_S and (
            timeout_s is None or timeout_s >= MAX_CHECKED_TTFT_S
        )

    def _admit_or_enqueue(self, request: GenerateRequest, context: Context) -> QueuedRequest:
        """Return the accepted request. Without a `slot_ready` it need not wait."""
        limit_s = self._ttft_limit_s
        if context.timeout_s is not None and context.timeout_s < limit_s:
            limit_s = context.timeout_s
        queued = QueuedRequest(request, self._clock.now(), limit_s, context.metadata)
        if context.metadata:
            queued.excluded_workers = excluded_workers(self._client.instances, context)
        prompt_tokens = len(request.token_ids) // TOKEN_BYTES
        if not self._client.instances:
            self._hold_for_start(queued, prompt_tokens)
            return queued  # the router raises the error of a request that is not held
        if self._queue.count:
            self._dequeue_ready()
        taken = len(self._dispatching)
        predict_prefill_s = self._first_tokens.predict_prefill_s
        if not self._has_free_slot(queued):
            queued.predicted_prefill_s = predict_prefill_s(prompt_tokens, taken)
            self._enqueue(queued, prompt_tokens)
        elif limit_s < MAX_CHECKED_TTFT_S and (
            queued.excluded_workers or self._first_tokens.count_idle(prompt_tokens) <= taken
        ):
            self._reject_over_limit(queued, 0.0, predict_prefill_s(prompt_tokens, taken, limit_s))
        return queued

    def _hold_for_start(self, queued: QueuedRequest, prompt_tokens: int) -> None:
        """Queue a request if a supervisor is expected to start a worker in time. Raises `NoWorkers`
        if that takes longer than the request may wait, or if the workers are in a crash loop."""
        limit_s = queued.ttft_limit_s
        if not self._limited:
            limit_s = min(limit_s, self._max_queue_wait_s)
        if self._starts is not None and self._starts.is_expected_within(limit_s):
            queued.awaits_start = True
            queued.set_order_key(prompt_tokens)
            self._push(queued, queued.arrived_s + limit_s)

    def _enqueue(self, queued: QueuedRequest, prompt_tokens: int) -> None:
        now = queued.arrived_s
        queued.set_order_key(prompt_tokens)
        ahead = queued.ahead = self._queue.count_ahead(queued) + len(self._dispatching)
        max_tokens, excluded = queued.request.stops.max_tokens, queued.excluded_workers
        wait_s = self.capacity.predict_wait_s(ahead, max_tokens, excluded)
        if self.capacity.has_foreign_requests and self._queue.rate.is_reliable(now):
            wait_s = max(wait_s, self._queue.rate.predict_wait_s(ahead))
        margin_s = min(self._first_tokens.compute_margin_s(), queued.ttft_limit_s / 2)
        predicted_s = wait_s + queued.predicted_prefill_s
        self._reject_over_limit(queued, wait_s, predicted_s + margin_s)
        queued.predicted_first_token_s = now + predicted_s
        if self._ttft_limit_s < inf:
            shed_at_s = now + self._ttft_limit_s - queued.predicted_prefill_s
        else:
            shed_at_s = now + self._max_queue_wait_s * QUEUE_TIMEOUT_FACTOR
        self._push(queued, shed_at_s)

    def _push(self, queued: QueuedRequest, shed_at_s: float) -> None:
        """Add a request to the queue until `shed_at_s`. Raises `Overloaded` if it is full."""
        try:
            self._queue.push(queued)
        except Overloaded:
            self._rejection_counter.labels("queue_full").inc()
            raise
        queued.note_wait(current_story.get())
        queued.slot_ready = asyncio.get_running_loop().create_future()
        queued.cancel_timer = self._clock.call_at(shed_at_s, lambda: self._shed_overdue(queued))
        self._waiting_gauge.inc()
        self._schedule_recheck()

    def _reject_over_limit(
        self, queued: QueuedRequest, wait_s: float, first_token_s: float
    ) -> None:
        """Raise `Overloaded` when a limit would be exceeded and no suitable worker is idle."""
        limit_s = queued.ttft_limit_s
        if first_token_s > limit_s:
            over_s = first_token_s - limit_s
        elif not self._limited and wait_s > self._max_queue_wait_s:
            over_s = wait_s - self._max_queue_wait_s
        else:
            return
        if self._first_tokens.would_start(queued, wait_s):
            return
        if first_token_s <= limit_s:
            reason, limit_s = "queue_wait", self._max_queue_wait_s
            hint = "the limit is router.max_queue_wait: raise it or add workers"
        elif limit_s < self._ttft_limit_s:
            reason, hint = "deadline", "the limit is the request's own timeout"
        else:
            reason, hint = "ttft", "the limit is router.ttft_slo: raise it or add workers"
        self._rejection_counter.labels(reason).inc()
        raise Overloaded(
            f"the first token is expected in {first_token_s:.2f} s, beyond {limit_s:g} s",
            hint=hint,
            retry_after_s=self._retry_after_s(over_s, queued.request.stops.max_tokens),
        )

    def _retry_after_s(self, over_s: float, max_tokens: int) -> float:
        """Return the delay before a rejected client should retry. Successive delays grow at the
        rate at which slots become free: clients do not all return at once."""
        now = self._clock.now()
        next_s = self._last_retry_at_s + self.capacity.predict_gap_s(max_tokens)
        self._last_retry_at_s = at_s = min(max(now + over_s, next_s), now + MAX_RETRY_AFTER_S)
        return at_s - now

    async def _wait_for_slot(self, queued: QueuedRequest, slot_ready: asyncio.Future[None]) -> None:
        try:
            await slot_ready
        except BaseException:
            if not self._queue.pop(queued):
                self._dispatching.pop(queued.key, None)
                self._dequeue_ready()
            raise
        finally:
            self._waiting_gauge.dec()
            self._wait_histogram.observe(self._clock.now() - queued.arrived_s)
            if queued.cancel_timer is not None:
                queued.cancel_timer()

    def _shed_overdue(self, queued: QueuedRequest) -> None:
        """Reject a queued request whose predicted slot did not become free in time."""
        slot_ready = queued.slot_ready
        if slot_ready is None or slot_ready.done() or not self._queue.pop(queued):
            return
        self._rejection_counter.labels("late").inc()
        now = self._clock.now()
        if queued.predicted_first_token_s is not None:
            self._first_tokens.record_prediction_error(
                queued.predicted_first_token_s, now + queued.predicted_prefill_s
            )
        if queued.awaits_start and self._starts is not None and not self._client.instances:
            slot_ready.set_exception(self._starts.late_error(now - queued.arrived_s))
            return
        slot_ready.set_exception(
            Overloaded(
                f"no worker became free in {now - queued.arrived_s:.3g} s",
                hint="the limits are router.ttft_slo and router.max_queue_wait: raise them or add "
                "workers",
                retry_after_s=self._retry_after_s(0.0, queued.request.stops.max_tokens),
            )
        )

    def _dequeue_ready(self) -> None:
        """Dequeue requests in order while there are free slots for them."""
        while self._queue.count and self.capacity.free_slots:
            for queued in self._queue.first_requests(self._clock.now()):
                if self._has_free_slot(queued):
                    break
            else:
                return
            self._queue.pop(queued, self._clock.now())
            self._dispatching[queued.key] = queued
            max_tokens = queued.request.stops.max_tokens
            self.capacity.assign_next_slot(max_tokens, queued.excluded_workers)
            if queued.slot_ready is not None and not queued.slot_ready.done():
                queued.slot_ready.set_result(None)

    def _has_free_slot(self, queued: QueuedRequest) -> bool:
        """Whether a suitable worker has a slot that no dispatching request takes. A dispatching
        request counts by its chance to take a slot of a suitable worker."""
        free, excluded = self.capacity.free_slots, queued.excluded_workers
        if not excluded or not free:
            return free > len(self._dispatching)
        suitable = self.capacity.count_suitable_slots(excluded)
        taken = 0.0
        for other in self._dispatching.values():
            other_excluded = other.excluded_workers if other is not None else frozenset()
            if other_excluded == excluded:
                taken += 1.0
            elif other_slots := self.capacity.count_suitable_slots(other_excluded):
                both = self.capacity.count_suitable_slots(excluded | other_excluded)
                taken += both / other_slots
        return suitable > taken

    def _on_instances_changed(self) -> None:
        live = self._client.instances
        self._prompt_workers.update(self._disaggregation, limited=self._limited)
        self.capacity.update_workers()
        self._queue.update_instances(live)
        if live:
            self._no_workers_since_s = None
        elif self._no_workers_since_s is None:
            self._no_workers_since_s = self._clock.now()
        self._dequeue_ready()

    def _schedule_recheck(self) -> None:
        if self._cancel_recheck is None:
            at_s = self._clock.now() + RECHECK_INTERVAL_S
            self._cancel_recheck = self._clock.call_at(at_s, self._recheck)

    def _recheck(self) -> None:
        self._cancel_recheck = None
        since_s = self._no_workers_since_s
        if since_s is not None and not (self._starts is not None and self._starts.is_expected):
            no_timeout = self._clock.now() - since_s < NO_WORKERS_TIMEOUT_S
            self._release_queued(only_held=no_timeout)
        if self._queue.count:
            self.capacity.refresh()
            self._dequeue_ready()
            self._schedule_recheck()

    def _release_queued(self, *, only_held: bool) -> None:
        """Release queued requests to the router, which raises `NoWorkers`. `only_held`: only those
        that wait for a supervisor to start a worker."""
        for queued in self._queue:
            if only_held and not queued.awaits_start:
                continue
            self._queue.pop(queued)
            if queued.slot_ready is not None and not queued.slot_ready.done():
                queued.slot_ready.set_result(None)

"""Routing by what the workers hold and do: arrivals of one turn of the loop are placed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.router.labels import excluded_workers, read_constraints
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.solver import PlacementResult, PlacementSolver
from dynamo.scheduling.router.policy import Decision, Policy, no_workers_error
from dynamo.scheduling.router.prompt import PromptReader
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerStates

PrefetchOverlaps = Callable[[Sequence[int]], Awaitable[None]]
"""Has what is known elsewhere of a prompt's blocks at hand before it is placed."""


class KvPolicy(Policy):
    """Drives a Placement by the loop: runs it once a turn when something has come, and when a
    worker may have become free for what waits."""

    def __init__(
        self,
        client: Client,
        placement: PlacementSolver,
        read: PromptReader,
        clock: Clock,
        *,
        block_tokens: int,
        name: str = "predicted",
    ) -> None:
        """`replicas`, once set, is told of every request that goes out."""
        self.solver = placement
        self.replica_sync: ReplicaSync | None = None
        self._client = client
        self._read_prompt = read
        self._clock = clock
        self._block_tokens = block_tokens
        self._name = name
        self._placement_scheduled = False
        self._timer_due_s: float | None = None
        self._stop_timer: Callable[[], None] | None = None
        self.prefetch: PrefetchOverlaps | None = None
        self.on_close: Callable[[], None] | None = None
        self._stop_listening = client.on_change(self._on_instances_changed)
        self._on_instances_changed()

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        loop = asyncio.get_running_loop()
        instances = self._client.instances
        out = frozenset(tried)
        if context.metadata:
            out |= excluded_workers(instances, context)
        if not (instances.keys() - out if out else instances):
            raise no_workers_error(self._client)
        name = f"{context.request_id}/{request.choice}/{context.attempt}"
        now = self._clock.now()
        prompt = self._read_prompt(request)
        if self.prefetch is not None:
            await self.prefetch(prompt.hashes)
        arrival = PendingRequest(name, prompt, self._block_tokens, now, out)
        arrival.decision_future = loop.create_future()
        arrival.priority = request.priority
        if context.metadata:
            arrival.constraints = read_constraints(context)
        if context.timeout_s is not None:
            arrival.deadline_s = now + context.timeout_s
        self.solver.submit(arrival)
        self._schedule_placement()
        try:
            return await arrival.decision_future
        except BaseException:
            self.solver.cancel(arrival)
            _release_unclaimed(arrival.decision_future)
            raise

    async def close(self) -> None:
        self._stop_listening()
        self.solver.worker_states.update_instances({})
        self._fail_unplaceable()
        if self._stop_timer is not None:
            self._stop_timer()
        if self.on_close is not None:
            self.on_close()

    @property
    def waiting(self) -> int:
        return len(self.solver)

    @property
    def worker_states(self) -> WorkerStates:
        return self.solver.worker_states

    def cache_view_modes(self) -> dict[str, str]:
        workers, view = self.solver.worker_states.workers, self.solver.view
        return {worker.name: view.get_mode(worker.name) for worker in workers}

    def update_settings(self, settings: RouterSettings) -> None:
        self.solver.cost.update_settings(settings)

    def on_worker_freed(self) -> None:
        """A worker may have become freer, by what another router says."""
        if not self._placement_scheduled and len(self.solver):
            self._schedule_placement()

    def _on_instances_changed(self) -> None:
        fleet = self.solver.worker_states
        fleet.update_instances(self._client.instances)
        self.solver.view.set_cacheless_workers(fleet.cacheless)
        self._fail_unplaceable()
        if len(self.solver):
            self._schedule_placement()

    def _fail_unplaceable(self) -> None:
        for arrival in self.solver.pop_unplaceable():
            if arrival.decision_future is not None and not arrival.decision_future.done():
                arrival.decision_future.set_exception(no_workers_error(self._client))

    def _schedule_placement(self) -> None:
        if not self._placement_scheduled:
            self._placement_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_placement)

    def _run_placement(self) -> None:
        self._placement_scheduled = False
        now = self._clock.now()
        gone = self.solver.place(now)
        waiting = len(self.solver)
        for placed in gone:
            self._resolve(placed, now, waiting)
        for arrival, error in self.solver.pop_rejected():
            if arrival.decision_future is not None and not arrival.decision_future.done():
                arrival.decision_future.set_exception(error)
        self._set_timer(self.solver.next_run_s(now))

    def _resolve(self, placed: PlacementResult, now: float, waiting: int) -> None:
        active, arrival = placed.placed, placed.request
        active.first_token_callback, active.end_callback = self._on_first_token, self._on_ended
        decided = arrival.decision_future
        if decided is None or decided.done():
            self._on_ended(active)
            return
        book = active.worker
        if self.replica_sync is not None:
            self.replica_sync.publish_routed(book.name, active)
        decided.set_result(
            Decision(
                book.instance,
                self._name,
                placed.candidates,
                placed.cost_table,
                overlap_blocks=arrival.overlaps.get(book.name, 0),
                prompt_blocks=len(arrival.prompt.hashes),
                best_overlap_blocks=max(arrival.overlaps.values(), default=0),
                predicted_ttft_s=active.expected_first_token_s - now,
                waited_s=now - arrival.arrived_s,
                view=self.solver.view.get_mode(book.name),
                placement=active,
                rank=book.rank,
                queue_length=waiting,
            )
        )

    def _on_first_token(self, active: PlacedRequest) -> None:
        self.solver.on_first_token(active, self._clock.now())
        if self.replica_sync is not None:
            self.replica_sync.publish_first_token(active.id)
        self.on_worker_freed()

    def _on_ended(self, active: PlacedRequest) -> None:
        self.solver.on_ended(active, self._clock.now())
        if self.replica_sync is not None:
            self.replica_sync.publish_ended(active.id)
        self.on_worker_freed()

    def _set_timer(self, due: float | None) -> None:
        """One timer, for the earliest moment that is of interest."""
        if due is None or (self._timer_due_s is not None and self._timer_due_s <= due):
            return
        if self._stop_timer is not None:
            self._stop_timer()
        self._timer_due_s = due
        self._stop_timer = self._clock.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._stop_timer = self._timer_due_s = None
        if len(self.solver):
            self._schedule_placement()


def _release_unclaimed(decided: asyncio.Future[Decision]) -> None:
    """Nobody will come for that place any more."""
    if decided.done() and not decided.cancelled() and decided.exception() is None:
        ticket = decided.result().placement
        if ticket is not None:
            ticket.end()

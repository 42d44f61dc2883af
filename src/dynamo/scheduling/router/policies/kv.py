"""Mode kv: place requests by predicted cost over what the workers hold and do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from dynamo.core.context import Context
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import GenerateRequest, Load
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.router.costs.pair_price import FLEXIBLE
from dynamo.scheduling.router.features import FeatureFilter, read_constraints
from dynamo.scheduling.router.harm_steering import HarmSteering
from dynamo.scheduling.router.placement.solver import PlacementResult, PlacementSolver
from dynamo.scheduling.router.policy import Decision, Policy, PolicyInputs, no_workers_error
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.ledger import NOT_SENT
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import make_prompt_reader
from dynamo.scheduling.workers.worker import WorkerState

MAX_TURN_S = 0.002
"""Time after which a round of placements lets the event loop run other callbacks."""


class KvPolicy(Policy):
    """Run a placement solver on the event loop. Requests that arrive in one turn of the loop are
    placed together. Further rounds run when a worker may have become free for the requests that are
    held."""

    def __init__(self, inputs: PolicyInputs, solver: PlacementSolver) -> None:
        """The cost of pairs replaces the solver's cost while workers of the prefill client compute
        prompts, or any worker may."""
        client, prefill_client = inputs.client, inputs.prefill_client
        self.solver = solver
        self._own_cost = solver.cost
        self._pair_cost = PairCost(inputs.settings.disaggregation)
        self._steering = self._pair_cost.steering
        self._prefill_client = prefill_client
        self._client = client
        self._read_prompt = inputs.read_prompt or make_prompt_reader(inputs.block_tokens)
        self._clock = inputs.clock
        self._block_tokens = inputs.block_tokens
        self._name = inputs.settings.policy
        self._filter = FeatureFilter()
        self._placement_scheduled = False
        self._round_wanted = False
        self._timer_due_s: float | None = None
        self._stop_timer: Callable[[], None] | None = None
        solver.ledger.on_first_token.append(self._on_worker_freed)
        solver.ledger.on_ended.append(self._on_worker_freed)
        clients = [client] if prefill_client is None else [client, prefill_client]
        self._stop_listening = [each.on_change(self._on_instances_changed) for each in clients]
        self._on_instances_changed()

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        loop = asyncio.get_running_loop()
        instances = self._client.instances
        excluded = frozenset(tried)
        if context.metadata:
            unlabelled = self._filter.workers_without_labels(instances, context)
            excluded = unlabelled | excluded if excluded else unlabelled
        if instances.keys() <= excluded:
            raise no_workers_error(self._client)
        key = f"{context.request_id}/{request.choice}/{context.attempt}"
        now = self._clock.now()
        prompt = self._read_prompt(request)
        if self.solver.view.remote_match is not None:
            await self.solver.view.fetch_remote_match(prompt.hashes)
        pending = PendingRequest(key, prompt, self._block_tokens, now, excluded)
        pending.decision_future = loop.create_future()
        pending.priority, pending.max_tokens = request.priority, request.stops.max_tokens
        if context.metadata:
            pending.constraints = read_constraints(context)
        if context.timeout_s is not None:
            pending.deadline_s = now + context.timeout_s
        self.solver.submit(pending)
        self._schedule_placement()
        try:
            return await pending.decision_future
        except BaseException:
            self.solver.cancel(pending)
            self._release_unclaimed(pending.decision_future)
            raise

    async def close(self) -> None:
        for stop in self._stop_listening:
            stop()
        self.solver.worker_states.update_instances({})
        self._fail_unplaceable()
        if self._stop_timer is not None:
            self._stop_timer()
        self.solver.view.close()

    @property
    def waiting(self) -> int:
        return len(self.solver)

    @property
    def predicts(self) -> bool:
        return True

    @property
    def harm_steering(self) -> HarmSteering | None:
        return self._steering if self._steering.itl_slo_ms else None

    def predict_pair_ms(
        self, workers: Sequence[WorkerState], tokens: int, ahead: int, now: float
    ) -> float | None:
        cost = self._pair_cost
        return cost.predict_ms(workers, tokens, ahead, now) if cost is self.solver.cost else None

    def cache_view_modes(self) -> dict[str, str]:
        workers, view = self.solver.worker_states.workers, self.solver.view
        return {worker.name: view.get_mode(worker.name) for worker in workers}

    def update_settings(self, settings: RouterSettings) -> None:
        self._own_cost.update_settings(settings)
        self._pair_cost.update_settings(settings)
        self._use_cost()

    def on_load_report(self, worker: str, load: Load, now: float) -> None:
        self.solver.worker_states.on_load_report(worker, load, now)
        if self._steering.itl_slo_ms:
            self._steering.on_load_report(worker, load, now)

    def _on_worker_freed(self, placed: PlacedRequest, error: BaseException | None = None) -> None:
        """Run a round soon, since a worker may have become free."""
        del placed, error
        if not self._round_wanted and len(self.solver):
            self._schedule_placement()

    def _on_instances_changed(self) -> None:
        states = self.solver.worker_states
        self._steering.retain_workers(worker.instance.id for worker in states.workers)
        self._use_cost()
        self.solver.view.set_cacheless_workers(states.cacheless)
        self._fail_unplaceable()
        if len(self.solver):
            self._schedule_placement()

    def _use_cost(self) -> None:
        """Price pairs of workers where prompts may be computed elsewhere, else single workers."""
        pair_cost, prefill_client = self._pair_cost, self._prefill_client
        if pair_cost.rules.mode == FLEXIBLE or (prefill_client and prefill_client.instances):
            self.solver.cost = pair_cost
            removed_blocks = pair_cost.removed_blocks
        else:
            self.solver.cost, removed_blocks = self._own_cost, None
        self.solver.view.removed_blocks = removed_blocks

    def _fail_unplaceable(self) -> None:
        for pending in self.solver.pop_unplaceable():
            _fail(pending, no_workers_error(self._client))

    def _schedule_placement(self) -> None:
        self._round_wanted = True
        if not self._placement_scheduled:
            self._continue_placement()

    def _run_placement(self) -> None:
        self._placement_scheduled = False
        solver = self.solver
        if not solver.unfinished:
            self._round_wanted = False
        now = self._clock.now()
        until = now + MAX_TURN_S
        while True:
            results = solver.place(now)
            waiting = len(solver)
            for result in results:
                self._resolve(result, now, waiting)
            if not solver.unfinished:
                break
            if (now := self._clock.now()) >= until:
                self._continue_placement()
                return
        for pending, error in solver.pop_rejected():
            _fail(pending, error)
        self._set_timer(solver.next_run_s(now))
        if self._round_wanted:
            self._continue_placement()

    def _continue_placement(self) -> None:
        """Continue in the next turn of the event loop."""
        self._placement_scheduled = True
        asyncio.get_running_loop().call_soon(self._run_placement)

    def _resolve(self, result: PlacementResult, now: float, waiting: int) -> None:
        placed, pending = result.placed, result.request
        future = pending.decision_future
        if future is None or future.done():
            self.solver.ledger.end(placed, NOT_SENT)
            return
        prefill_worker = placed.worker
        worker = placed.decode_worker or prefill_worker
        steering = self._steering
        future.set_result(
            Decision(
                worker.instance,
                self._name,
                result.candidates,
                result.cost_table,
                overlap_blocks=pending.overlaps.get(prefill_worker.name, 0),
                prompt_blocks=len(pending.prompt.hashes),
                best_overlap_blocks=max(pending.overlaps.values(), default=0),
                predicted_ttft_s=placed.expected_first_token_s - now,
                waited_s=now - pending.arrived_s,
                view=self.solver.view.get_mode(worker.name),
                placement=placed,
                prompt=pending.prompt,
                rank=worker.rank,
                queue_length=waiting,
                prefill=None if worker is prefill_worker else prefill_worker.instance,
                prefill_rank=None if worker is prefill_worker else prefill_worker.rank,
                harm_weight=steering.weight if steering.itl_slo_ms else None,
                itl_slo_ms=steering.itl_slo_ms,
            )
        )

    def _release_unclaimed(self, future: asyncio.Future[Decision]) -> None:
        """End the placement of a request that was cancelled after its decision."""
        if future.done() and not future.cancelled() and future.exception() is None:
            placed = future.result().placement
            if placed is not None:
                self.solver.ledger.end(placed, NOT_SENT)

    def _set_timer(self, due: float | None) -> None:
        """Keep one timer, for the earliest time at which a round is due."""
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


def _fail(pending: PendingRequest, error: Exception) -> None:
    if pending.decision_future is not None and not pending.decision_future.done():
        pending.decision_future.set_exception(error)

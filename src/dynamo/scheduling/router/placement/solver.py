"""The placement solver: which pending request goes to which worker, and which one is held.

The solver is pure and synchronous, so that frontends, router processes and the simulator share it.
Placement is joint, by regret: the request that would lose most by missing its best worker is
placed first, then costs are updated. Source: the regret heuristic for generalised assignment
(Martello and Toth).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from random import Random

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.costs.interface import Cost, CostMatrix, lowest_indices
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.queue import PendingRequestQueue, WaitingQueue
from dynamo.scheduling.router.placement.regret import RegretRow, RegretStep
from dynamo.scheduling.router.policy import Candidate
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerState
from dynamo.scheduling.router.worker_states import WorkerStates

REGRET_WINDOW = 12
"""Requests that are placed jointly; the effort grows with its square."""

MAX_PAIRS_PER_ROUND = 4_096
"""(Request, worker) pairs that one round evaluates; later arrivals wait for the next round."""

UNBOUND = 1 << 30
RECHECK_INTERVAL_S = 0.05
"""Time to the next round after an overdue request was not placed. Freed workers start a round
earlier."""

STEP_FILL_SHARE = 0.25
"""Share of a worker's step that pending prompts may fill before further prompts are held."""

SHORT_PROMPT_TOKENS = 512
"""Largest prompt that counts as short: a better worker would save little time."""


class HoldLimits(msgspec.Struct, frozen=True):
    """Limits for holding a request in the router while its best worker is busy. A request is held
    if its best worker has more than `max_backlog_s` of prefill pending, for at most `max_hold_s`.
    Nothing is lost before that worker is nearly free, and another worker may become better.
    `overlaps_max_age_s` is the age at which cache overlaps are looked up again."""

    max_backlog_s: float = 0.05
    max_hold_s: float = 3.0
    overlaps_max_age_s: float = 0.1


class PlacementResult(msgspec.Struct, frozen=True):
    """A request with its worker, the cost table and the number of candidates."""

    request: PendingRequest
    placed: PlacedRequest
    cost_table: Sequence[Candidate]
    candidates: int


SelectWorker = Callable[[PendingRequest, Sequence[WorkerState], Sequence[float], Random], int]
"""Called with a request, its workers, their costs and a generator; returns the chosen index.
Raises DynamoError to refuse the request."""


class PlacementSolver:
    """Own the pending requests and place them on `worker_states`."""

    def __init__(
        self,
        worker_states: WorkerStates,
        view: CacheView,
        cost: Cost,
        rng: Random,
        *,
        select: SelectWorker | None = None,
        hold_limits: HoldLimits | None = None,
        queue: WaitingQueue[PendingRequest] | None = None,
        threshold: float = 0.0,
    ) -> None:
        """`select` replaces the lowest cost and places each request alone. `queue` holds requests
        that must wait (default: first come, unbounded). `threshold`: a worker with more pending
        prompt tokens than this many of its steps gets nothing while all are so (0: no limit)."""
        self.worker_states = worker_states
        self.view = view
        self.cost = cost
        self._rng = rng
        self._select = select
        self._hold_limits = hold_limits or HoldLimits()
        self._threshold = threshold
        self._round_blocks: dict[str, set[int]] = {}
        self._pending = PendingRequestQueue(WaitingQueue(bound=UNBOUND) if queue is None else queue)

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, request: PendingRequest) -> None:
        """Add a request for the next `place`."""
        request.overlaps = self.view.find_overlaps(request.prompt.hashes)
        self._pending.add(request)

    def cancel(self, request: PendingRequest) -> None:
        """Remove a request; a request that is not pending is ignored."""
        self._pending.remove(request)

    def pop_rejected(self) -> list[tuple[PendingRequest, DynamoError]]:
        """Return the requests rejected since the last call: by a full queue or by the selector."""
        return self._pending.pop_rejected()

    def pop_unplaceable(self) -> list[PendingRequest]:
        """Remove and return the requests for which no worker is left."""
        unplaceable = [request for request in self._pending if not self._allowed_workers(request)]
        for request in unplaceable:
            self._pending.remove(request)
        return unplaceable

    def place(self, now: float) -> list[PlacementResult]:
        """Place all requests that need not be held, and return them in order of placement."""
        workers = self.worker_states.workers
        if not workers or not any(map(self._is_eligible, self._pending)):
            return []
        self.worker_states.refresh_next(now)
        self._round_blocks.clear()
        joint = self.cost.joint and self._select is None and not self._threshold
        may_hold = joint or (self.cost.joint and self._threshold)
        if may_hold and not (
            self._any_nearly_free(now) or self._is_overdue(next(iter(self._pending)), now)
        ):
            self._pending.enqueue_new()
            return []
        waiting = self._pending.ordered(now)
        if may_hold:
            waiting = self._with_free_worker(waiting, now)
        else:
            waiting = filter(self._is_eligible, waiting)
        matrix = self.cost.build_matrix(workers, now)
        if joint:
            placed = self._place_jointly(waiting, matrix, now)
        elif self._threshold:
            placed = self._place_in_order(waiting, matrix, now)
        else:
            placed = [
                result for request in waiting if (result := self._place_one(request, matrix, now))
            ]
        self._pending.enqueue_new()
        return placed

    def on_first_token(self, placed: PlacedRequest, now: float) -> None:
        """Note that the prompt is computed."""
        placed.worker.on_first_token(placed, now)
        self.view.on_prefill_ended(placed.worker.name, placed.hashes)

    def on_ended(self, placed: PlacedRequest, now: float) -> None:
        """Note that the request left its worker."""
        if placed.first_token_s is None:
            self.view.on_prefill_ended(placed.worker.name, placed.hashes)
        self.cost.on_ended(placed)
        placed.worker.remove(placed, now)

    def next_run_s(self, now: float) -> float | None:
        """Return when `place` should run if no event starts it before; None without requests."""
        if not len(self._pending):
            return None
        limits = self._hold_limits
        due = next(iter(self._pending)).arrived_s + limits.max_hold_s
        for worker in self.worker_states.workers:
            if (
                worker.pending_prefills
                and now < (nearly_free_s := worker.prefill_free_s - limits.max_backlog_s) < due
            ):
                due = nearly_free_s
        return due if due > now else now + RECHECK_INTERVAL_S

    def _is_eligible(self, request: PendingRequest) -> bool:
        return not request.excluded or any(
            worker.instance.id not in request.excluded for worker in self.worker_states.workers
        )

    def _with_free_worker(
        self, waiting: Iterable[PendingRequest], now: float
    ) -> Iterator[PendingRequest]:
        """Yield the requests that have a nearly free worker or are overdue. A request whose allowed
        workers are all busy does not block the others."""
        free_by_excluded: dict[AbstractSet[str], bool] = {}
        for request in waiting:
            free = free_by_excluded.get(request.excluded)
            if free is None:
                allowed = self._allowed_workers(request)
                free = any(self._is_nearly_free(worker, now) for worker in allowed)
                free_by_excluded[request.excluded] = free
            if free or (self._is_overdue(request, now) and self._is_eligible(request)):
                yield request

    def _place_in_order(
        self, waiting: Iterable[PendingRequest], matrix: CostMatrix, now: float
    ) -> list[PlacementResult]:
        """Place in queue order while a worker is below the threshold. A request that may not use
        such a worker stays, and the next one is tried."""
        placed: list[PlacementResult] = []
        for request in islice(waiting, max(1, MAX_PAIRS_PER_ROUND // len(matrix.workers))):
            if self._all_busy(self.worker_states.workers):
                break
            if request.excluded and self._all_busy(self._allowed_workers(request)):
                continue
            if self.cost.joint and self._should_hold(
                self._build_regret_row(request, matrix, now), now
            ):
                continue
            if result := self._place_one(request, matrix, now):
                placed.append(result)
        return placed

    def _all_busy(self, workers: Sequence[WorkerState]) -> bool:
        """Whether every worker is above the threshold."""
        limit = self._threshold
        return all(
            worker.pending_prefill_tokens > limit * worker.token_budget for worker in workers
        )

    def _allowed_workers(self, request: PendingRequest) -> list[WorkerState]:
        workers, excluded = self.worker_states.workers, request.excluded
        if not excluded:
            return workers
        return [worker for worker in workers if worker.instance.id not in excluded]

    def _place_one(
        self, request: PendingRequest, common: CostMatrix, now: float
    ) -> PlacementResult | None:
        self._refresh_overlaps(request, now)
        matrix = self._matrix_for(request, common, now)
        costs = matrix.row(request)
        if self._select is None:
            lowest = lowest_indices(costs, self.cost.tie_tolerance)
            index = lowest[0] if len(lowest) == 1 else lowest[int(self._rng.random() * len(lowest))]
        else:
            try:
                index = self._select(request, matrix.workers, costs, self._rng)
            except DynamoError as error:
                self._pending.reject(request, error)
                return None
        result = self._assign(request, matrix, costs, index, now)
        common.refresh_worker(result.placed.worker)
        return result

    def _place_jointly(
        self, waiting: Iterable[PendingRequest], matrix: CostMatrix, now: float
    ) -> list[PlacementResult]:
        limit = max(1, MAX_PAIRS_PER_ROUND // len(matrix.workers))
        waiting = islice(waiting, limit)
        placed: list[PlacementResult] = []
        seen: set[str] = set()
        while window := list(islice(waiting, REGRET_WINDOW)):
            results = self._place_window(self._placeable(window, now), matrix, now)
            placed += results
            first_window = not seen
            seen.update(request.id for request in window)
            if not (results or first_window):
                break  # a whole window is held: so was the queue behind it in the last round
        return placed + self._place_new(seen, limit, matrix, now)

    def _place_new(
        self, seen: AbstractSet[str], limit: int, matrix: CostMatrix, now: float
    ) -> list[PlacementResult]:
        """Place new requests that are not in `seen`: they may prefer other workers than the held
        requests before them."""
        unseen = (
            request
            for request in self._pending.new_requests
            if request.id not in seen and self._is_eligible(request)
        )
        new = list(islice(unseen, limit))
        placed: list[PlacementResult] = []
        for start in range(0, len(new), REGRET_WINDOW):
            window = self._placeable(new[start : start + REGRET_WINDOW], now)
            placed += self._place_window(window, matrix, now)
        return placed

    def _place_window(
        self, waiting: list[PendingRequest], common: CostMatrix, now: float
    ) -> list[PlacementResult]:
        """Place one window of requests by regret."""

        def overdue(request: PendingRequest) -> bool:
            return self._is_overdue(request, now)

        step = self._build_regret_step(waiting, common, now)
        placed: list[PlacementResult] = []
        while (row := step.pop()) is not None:
            if self._should_hold(row, now):
                step.on_held(row, overdue)
                continue
            result = self._assign(row.request, row.matrix, row.costs, row.best_index, now)
            placed.append(result)
            worker = result.placed.worker
            if not (self._is_nearly_free(worker, now) or self._any_nearly_free(now)):
                step.keep_due(overdue)
            step.on_placed(result.placed, self._round_blocks[worker.name], common, self._rng)
        return placed

    def _build_regret_step(
        self, waiting: list[PendingRequest], common: CostMatrix, now: float
    ) -> RegretStep:
        """Split the window; short prompts with equal overlaps everywhere are queued."""
        workers = len(common.workers)
        queued: list[PendingRequest] = []
        others: list[PendingRequest] = []
        for request in waiting:
            overlap = None if request.excluded else request.common_overlap(workers)
            if (
                overlap is not None
                and request.prompt.tokens - overlap * request.block_tokens <= SHORT_PROMPT_TOKENS
            ):
                queued.append(request)
            else:
                others.append(request)
        return RegretStep(
            others, queued, lambda request: self._build_regret_row(request, common, now)
        )

    def _placeable(self, waiting: list[PendingRequest], now: float) -> list[PendingRequest]:
        """Return the requests that this round may place; most rounds return none."""
        if self._any_nearly_free(now):
            return waiting
        return [request for request in waiting if self._is_overdue(request, now)]

    def _any_nearly_free(self, now: float) -> bool:
        return any(self._is_nearly_free(worker, now) for worker in self.worker_states.workers)

    def _is_nearly_free(self, worker: WorkerState, now: float) -> bool:
        """Whether the pending prompts fill part of a step, are short and fit into one step, or take
        less than the allowed backlog."""
        tokens, step = worker.pending_prefill_tokens, worker.token_budget
        return (
            tokens <= step * STEP_FILL_SHARE
            or tokens <= min(step, SHORT_PROMPT_TOKENS * worker.pending_prefills)
            or worker.backlog_ms(now) <= self._hold_limits.max_backlog_s * 1e3
        )

    def _is_overdue(self, request: PendingRequest, now: float) -> bool:
        return now - request.arrived_s >= self._hold_limits.max_hold_s

    def _build_regret_row(
        self, request: PendingRequest, common: CostMatrix, now: float
    ) -> RegretRow:
        self._refresh_overlaps(request, now)
        return RegretRow(request, self._matrix_for(request, common, now), self._rng)

    def _refresh_overlaps(self, request: PendingRequest, now: float) -> None:
        """Look the overlaps up again if they are old or if this round sent shared blocks."""
        late = now - request.overlaps_updated_s > self._hold_limits.overlaps_max_age_s
        if late or self._overlap_grew(request):
            request.overlaps_updated_s = now
            request.overlaps = self.view.find_overlaps(request.prompt.hashes)

    def _overlap_grew(self, request: PendingRequest) -> bool:
        hashes, overlap = request.prompt.hashes, request.overlaps.get
        for worker, blocks in self._round_blocks.items():
            depth = overlap(worker, 0)
            if depth < len(hashes) and hashes[depth] in blocks:
                return True
        return False

    def _matrix_for(self, request: PendingRequest, common: CostMatrix, now: float) -> CostMatrix:
        if not request.excluded:
            return common
        return self.cost.build_matrix(self._allowed_workers(request), now)

    def _should_hold(self, row: RegretRow, now: float) -> bool:
        return not (self._is_nearly_free(row.worker, now) or self._is_overdue(row.request, now))

    def _assign(
        self,
        request: PendingRequest,
        matrix: CostMatrix,
        costs: Sequence[float],
        index: int,
        now: float,
    ) -> PlacementResult:
        worker = matrix.workers[index]
        table = matrix.candidate_table(request, costs, index)
        placed = PlacedRequest(
            request.id, worker, request.prompt, request.uncached_tokens(worker.name), now
        )
        worker.place(placed, now)
        self.cost.on_placed(placed)
        self.view.on_request_routed(worker.name, request.prompt.hashes)
        self._round_blocks.setdefault(worker.name, set()).update(request.prompt.hashes)
        self._pending.remove(request, now)
        return PlacementResult(request, placed, table, len(matrix.workers))

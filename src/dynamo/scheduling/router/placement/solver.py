"""The placement solver: which pending request goes to which worker, and which one is held.

The solver is pure and synchronous, so that frontends, router processes and the simulator share it.
Placement is joint, by regret: the request that would lose most by missing its best worker is first.
Source: the regret heuristic for generalised assignment (Martello and Toth). A round has slices, so
that a large burst does not block the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, product
from random import Random

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.costs.checked import checked
from dynamo.scheduling.router.costs.interface import REGRET_WINDOW, Cost, CostMatrix, lowest_indices
from dynamo.scheduling.router.placement.candidates import (
    SHORT_PROMPT_TOKENS,
    Candidates,
    HoldLimits,
    MakeShortlist,
    SelectWorker,
)
from dynamo.scheduling.router.placement.regret import RegretRow, RegretStep, SentBlocks, workers_of
from dynamo.scheduling.router.policy import CandidateTable
from dynamo.scheduling.router.queue import PendingRequest, PendingRequestQueue, WaitingQueue
from dynamo.scheduling.router.tier_loads import plan_loads, reserve_load
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState

MAX_PAIRS_PER_SLICE = 4_096
"""(Request, worker) pairs that one slice of a round evaluates one by one."""

LARGE_FLEET = 192
"""Workers from which on costs are computed as arrays, if the cost supports that."""

RECHECK_INTERVAL_S = 0.05
"""Time to the next round after an overdue request was not placed, unless a worker gets free."""


class PlacementResult(msgspec.Struct, frozen=True):
    """A request with its worker, the cost table and the number of candidates."""

    request: PendingRequest
    placed: PlacedRequest
    cost_table: CandidateTable
    candidates: int


class PlacementSolver:
    """Own the pending requests and place them on the workers of `ledger`."""

    def __init__(
        self,
        ledger: Ledger,
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
        self.worker_states = ledger.workers
        ledger.follow_answers()
        ledger.on_placed.append(self._on_placed)
        ledger.on_first_token.append(self._on_first_token)
        ledger.on_ended.append(self._on_ended)
        self.ledger, self.view = ledger, view
        self.cost = cost = checked(cost)
        self._rng = rng
        self._select = select
        self._hold_limits = hold_limits or HoldLimits()
        self._threshold = threshold
        self._workers: Sequence[WorkerState] = ()
        self._candidates = Candidates(ledger.workers, cost, self._hold_limits.max_backlog_s)
        self._now, self._slice_requests = 0.0, 0
        self._round: Iterator[bool] | None = None
        self.unfinished = False
        """Whether the last `place` cut its round. Call `place` again soon, without an event."""
        self.make_shortlist: MakeShortlist | None = None
        self._placed: list[PlacementResult] = []
        self._sent_blocks = SentBlocks()
        self._pending = PendingRequestQueue(WaitingQueue(bound=1 << 30) if queue is None else queue)

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, request: PendingRequest) -> None:
        """Add a request for the next `place`."""
        request.overlaps = self.view.find_overlaps(request.prompt.hashes)
        if self.view.has_lower_tiers:
            plan_loads(request, self.view, self.worker_states, request.arrived_s)
        self._pending.add(request)

    def cancel(self, request: PendingRequest) -> None:
        """Remove a request; others are ignored."""
        self._pending.remove(request)

    def pop_rejected(self) -> list[tuple[PendingRequest, DynamoError]]:
        """Return the requests rejected since the last call: by a full queue or by the selector."""
        return self._pending.pop_rejected()

    def pop_unplaceable(self) -> list[PendingRequest]:
        """Remove and return the requests for which no worker is left."""
        unplaceable = [request for request in self._pending if not self._is_eligible(request)]
        for request in unplaceable:
            self.cancel(request)
        return unplaceable

    def place(self, now: float) -> list[PlacementResult]:
        """Place pending requests that need not be held, and return them in order of placement. Each
        call is a slice of a round. Requests that arrive during a round wait for the next one."""
        states, self._now = self.worker_states, now
        self._placed, self._slice_requests = [], 0
        if self._round is None:
            if not any(map(self._is_eligible, self._pending)):
                return []
            states.refresh_next(now)
            if states.workers is not self._workers or self.cost is not self._candidates.cost:
                self._choose_candidates()
            self.cost.begin_round(self._pending, states.workers, now)
            joint = self.cost.joint and self._select is None and not self._threshold
            if joint and len(self._pending) == 1:
                return self._place_alone(next(iter(self._pending)))
            self._sent_blocks.clear()
            self._round = self._run_round(joint)
        elif not states.workers:
            self._round, self.unfinished = None, False
            self._pending.end_round()
            return []
        self._candidates.begin(now)
        self.unfinished = next(self._round, False)
        if not self.unfinished:
            self._round = None
        return self._placed

    def next_run_s(self, now: float) -> float | None:
        """Return when `place` should run if no event starts it before; None without requests."""
        if not len(self._pending):
            return None
        due = next(iter(self._pending)).arrived_s + self._hold_limits.max_hold_s
        self._candidates.begin(now)
        due = min(due, self._candidates.next_nearly_free_s())
        return due if due > now else now + RECHECK_INTERVAL_S

    def _choose_candidates(self) -> None:
        """Price workers one by one in small deployments, as arrays in large ones."""
        self._workers = self.worker_states.workers
        large = len(self._workers) >= LARGE_FLEET
        arguments = self.worker_states, self.cost, self._hold_limits.max_backlog_s
        if large and self.cost.has_arrays and self._select is None:
            if self.make_shortlist is None:
                from dynamo.scheduling.router.placement.shortlist import ShortlistCandidates

                self.make_shortlist = ShortlistCandidates
            self._candidates = self.make_shortlist(*arguments, self._rng)
        else:
            self._candidates = Candidates(*arguments)

    def _place_alone(self, request: PendingRequest) -> list[PlacementResult]:
        """Run the round of a single request, which most rounds have."""
        self._pending.begin_round()
        candidates, overdue = self._candidates, self._is_overdue(request)
        candidates.begin(self._now)
        if overdue or candidates.any_nearly_free(request.excluded):
            self._place_one(request, may_hold=not overdue)
        self._pending.end_round()
        return self._placed

    def _run_round(self, joint: bool) -> Iterator[bool]:
        """Place all pending requests that need not be held. Yields True between two slices."""
        pending = self._pending
        pending.begin_round()
        may_hold = joint or (self.cost.joint and self._threshold)
        if may_hold and not (
            self._candidates.any_nearly_free() or self._is_overdue(next(iter(pending)))
        ):
            pending.end_round()
            return
        waiting = pending.ordered(self._now)
        if may_hold:
            waiting = self._with_free_worker(waiting)
        else:
            waiting = filter(self._is_eligible, waiting)
        if joint:
            yield from self._place_jointly(waiting)
        elif self._threshold:
            yield from self._place_in_order(waiting)
        else:
            for window in self._windows(waiting):
                if not window:
                    yield True
                for request in window:
                    self._place_one(request)
        pending.end_round()

    def _windows(self, waiting: Iterable[PendingRequest]) -> Iterator[list[PendingRequest]]:
        """Yield the requests in windows, and an empty window where the slice ends."""
        waiting = iter(waiting)
        size = max(1, min(REGRET_WINDOW, MAX_PAIRS_PER_SLICE // self._candidates.priced_workers))
        while window := list(islice(waiting, size)):
            if self._slice_requests:
                yield []
                window = [
                    request
                    for request in self._pending.still_pending(window)
                    if not request.excluded or self._is_eligible(request)
                ]
            self._slice_requests += len(window)
            if window:
                yield window

    def _is_eligible(self, request: PendingRequest) -> bool:
        workers, excluded = self.worker_states.workers, request.excluded
        if not excluded:
            return bool(workers)
        return any(worker.decodes and worker.names.isdisjoint(excluded) for worker in workers)

    def _with_free_worker(self, waiting: Iterable[PendingRequest]) -> Iterator[PendingRequest]:
        """Yield the requests that have a nearly free worker or are overdue. A request whose allowed
        workers are all busy does not block the others."""
        free_by_excluded: dict[AbstractSet[str], bool] = {}
        for request in waiting:
            free = free_by_excluded.get(request.excluded)
            if free is None:
                free = self._candidates.any_nearly_free(request.excluded)
                free_by_excluded[request.excluded] = free
            if free or (self._is_overdue(request) and self._is_eligible(request)):
                yield request

    def _place_in_order(self, waiting: Iterable[PendingRequest]) -> Iterator[bool]:
        """Place in queue order while a worker is below the threshold. A request that may not use
        such a worker stays, and the next one is tried."""
        for window in self._windows(waiting):
            if not window:
                yield True
            for request in window:
                if self._all_busy(self.worker_states.workers):
                    return
                allowed = self._candidates.allowed_workers
                if request.excluded and self._all_busy(allowed(request.excluded)):
                    continue
                if self.cost.joint and self._should_hold(self._build_regret_row(request)):
                    continue
                self._place_one(request)

    def _all_busy(self, workers: Sequence[WorkerState]) -> bool:
        """Whether every worker is above the threshold."""
        limit = self._threshold
        return all(
            worker.pending_prefill_tokens > limit * worker.token_budget for worker in workers
        )

    def _place_one(self, request: PendingRequest, *, may_hold: bool = False) -> None:
        """Place a request at its best worker. `may_hold`: unless that one is busy."""
        self._refresh_overlaps(request)
        matrix = self._candidates.matrix_for(request)
        costs = matrix.row(request)
        if self._select is None:
            lowest = lowest_indices(costs, self.cost.tie_tolerance)
            index = lowest[int(self._rng.random() * len(lowest)) if len(lowest) > 1 else 0]
        else:
            try:
                index = self._select(request, matrix.workers, costs, self._rng)
            except DynamoError as error:
                self._pending.reject(request, error)
                return
        if may_hold and not self._candidates.is_nearly_free(matrix.workers[index]):
            return
        placed = self._assign(request, matrix, costs, index)
        if self._round is not None:
            for shared, worker in product(self._candidates.shared, workers_of(placed)):
                shared.refresh_worker(worker)

    def _place_jointly(self, waiting: Iterable[PendingRequest]) -> Iterator[bool]:
        """Place windows by regret. After a window that is held as a whole, only new requests are
        tried: the last round held the queue behind it, and they may prefer other workers."""
        seen: set[str] = set()
        for window in self._windows(waiting):
            if not window:
                yield True
                continue
            any_placed = self._place_window(window)
            first_window = not seen
            seen.update(request.id for request in window)
            if not (any_placed or first_window):
                break
        new = self._pending.new_requests
        unseen = [each for each in new if each.id not in seen and self._is_eligible(each)]
        for window in self._windows(unseen) if unseen else ():
            if not window:
                yield True
            else:
                self._place_window(window)

    def _place_window(self, waiting: list[PendingRequest]) -> bool:
        """Place one window of requests by regret. Return whether any was placed."""
        candidates, overdue = self._candidates, self._is_overdue
        if not candidates.any_nearly_free():
            waiting = [*filter(overdue, waiting)]
        step = self._build_regret_step(waiting)
        before = len(self._placed)
        while (row := step.pop()) is not None:
            if self._should_hold(row):
                step.on_held(row, overdue)
                continue
            placed = self._assign(row.request, row.matrix, row.costs, row.best_index)
            if not (candidates.is_nearly_free(placed.worker) or candidates.any_nearly_free()):
                step.keep_due(overdue)
            step.on_placed(placed, candidates.shared, self._rng)
        return len(self._placed) > before

    def _build_regret_step(self, waiting: list[PendingRequest]) -> RegretStep:
        """Split the window; short prompts with equal overlaps everywhere are queued."""
        workers = len(self.worker_states.workers)
        queued = [
            each
            for each in waiting
            if not each.excluded and each.is_short_everywhere(workers, SHORT_PROMPT_TOKENS)
        ]
        others = [request for request in waiting if request not in queued]
        return RegretStep(others, queued, self._build_regret_row)

    def _is_overdue(self, request: PendingRequest) -> bool:
        return self._now - request.arrived_s >= self._hold_limits.max_hold_s

    def _should_hold(self, row: RegretRow) -> bool:
        return not (self._candidates.is_nearly_free(row.worker) or self._is_overdue(row.request))

    def _build_regret_row(self, request: PendingRequest) -> RegretRow:
        self._refresh_overlaps(request)
        return RegretRow(request, self._candidates.matrix_for(request), self._rng)

    def _refresh_overlaps(self, request: PendingRequest) -> None:
        """Look the overlaps up again if they are old or if this round sent shared blocks."""
        late = self._now - request.overlaps_updated_s > self._hold_limits.overlaps_max_age_s
        if late or (self._round is not None and self._sent_blocks.extend_overlap_of(request)):
            request.overlaps_updated_s = self._now
            request.overlaps = self.view.find_overlaps(request.prompt.hashes)
            if self.view.has_lower_tiers:
                plan_loads(request, self.view, self.worker_states, self._now)

    def _assign(
        self, request: PendingRequest, matrix: CostMatrix, costs: Sequence[float], index: int
    ) -> PlacedRequest:
        now, worker = self._now, matrix.workers[index]
        table = matrix.candidate_table(request, costs, index)
        new_tokens = request.uncached_tokens(worker.name)
        load_ms = reserve_load(request, worker, now) if request.loads else 0.0
        if matrix.has_pairs:
            index = matrix.decode_index(request, index)
        placed = self.ledger.place(
            request.id,
            matrix.workers[index],
            request.prompt,
            worker,
            new_tokens=new_tokens,
            max_tokens=request.max_tokens,
            load_ms=load_ms,
            now=now,
        )
        self._pending.remove(request, now)
        count = matrix.allowed or len(matrix.workers)
        self._placed.append(PlacementResult(request, placed, table, count))
        return placed

    def _on_placed(self, placed: PlacedRequest) -> None:
        if placed.first_token_s is None:
            for worker in workers_of(placed):
                self.view.on_request_routed(worker.name, placed.hashes)
                if self._round is not None and not placed.peer:
                    self._sent_blocks.add(worker.name, placed.hashes)
        self.cost.on_placed(placed)

    def _on_first_token(self, placed: PlacedRequest) -> None:
        for worker in {placed.worker, placed.prompt_worker}:
            self.view.on_prefill_ended(worker.name, placed.hashes)

    def _on_ended(self, placed: PlacedRequest, error: BaseException | None) -> None:
        del error
        if placed.first_token_s is None:
            for worker in workers_of(placed):
                self.view.on_prefill_ended(worker.name, placed.hashes)
        self.cost.on_ended(placed)

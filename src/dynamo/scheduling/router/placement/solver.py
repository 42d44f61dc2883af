"""Who goes where, and who waits a moment: pure and synchronous, so that the router of a frontend,
one of its own and the simulator share it.

Joint placement by regret: of all that wait, the one that would lose most by not getting its best
worker goes first, then the costs are looked at again. Source: the regret heuristic for generalised
assignment (Martello and Toth).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from random import Random
from typing import Protocol

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.scheduling.router.costs.interface import Cost, CostMatrix
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.queue import PendingRequestQueue, WaitingQueue
from dynamo.scheduling.router.placement.regret import RegretRow, RegretStep, pick_lowest
from dynamo.scheduling.router.policy import Candidate
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerState, WorkerStates

REGRET_WINDOW = 12
"""Requests that are weighed together: the cost of that grows with the square of them."""

MAX_PAIRS_PER_ROUND = 4_096
"""(Request, worker) pairs that one round looks at; later arrivals wait their turn."""

UNBOUND = 1 << 30
RECHECK_INTERVAL_S = 0.05
"""After a round that left somebody waiting who was due: what frees a worker is heard anyway."""

STEP_FILL_SHARE = 0.25
"""Share of a worker's step that prompts may fill before those that come next are held back."""

SHORT_PROMPT_TOKENS = 512
"""Tokens up to which a prompt is short: a better choice would gain it little."""


class PrefixCacheView(Protocol):
    """What is known of the workers' caches."""

    def find_overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """Worker -> leading blocks of the prompt that it holds, or soon will."""

    def on_request_routed(self, worker: str, hashes: Sequence[int]) -> None:
        """A prompt goes to `worker`."""

    def on_prefill_ended(self, worker: str, hashes: Sequence[int]) -> None:
        """The first token of a prompt that went there came, or never will."""

    def get_mode(self, worker: str) -> str:
        """How that worker's cache is known."""

    def set_cacheless_workers(self, workers: AbstractSet[str]) -> None:
        """These workers keep nothing for later prompts."""


class HoldLimits(msgspec.Struct, frozen=True):
    """A request whose best worker has more than `backlog_s` of prefill before it stays in the
    router, for at most `longest_s`: elsewhere may become better, and nothing is lost before the
    worker is nearly free. `refresh_s`: how old a look at the caches may be."""

    max_backlog_s: float = 0.05
    max_hold_s: float = 3.0
    overlaps_max_age_s: float = 0.1


class PlacementResult(msgspec.Struct, frozen=True):
    """A request and where it goes."""

    request: PendingRequest
    placed: PlacedRequest
    cost_table: Sequence[Candidate]
    candidates: int


SelectWorker = Callable[[PendingRequest, Sequence[WorkerState], Sequence[float], Random], int]
"""(Request, its workers, their costs, chance) -> the index of the one to take. Raises DynamoError
where none will do."""


class PlacementSolver:
    """Owns what waits; places it on `fleet`."""

    def __init__(
        self,
        fleet: WorkerStates,
        view: PrefixCacheView,
        cost: Cost,
        rng: Random,
        *,
        select: SelectWorker | None = None,
        hold_limits: HoldLimits | None = None,
        queue: WaitingQueue[PendingRequest] | None = None,
        threshold: float = 0.0,
    ) -> None:
        """`select`: instead of the lowest cost, for each by itself; `queue`: of those that must
        wait (first come, without bound); `threshold`: a worker whose open prompts are more than so
        many of its steps gets nothing while all are so (0: never)."""
        self.worker_states = fleet
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

    def submit(self, arrival: PendingRequest) -> None:
        """Wait for `place`."""
        arrival.overlaps = self.view.find_overlaps(arrival.prompt.hashes)
        self._pending.add(arrival)

    def cancel(self, arrival: PendingRequest) -> None:
        """It does not want to be placed any more."""
        self._pending.remove(arrival)

    def pop_rejected(self) -> list[tuple[PendingRequest, DynamoError]]:
        """Those for whom there is no room to wait, or no worker by the selector, since the last
        call."""
        return self._pending.pop_rejected()

    def pop_unplaceable(self) -> list[PendingRequest]:
        """Those for whom no worker is left; they wait no more."""
        books = self.worker_states.workers
        lost = [
            one
            for one in self._pending
            if not books
            or (one.excluded and all(book.instance.id in one.excluded for book in books))
        ]
        for one in lost:
            self._pending.remove(one)
        return lost

    def place(self, now: float) -> list[PlacementResult]:
        """All that may go now, in the order in which they go."""
        books = self.worker_states.workers
        if not books or not any(map(self._is_eligible, self._pending)):
            return []
        self.worker_states.refresh_next(now)
        self._round_blocks.clear()
        joint = self.cost.joint and self._select is None and not self._threshold
        patient = joint or (self.cost.joint and self._threshold)
        if patient and not (
            self._any_nearly_free(now) or self._is_overdue(next(iter(self._pending)), now)
        ):
            self._pending.enqueue_new()
            return []
        waiting = self._pending.ordered(now)
        waiting = (
            self._with_free_worker(waiting, now) if patient else filter(self._is_eligible, waiting)
        )
        prices = self.cost.build_matrix(books, now)
        if joint:
            placed = self._place_jointly(waiting, prices, now)
        elif self._threshold:
            placed = self._place_in_order(waiting, prices, now)
        else:
            placed = [done for one in waiting if (done := self._place_one(one, prices, now))]
        self._pending.enqueue_new()
        return placed

    def on_first_token(self, active: PlacedRequest, now: float) -> None:
        """The prompt is computed."""
        active.worker.on_first_token(active, now)
        self.view.on_prefill_ended(active.worker.name, active.hashes)

    def on_ended(self, active: PlacedRequest, now: float) -> None:
        """The request left its worker."""
        if active.first_token_s is None:
            self.view.on_prefill_ended(active.worker.name, active.hashes)
        self.cost.on_ended(active)
        active.worker.remove(active, now)

    def next_run_s(self, now: float) -> float | None:
        """When `place` should be called again if nothing happens before; None: never."""
        if not len(self._pending):
            return None
        patience = self._hold_limits
        oldest = next(iter(self._pending)).arrived_s
        due = oldest + patience.max_hold_s
        for book in self.worker_states.workers:
            if (
                book.pending_prefills
                and now < (at := book.prefill_free_s - patience.max_backlog_s) < due
            ):
                due = at
        return due if due > now else now + RECHECK_INTERVAL_S

    def _is_eligible(self, arrival: PendingRequest) -> bool:
        return not arrival.excluded or any(
            book.instance.id not in arrival.excluded for book in self.worker_states.workers
        )

    def _with_free_worker(
        self, waiting: Iterable[PendingRequest], now: float
    ) -> Iterator[PendingRequest]:
        """Those that may go somewhere where a worker is nearly free, or must not wait longer: who
        may only go where all are busy holds up nobody else."""
        free: dict[AbstractSet[str], bool] = {}
        for one in waiting:
            hope = free.get(one.excluded)
            if hope is None:
                hope = any(self._is_nearly_free(book, now) for book in self._allowed_workers(one))
                free[one.excluded] = hope
            if hope or (self._is_overdue(one, now) and self._is_eligible(one)):
                yield one

    def _place_in_order(
        self, waiting: Iterable[PendingRequest], prices: CostMatrix, now: float
    ) -> list[PlacementResult]:
        """While a worker is below the threshold, whoever is first. Who must not go to those that
        are stays, and the next is looked at."""
        placed: list[PlacementResult] = []
        for one in islice(waiting, max(1, MAX_PAIRS_PER_ROUND // len(prices.workers))):
            if self._all_busy(self.worker_states.workers):
                break
            if one.excluded and self._all_busy(self._allowed_workers(one)):
                continue
            if self.cost.joint and self._should_hold(self._build_regret_row(one, prices, now), now):
                continue
            if done := self._place_one(one, prices, now):
                placed.append(done)
        return placed

    def _all_busy(self, books: Sequence[WorkerState]) -> bool:
        """Each has more before it than it may."""
        limit = self._threshold
        return all(book.pending_prefill_tokens > limit * book.token_budget for book in books)

    def _allowed_workers(self, arrival: PendingRequest) -> list[WorkerState]:
        books, barred = self.worker_states.workers, arrival.excluded
        return [book for book in books if book.instance.id not in barred] if barred else books

    def _place_one(
        self, arrival: PendingRequest, common: CostMatrix, now: float
    ) -> PlacementResult | None:
        self._refresh_overlaps(arrival, now)
        prices = self._matrix_for(arrival, common, now)
        costs = prices.row(arrival)
        if self._select is None:
            at = pick_lowest(costs, self._rng, self.cost.tie_tolerance)
        else:
            try:
                at = self._select(arrival, prices.workers, costs, self._rng)
            except DynamoError as error:
                self._pending.reject(arrival, error)
                return None
        placed = self._assign(arrival, prices, costs, at, now)
        common.refresh_worker(placed.placed.worker)
        return placed

    def _place_jointly(
        self, waiting: Iterable[PendingRequest], prices: CostMatrix, now: float
    ) -> list[PlacementResult]:
        most = max(1, MAX_PAIRS_PER_ROUND // len(prices.workers))
        waiting = islice(waiting, most)
        placed: list[PlacementResult] = []
        weighed: set[str] = set()
        while window := list(islice(waiting, REGRET_WINDOW)):
            gone = self._place_window(self._placeable(window, now), prices, now)
            placed += gone
            keen = bool(gone or not weighed)
            weighed.update(one.id for one in window)
            if not keen:
                break  # a dozen who would rather wait: so would those behind them, last time
        return placed + self._place_new(weighed, most, prices, now)

    def _place_new(
        self, weighed: AbstractSet[str], most: int, prices: CostMatrix, now: float
    ) -> list[PlacementResult]:
        """Who has just come and was not `weighed` may want another worker than those before."""
        new = (
            one
            for one in self._pending.new_requests
            if one.id not in weighed and self._is_eligible(one)
        )
        found = list(islice(new, most))
        placed: list[PlacementResult] = []
        for start in range(0, len(found), REGRET_WINDOW):
            window = self._placeable(found[start : start + REGRET_WINDOW], now)
            placed += self._place_window(window, prices, now)
        return placed

    def _place_window(
        self, waiting: list[PendingRequest], common: CostMatrix, now: float
    ) -> list[PlacementResult]:
        """Those weighed together."""

        def overdue(arrival: PendingRequest) -> bool:
            return self._is_overdue(arrival, now)

        window = self._build_regret_step(waiting, common, now)
        placed: list[PlacementResult] = []
        while (best := window.pop()) is not None:
            if self._should_hold(best, now):
                window.on_held(best, overdue)
                continue
            done = self._assign(best.request, best.matrix, best.costs, best.best_index, now)
            placed.append(done)
            book = done.placed.worker
            if not (self._is_nearly_free(book, now) or self._any_nearly_free(now)):
                window.keep_due(overdue)
            window.on_placed(done.placed, self._round_blocks[book.name], common, self._rng)
        return placed

    def _build_regret_step(
        self, waiting: list[PendingRequest], common: CostMatrix, now: float
    ) -> RegretStep:
        """Short prompts of which all workers hold the same stand in line."""
        workers = len(common.workers)
        line: list[PendingRequest] = []
        others: list[PendingRequest] = []
        for one in waiting:
            held = None if one.excluded else one.common_overlap(workers)
            if (
                held is not None
                and one.prompt.tokens - held * one.block_tokens <= SHORT_PROMPT_TOKENS
            ):
                line.append(one)
            else:
                others.append(one)
        return RegretStep(others, line, lambda one: self._build_regret_row(one, common, now))

    def _placeable(self, waiting: list[PendingRequest], now: float) -> list[PendingRequest]:
        """Those whom a round may place. Most rounds end here."""
        if self._any_nearly_free(now):
            return waiting
        return [one for one in waiting if self._is_overdue(one, now)]

    def _any_nearly_free(self, now: float) -> bool:
        """A worker is nearly done with the prompts before it."""
        return any(self._is_nearly_free(book, now) for book in self.worker_states.workers)

    def _is_nearly_free(self, book: WorkerState, now: float) -> bool:
        """Little is before it in time, or all of it goes into its next step: into a part of that,
        or into all of it where the prompts are short."""
        tokens, step = book.pending_prefill_tokens, book.token_budget
        return (
            tokens <= step * STEP_FILL_SHARE
            or tokens <= min(step, SHORT_PROMPT_TOKENS * book.pending_prefills)
            or book.backlog_ms(now) <= self._hold_limits.max_backlog_s * 1e3
        )

    def _is_overdue(self, arrival: PendingRequest, now: float) -> bool:
        return now - arrival.arrived_s >= self._hold_limits.max_hold_s

    def _build_regret_row(
        self, arrival: PendingRequest, common: CostMatrix, now: float
    ) -> RegretRow:
        self._refresh_overlaps(arrival, now)
        return RegretRow(arrival, self._matrix_for(arrival, common, now), self._rng)

    def _refresh_overlaps(self, arrival: PendingRequest, now: float) -> None:
        """At the caches again, where that was long ago or this round brought a worker more of the
        prompt."""
        late = now - arrival.overlaps_updated_s > self._hold_limits.overlaps_max_age_s
        if late or self._overlap_grew(arrival):
            arrival.overlaps_updated_s = now
            arrival.overlaps = self.view.find_overlaps(arrival.prompt.hashes)

    def _overlap_grew(self, arrival: PendingRequest) -> bool:
        mine, held = arrival.prompt.hashes, arrival.overlaps.get
        for worker, blocks in self._round_blocks.items():
            depth = held(worker, 0)
            if depth < len(mine) and mine[depth] in blocks:
                return True
        return False

    def _matrix_for(self, arrival: PendingRequest, common: CostMatrix, now: float) -> CostMatrix:
        return (
            self.cost.build_matrix(self._allowed_workers(arrival), now)
            if arrival.excluded
            else common
        )

    def _should_hold(self, row: RegretRow, now: float) -> bool:
        return not (self._is_nearly_free(row.worker, now) or self._is_overdue(row.request, now))

    def _assign(
        self,
        arrival: PendingRequest,
        prices: CostMatrix,
        costs: Sequence[float],
        at: int,
        now: float,
    ) -> PlacementResult:
        book = prices.workers[at]
        table = prices.candidate_table(arrival, costs, at)
        active = PlacedRequest(
            arrival.id, book, arrival.prompt, arrival.uncached_tokens(book.name), now
        )
        book.place(active, now)
        self.cost.on_placed(active)
        self.view.on_request_routed(book.name, arrival.prompt.hashes)
        self._round_blocks.setdefault(book.name, set()).update(arrival.prompt.hashes)
        self._pending.remove(arrival, now)
        return PlacementResult(arrival, active, table, len(prices.workers))

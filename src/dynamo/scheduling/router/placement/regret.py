"""The regret step: which request of a window is placed next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import attrgetter
from random import Random

from dynamo.scheduling.router.costs.interface import TIE_TOLERANCE, CostMatrix
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import common_prefix_blocks
from dynamo.scheduling.workers.worker import WorkerState


class RegretRow:
    """A pending request with its cost at each worker. `regret` is the cost difference between the
    best worker, `best_index`, and the second best."""

    __slots__ = ("_second_cost", "_tied", "best_index", "costs", "matrix", "regret", "request")

    def __init__(self, request: PendingRequest, matrix: CostMatrix, rng: Random) -> None:
        self.request = request
        self.matrix = matrix
        self.costs = matrix.row(request)
        self._update_best(rng)

    @property
    def worker(self) -> WorkerState:
        """The best worker."""
        return self.matrix.workers[self.best_index]

    def update_cost(self, index: int, cost: float, rng: Random) -> None:
        """Replace the cost of one worker."""
        before = self.costs[index]
        self.costs[index] = cost
        second = self._second_cost
        if self._tied or index == self.best_index or before <= second or cost <= second:
            self._update_best(rng)

    def add_holder(self, worker: WorkerState, rng: Random) -> None:
        """Add a worker that the row's own matrix lacks, if blocks of the prompt were sent there."""
        request = self.request
        if worker.name in request.overlaps and worker.names.isdisjoint(request.excluded):
            self.matrix.add_worker(worker)
            self.refresh(rng)

    def refresh(self, rng: Random) -> None:
        """Compute all costs again."""
        self.costs = self.matrix.row(self.request)
        self._update_best(rng)

    def _update_best(self, rng: Random) -> None:
        costs = self.costs
        order = sorted(costs)  # faster than two searches for the lowest
        best = order[0]
        self._second_cost = second = order[1] if len(order) > 1 else inf
        self.regret = second - best if second < inf else 0.0
        limit = best + abs(best) * TIE_TOLERANCE
        self._tied = second <= limit
        if self._tied:
            equal = [index for index, cost in enumerate(costs) if cost <= limit]
            self.best_index = equal[int(rng.random() * len(equal))]
        else:
            self.best_index = costs.index(best)


class RegretStep:
    """A window of requests; the one with the largest regret is placed first. Queued requests differ
    between workers by load alone: longest prompt first, and only the head of the queue has a row
    and competes with the others."""

    def __init__(
        self,
        others: Sequence[PendingRequest],
        queued: Sequence[PendingRequest],
        build_row: Callable[[PendingRequest], RegretRow],
    ) -> None:
        """`build_row` computes the current costs of a request."""
        self._build_row = build_row
        self._rows = [build_row(request) for request in others]
        self._queue_head: RegretRow | None = None
        self._set_queue(sorted(queued, key=_prompt_tokens, reverse=True)[::-1])

    def pop(self) -> RegretRow | None:
        """Remove and return the row to place next; None when no row is left."""
        rows = self._rows
        if self._queue and self._queue_head not in rows:
            self._next_blocks.pop()
            self._queue_head = self._build_row(self._queue.pop())
            rows.append(self._queue_head)
        if not rows:
            return None
        best = max(rows, key=_regret) if len(rows) > 1 else rows[0]
        rows.remove(best)
        return best

    def on_held(self, row: RegretRow, due: Callable[[PendingRequest], bool]) -> None:
        """Note that a popped row is held. A held queue head would be followed by the rest of the
        queue, so queued requests that are not `due` are dropped from the step."""
        if row is self._queue_head:
            self._set_queue([request for request in self._queue if due(request)])

    def keep_due(self, due: Callable[[PendingRequest], bool]) -> None:
        """Drop all requests that are not `due`."""
        self._rows = [row for row in self._rows if due(row.request)]
        self._set_queue([request for request in self._queue if due(request)])

    def on_placed(self, placed: PlacedRequest, shared: Iterable[CostMatrix], rng: Random) -> None:
        """Update costs and overlaps after a placement. Requests that have no row yet will use a
        matrix of `shared`."""
        groups: dict[CostMatrix, list[RegretRow]] = {matrix: [] for matrix in shared}
        for row in self._rows:
            _extend_overlap(row.request, placed)
            groups.setdefault(row.matrix, []).append(row)
        for matrix, group in groups.items():
            for worker in workers_of(placed):
                index = matrix.refresh_worker(worker)
                if index is None:
                    for row in group:
                        row.add_holder(worker, rng)
                elif group and not matrix.has_pairs:
                    costs = matrix.column([row.request for row in group], index)
                    for row, cost in zip(group, costs, strict=True):
                        row.update_cost(index, cost, rng)
            if matrix.has_pairs:  # the price of a decode worker is part of all costs
                for row in group:
                    row.refresh(rng)
        if self._queue and not set(placed.hashes).isdisjoint(self._next_blocks):
            self._promote_sharers(placed)

    def _promote_sharers(self, placed: PlacedRequest) -> None:
        """Give a row to each queued request that now prefers the worker of `placed`."""
        queue = []
        for request in self._queue:
            if _extend_overlap(request, placed):
                self._rows.append(self._build_row(request))
            else:
                queue.append(request)
        self._set_queue(queue)

    def _set_queue(self, queue: list[PendingRequest]) -> None:
        self._queue = queue
        self._next_blocks = [_first_uncached_block(request) for request in queue]


class SentBlocks:
    """The blocks of prompts that a round sent to each worker."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[str, set[int]]] = {}
        """First block of a prompt -> worker -> blocks sent there in prompts that begin with it.
        Block hashes are chained: prompts that share a block share the first one."""

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()

    def add(self, worker: str, hashes: Sequence[int]) -> None:
        """Add the blocks of a prompt that was sent to `worker`."""
        if hashes:
            self._blocks.setdefault(hashes[0], {}).setdefault(worker, set()).update(hashes)

    def extend_overlap_of(self, request: PendingRequest) -> bool:
        """Whether a worker was sent more blocks of the prompt than its overlap."""
        hashes, overlap = request.prompt.hashes, request.overlaps.get
        sent = self._blocks.get(hashes[0]) if hashes else None
        for worker, blocks in sent.items() if sent else ():
            depth = overlap(worker, 0)
            if depth < len(hashes) and hashes[depth] in blocks:
                return True
        return False


def workers_of(placed: PlacedRequest) -> Sequence[WorkerState]:
    """Return the worker that computes the prompt, and the one that decodes if that is another."""
    worker, decode_worker = placed.worker, placed.decode_worker
    return (worker,) if decode_worker is None else (worker, decode_worker)


def _prompt_tokens(request: PendingRequest) -> int:
    return request.prompt.tokens


def _first_uncached_block(request: PendingRequest) -> int | None:
    """Return the first block of a queued request that no worker holds, if any."""
    overlap, hashes = next(iter(request.overlaps.values()), 0), request.prompt.hashes
    return hashes[overlap] if overlap < len(hashes) else None


_regret = attrgetter("regret")


def _extend_overlap(request: PendingRequest, placed: PlacedRequest) -> bool:
    """Extend the overlaps at the workers of `placed` by the blocks that both prompts share. Return
    whether one grew."""
    placed_hashes, hashes, grew = placed.hashes, request.prompt.hashes, False
    for worker in workers_of(placed):
        overlap = request.overlaps.get(worker.name, 0)
        if (
            overlap < len(hashes)
            and overlap < len(placed_hashes)
            and hashes[overlap] == placed_hashes[overlap]
        ):
            request.overlaps[worker.name] = common_prefix_blocks(hashes, placed_hashes)
            grew = True
    return grew

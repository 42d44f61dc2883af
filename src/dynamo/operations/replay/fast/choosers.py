"""Choosers of workers in a fast replay: load balancing, or the placement solver of mode kv."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from msgspec.structs import replace

from dynamo.core.errors import DynamoError, WorkerFailed
from dynamo.core.kv_events import worker_name
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import KvEvent, Load, Started
from dynamo.operations.replay.fast.admission import STOPS, FastAdmission
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.least_loaded import LeastLoadedCandidates
from dynamo.operations.replay.fast.request import FastRequest, WorkerListener
from dynamo.operations.replay.fast.worker import FastWorker
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.load_balancing import (
    MODES,
    InstanceLoad,
    LoadBalancer,
    canonical_mode,
)
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.scheduling.migration import ATTEMPT_STRIDE
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.router.costs.pair_price import FLEXIBLE
from dynamo.scheduling.router.factory import make_solver
from dynamo.scheduling.router.features import decodes, only_prefills
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.workers import data_parallel_ranks

Send = Callable[[FastRequest, str], None]
"""Sends a request to the worker of that name."""
Reject = Callable[[FastRequest, DynamoError], None]


class Chooser(WorkerListener):
    """Chooses a worker for each request, and follows the requests."""

    @abstractmethod
    def choose(self, request: FastRequest) -> None:
        """Send the request to a worker, now or later. There is one."""

    @abstractmethod
    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        """Follow the workers that may get requests."""

    @abstractmethod
    def on_lost(self, request: FastRequest) -> None:
        """Take note that the worker of a request has died."""

    @property
    def waiting(self) -> Iterable[FastRequest]:
        """The requests that wait for a worker."""
        return ()


class BalancerChooser(Chooser):
    """A mode that knows nothing of models, such as round robin."""

    def __init__(
        self, instances: Mapping[str, Instance], ranks: int, mode: str, rng: Random, send: Send
    ) -> None:
        self._pick = MODES[canonical_mode(mode)]
        self._loads: list[InstanceLoad] = []
        self._ranks = ranks
        self._counts, self._choices = Counter[str](), Counter[str]()
        self._balancer = LoadBalancer(rng, self._counts.__getitem__)
        self._send = send
        self.update_instances(instances)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        self._loads = [InstanceLoad(each) for each in instances.values() if decodes(each)]

    def on_lost(self, request: FastRequest) -> None:
        self.on_finished(request)

    def choose(self, request: FastRequest) -> None:
        name = self._pick(self._balancer, self._loads).instance.id
        self._counts[name] += 1
        if self._ranks > 1:
            name = self._choose_rank(name)
        self._send(request, name)

    def _choose_rank(self, instance: str) -> str:
        """Choose a rank as `RankBalancer` does: with the fewest requests, ties to the next one."""
        self._choices[instance] += 1
        first, ranks = self._choices[instance], self._ranks
        names = [worker_name(instance, (first + rank) % ranks) for rank in range(ranks)]
        name = min(names, key=self._counts.__getitem__)
        self._counts[name] += 1
        return name

    def on_finished(self, request: FastRequest) -> None:
        self._counts[request.worker] -= 1
        if self._ranks > 1:
            self._counts[request.worker.partition("/")[0]] -= 1

    def on_first_token(self, request: FastRequest) -> None:
        pass

    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        pass

    def on_kv_events(self, worker: str, events: Sequence[KvEvent]) -> None:
        pass


class _EmittedTokens:
    """The token log of a request whose tokens are counted when somebody asks."""

    __slots__ = ("_clock", "_request", "_workers")

    def __init__(
        self, request: FastRequest, workers: Mapping[str, FastWorker], clock: EventHeap
    ) -> None:
        self._request = request
        self._workers = workers
        self._clock = clock

    def __len__(self) -> int:
        request = self._request
        if not request.worker:
            return request.recomputed
        return self._workers[request.worker].emitted(request, self._clock.time_s)


class _RemovedRuns(RemovedBlocks):
    """Counts the blocks of removed runs."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._blocks = blocks

    def on_removed(self, hashes: Iterable[int]) -> None:
        super().on_removed(self._split(hashes))

    def on_prompt(self, hashes: Sequence[int], cached_share: float) -> None:
        super().on_prompt(self._split(hashes), cached_share)

    def _split(self, runs: Iterable[int]) -> list[int]:
        blocks = range(self._blocks)
        return [run * self._blocks + block for run in runs for block in blocks]


class SolverChooser(Chooser):
    """Mode kv: the router's ledger, index and solver. A block is a run of the trace."""

    def __init__(
        self,
        instances: Mapping[str, Instance],
        settings: RouterSettings,
        transfer: float | None,
        run_tokens: int,
        block_tokens: int,
        workers: Mapping[str, FastWorker],
        heap: EventHeap,
        rng: Random,
        send: Send,
        reject: Reject,
        hold: Callable[[FastRequest], None],
        *,
        admits: bool,
    ) -> None:
        """`hold` keeps a request until there is a worker for it."""
        self._workers, self._heap = workers, heap
        self._run_tokens, self._transfer = run_tokens, transfer
        self._send, self._reject, self._hold = send, reject, hold
        self._view = CacheView(heap, block_tokens=run_tokens)
        self._ledger = ledger = Ledger(heap)
        self.solver = make_solver(settings, self._view, rng, ledger)
        self._own_cost, self._pair_cost = self.solver.cost, PairCost(settings.disaggregation)
        if transfer is None:  # else the router's own shortlist has the best pairs
            self.solver.make_shortlist = LeastLoadedCandidates
        elif self._pair_cost.removed_blocks is not None:
            blocks = run_tokens // block_tokens
            self._pair_cost.removed_blocks = _RemovedRuns(blocks)
        self._known: Mapping[str, Instance] = {}
        self._can_answer = False
        self._requests: dict[str, FastRequest] = {}
        self._scheduled = False
        self._due_s: float | None = None
        self._admission: FastAdmission | None = None
        if admits:
            limits = heap, settings, self._submit, reject
            self._admission = FastAdmission({}, self.solver, *limits)
        self.update_instances(instances)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        view, states, before = self._view, self._ledger.workers, self._known
        self._known = instances
        states.update_instances(instances)
        for name in before.keys() - instances.keys():
            for rank in data_parallel_ranks(before[name]):
                view.remove_worker(worker_name(name, rank))
        for name in instances.keys() - before.keys():
            ranks = data_parallel_ranks(instances[name])
            for rank in ranks:
                view.apply(worker_name(name, rank), ())
            if self._transfer is not None:
                load = Load(transfer_bytes_per_s=self._transfer)
                report = replace(load, ranks=(load,) * len(ranks))
                states.on_load_report(name, report, self._heap.time_s)
        self._can_answer = any(map(decodes, instances.values()))
        self._use_cost()
        view.set_cacheless_workers(states.cacheless)
        if self._admission is not None:
            self._admission.update_instances(instances)
        for pending in self.solver.pop_unplaceable():
            self._hold_pending(self._requests.pop(pending.id))
        if len(self.solver):
            self._schedule()

    def _use_cost(self) -> None:
        """Price pairs of workers where `KvPolicy` does."""
        pairs, instances = self._pair_cost, self._known
        priced = self._transfer is not None and (
            pairs.rules.mode == FLEXIBLE or any(map(only_prefills, instances.values()))
        )
        self.solver.cost = pairs if priced else self._own_cost
        self._view.removed_blocks = pairs.removed_blocks if priced else None

    def choose(self, request: FastRequest) -> None:
        if self._admission is not None and not request.moves:
            self._admission.admit(request)
        else:
            self._submit(request)

    def _hold_pending(self, request: FastRequest) -> None:
        self._hold(request)
        if self._admission is not None:
            self._admission.on_not_placed(request)

    def _submit(self, request: FastRequest) -> None:
        if not self._can_answer:
            self._hold_pending(request)
            return
        key = f"{request.row}/0/{request.moves * ATTEMPT_STRIDE}"
        prompt = Prompt(request.length, request.keys[: request.units])
        self._requests[key] = request
        pending = PendingRequest(key, prompt, self._run_tokens, self._heap.time_s, request.excluded)
        pending.max_tokens = STOPS.max_tokens - request.recomputed
        pending.priority = request.moves
        self.solver.submit(pending)
        self._schedule()

    def on_first_token(self, request: FastRequest) -> None:
        if request.placed is not None:
            if self._ledger.on_started:
                started = Started("", request.cached_tokens, request.prompt_tokens)
                for notify in self._ledger.on_started:
                    notify(request.placed, started)
            self._ledger.first_token(request.placed)
            if len(self.solver):
                self._schedule()

    def on_finished(self, request: FastRequest) -> None:
        self._end(request, None)

    def on_lost(self, request: FastRequest) -> None:
        self._end(request, WorkerFailed("the worker has died"))

    @property
    def waiting(self) -> Iterable[FastRequest]:
        queued = () if self._admission is None else self._admission.queued.values()
        return [*self._requests.values(), *queued]

    def _end(self, request: FastRequest, error: DynamoError | None) -> None:
        if request.placed is not None:
            request.placed.output_tokens = request.output_tokens
            self._ledger.end(request.placed, error)
            request.placed = None  # its token log refers to the request
            if len(self.solver):
                self._schedule()

    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        pass

    def on_kv_events(self, worker: str, events: Sequence[KvEvent]) -> None:
        self._view.apply(worker, events)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._heap.soon.append(self._run_round)

    def _run_round(self) -> None:
        self._scheduled = False
        solver, now = self.solver, self._heap.time_s
        while True:
            for result in solver.place(now):
                request = self._requests.pop(result.request.id)
                request.placed = placed = result.placed
                tokens = _EmittedTokens(request, self._workers, self._heap)
                placed.attach_token_log(tokens)  # type: ignore[arg-type]
                if placed.decode_worker is not None:
                    request.source = placed.worker.name
                self._send(request, placed.answering.name)
            if not solver.unfinished:
                break
        for pending, error in solver.pop_rejected():
            request = self._requests.pop(pending.id)
            self._reject(request, error)
            if self._admission is not None:
                self._admission.on_not_placed(request)
        due = solver.next_run_s(now)
        if due is not None and (self._due_s is None or due < self._due_s):
            self._due_s = due
            self._heap.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        if self._due_s is not None and self._heap.time_s >= self._due_s:
            self._due_s = None
            if len(self.solver):
                self._schedule()

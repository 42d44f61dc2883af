"""Choosers of workers in a fast replay: load balancing, or the placement solver of mode kv."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple, cast

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
from dynamo.runtime.calls.load_balancing import MODES, InstanceLoad, LoadBalancer, canonical_mode
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.scheduling.migration import ATTEMPT_STRIDE
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.router.costs.pair_price import FLEXIBLE
from dynamo.scheduling.router.factory import make_solver
from dynamo.scheduling.router.features import decodes, only_prefills
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import data_parallel_ranks


class ChooserInputs(NamedTuple):
    """Everything that a chooser needs. `send` sends a request to the worker of a name, `hold` keeps
    one until there is a worker for it. Requests are admitted if it `admits`."""

    instances: Mapping[str, Instance]
    settings: RouterSettings
    workers: Mapping[str, FastWorker]
    heap: EventHeap
    rng: Random
    send: Callable[[FastRequest, str], None]
    reject: Callable[[FastRequest, DynamoError], None]
    hold: Callable[[FastRequest], None]
    admits: bool


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

    def on_load_report(self, worker: str, load: Load) -> None:
        """Take note of the load of a worker."""


class BalancerChooser(Chooser):
    """A mode that knows nothing of models, such as round robin, without ranks and roles."""

    def __init__(self, inputs: ChooserInputs) -> None:
        self._pick = MODES[canonical_mode(inputs.settings.mode)]
        self._loads: list[InstanceLoad] = []
        self._counts = Counter[str]()
        self._balancer = LoadBalancer(inputs.rng, self._counts.__getitem__)
        self._send = inputs.send
        self.update_instances(inputs.instances)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        self._loads = [InstanceLoad(each) for each in instances.values() if decodes(each)]

    def on_lost(self, request: FastRequest) -> None:
        self.on_finished(request)

    def choose(self, request: FastRequest) -> None:
        name = self._pick(self._balancer, self._loads).instance.id
        self._counts[name] += 1
        self._send(request, name)

    def on_finished(self, request: FastRequest) -> None:
        self._counts[request.worker] -= 1

    def on_first_token(self, request: FastRequest) -> None:
        pass

    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        pass

    def on_kv_events(self, worker: str, events: Sequence[KvEvent]) -> None:
        pass


class EmittedTokens:
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


class LedgerChooser(Chooser):
    """A mode with the ledger of a router."""

    def __init__(self, inputs: ChooserInputs) -> None:
        self._workers, self._heap = inputs.workers, inputs.heap
        self._send, self._reject, self._hold = inputs.send, inputs.reject, inputs.hold
        self._settings, self.ledger = inputs.settings, Ledger(inputs.heap)
        self._can_answer = False
        self._admission: FastAdmission | None = None

    def _open_admission(self, policy: Policy) -> None:
        """Admit requests from now on. `policy` predicts for it."""
        limits = self._heap, self._settings, self._submit, self._reject
        self._admission = FastAdmission(self.ledger, policy, *limits)

    @abstractmethod
    def _submit(self, request: FastRequest) -> None:
        """Send an admitted request to a worker, now or later."""

    def choose(self, request: FastRequest) -> None:
        if self._admission is not None and not request.moves:
            self._admission.admit(request)
        else:
            self._submit(request)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        self._can_answer = any(map(decodes, instances.values()))
        self.ledger.workers.update_instances(instances)

    @property
    def waiting(self) -> Iterable[FastRequest]:
        return () if self._admission is None else self._admission.queued.values()

    def _hold_pending(self, request: FastRequest) -> None:
        self._hold(request)
        if self._admission is not None:
            self._admission.on_not_placed(request)

    def _send_placed(self, request: FastRequest, placed: PlacedRequest) -> None:
        request.placed = placed
        tokens = EmittedTokens(request, self._workers, self._heap)
        placed.attach_token_log(tokens)  # type: ignore[arg-type]
        if placed.decode_worker is not None:
            request.source = placed.worker.name
        self._send(request, placed.answering.name)

    def on_first_token(self, request: FastRequest) -> None:
        if request.placed is not None:
            if self.ledger.on_started:
                started = Started("", request.cached_tokens, request.prompt_tokens)
                for notify in self.ledger.on_started:
                    notify(request.placed, started)
            self.ledger.first_token(request.placed)

    def on_finished(self, request: FastRequest) -> None:
        self._end(request, None)

    def on_lost(self, request: FastRequest) -> None:
        self._end(request, WorkerFailed("the worker has died"))

    def _end(self, request: FastRequest, error: DynamoError | None) -> None:
        if request.placed is not None:
            request.placed.output_tokens = request.output_tokens
            self.ledger.end(request.placed, error)
            request.placed = None  # its token log refers to the request

    def on_load_report(self, worker: str, load: Load) -> None:
        now = self._heap.time_s
        self.ledger.on_load_report(worker, load, now)
        self._on_load(worker, load, now)
        if self._admission is not None:
            self._admission.on_load_report(worker, load, now)

    @abstractmethod
    def _on_load(self, worker: str, load: Load, now: float) -> None:
        """Let the policy see the load of a worker."""

    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        pass


class SolverChooser(LedgerChooser):
    """Mode kv: the router's ledger, index and solver. A block is a run of the trace."""

    def __init__(
        self, inputs: ChooserInputs, transfer: float | None, run_tokens: int, block_tokens: int
    ) -> None:
        super().__init__(inputs)
        settings = inputs.settings
        self._run_tokens, self._transfer = run_tokens, transfer
        self._view = CacheView(inputs.heap, block_tokens=run_tokens)
        self.solver = make_solver(settings, self._view, inputs.rng, self.ledger)
        self._own_cost, self._pair_cost = self.solver.cost, PairCost(settings.disaggregation)
        if transfer is None:  # else the router's own shortlist has the best pairs
            self.solver.make_shortlist = LeastLoadedCandidates
        elif self._pair_cost.removed_blocks is not None:
            blocks = run_tokens // block_tokens
            self._pair_cost.removed_blocks = _RemovedRuns(blocks)
        self._known: Mapping[str, Instance] = {}
        self._requests: dict[str, FastRequest] = {}
        self._scheduled = False
        self._due_s: float | None = None
        if inputs.admits:
            self._open_admission(cast("Policy", _SolverPrediction(self.solver)))
        self.update_instances(inputs.instances)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        view, states, before = self._view, self.ledger.workers, self._known
        self._known = instances
        super().update_instances(instances)
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

    @property
    def waiting(self) -> Iterable[FastRequest]:
        return [*self._requests.values(), *super().waiting]

    def on_first_token(self, request: FastRequest) -> None:
        super().on_first_token(request)
        if len(self.solver):
            self._schedule()

    def _end(self, request: FastRequest, error: DynamoError | None) -> None:
        super()._end(request, error)
        if len(self.solver):
            self._schedule()

    def _on_load(self, worker: str, load: Load, now: float) -> None:
        self.ledger.workers.on_load_report(worker, load, now)
        self._pair_cost.steering.on_load_report(worker, load, now)

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
                self._send_placed(request, result.placed)
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


class _SolverPrediction:
    """The part of a policy that admission uses."""

    predicts = True

    def __init__(self, solver: PlacementSolver) -> None:
        self._solver = solver

    def predict_pair_ms(
        self, workers: Sequence[WorkerState], tokens: int, ahead: int, now: float
    ) -> float | None:
        cost = self._solver.cost
        return cost.predict_ms(workers, tokens, ahead, now) if isinstance(cost, PairCost) else None

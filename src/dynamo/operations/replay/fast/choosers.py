"""Choosers of workers in a fast replay: load balancing, or the placement solver of mode kv."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from dynamo.core.errors import DynamoError
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import KvEvent, Load, Started
from dynamo.operations.replay.fast.admission import STOPS, FastAdmission
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.least_loaded import LeastLoadedCandidates
from dynamo.operations.replay.fast.request import FastRequest, WorkerListener
from dynamo.operations.replay.fast.worker import FastWorker
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.load_balancing import InstanceLoad, LoadBalancer, canonical_mode
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.router.costs.pair_price import FLEXIBLE
from dynamo.scheduling.router.factory import make_solver
from dynamo.scheduling.router.features import only_prefills
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt

Send = Callable[[FastRequest, str], None]
"""Sends a request to the worker of that name."""
Reject = Callable[[FastRequest, DynamoError], None]


class Chooser(WorkerListener):
    """Chooses a worker for each request, and follows the requests."""

    @abstractmethod
    def choose(self, request: FastRequest) -> None:
        """Send the request to a worker, now or later."""


class BalancerChooser(Chooser):
    """A mode that knows nothing of models, such as round robin."""

    def __init__(
        self, instances: Mapping[str, Instance], mode: str, rng: Random, send: Send
    ) -> None:
        self._mode = canonical_mode(mode)
        self._counts = dict.fromkeys(instances, 0)
        self._balancer = LoadBalancer(rng, self._counts.__getitem__)
        self._balancer.set_candidates([InstanceLoad(each) for each in instances.values()])
        self._send = send

    def choose(self, request: FastRequest) -> None:
        name = self._balancer.pick(self._mode).instance.id
        self._counts[name] += 1
        self._send(request, name)

    def on_finished(self, request: FastRequest) -> None:
        self._counts[str(request.worker)] -= 1

    def on_first_token(self, request: FastRequest) -> None:
        pass

    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        pass

    def on_kv_events(self, number: int, events: Sequence[KvEvent]) -> None:
        pass


class _EmittedTokens:
    """The token log of a request whose tokens are counted when somebody asks."""

    __slots__ = ("_clock", "_request", "_workers")

    def __init__(
        self, request: FastRequest, workers: Sequence[FastWorker], clock: EventHeap
    ) -> None:
        self._request = request
        self._workers = workers
        self._clock = clock

    def __len__(self) -> int:
        request = self._request
        if request.worker < 0:
            return 0
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
        workers: Sequence[FastWorker],
        heap: EventHeap,
        rng: Random,
        send: Send,
        reject: Reject,
        *,
        admits: bool,
    ) -> None:
        self._workers, self._heap = workers, heap
        self._run_tokens = run_tokens
        self._send, self._reject = send, reject
        self._view = CacheView(heap, block_tokens=run_tokens)
        self._ledger = ledger = Ledger(heap)
        ledger.workers.update_instances(instances)
        for worker in ledger.workers.workers:
            self._view.apply(worker.name, ())
        self.solver = make_solver(settings, self._view, rng, ledger)
        if transfer is None:
            self.solver.make_shortlist = LeastLoadedCandidates
        else:  # the router's own shortlist has the best pairs
            blocks = run_tokens // workers[0].info.block_tokens
            self._price_pairs(settings, instances, transfer, blocks)
        self._view.set_cacheless_workers(ledger.workers.cacheless)
        self._requests: dict[str, FastRequest] = {}
        self._scheduled = False
        self._due_s: float | None = None
        self._admission: FastAdmission | None = None
        if admits:
            limits = heap, settings, self._submit, reject
            self._admission = FastAdmission(instances, self.solver, *limits)

    def _price_pairs(
        self,
        settings: RouterSettings,
        instances: Mapping[str, Instance],
        transfer: float,
        blocks: int,
    ) -> None:
        """Price pairs of workers, as `KvPolicy` does, with the known rate of their links. A run has
        so many `blocks`."""
        for name in instances:
            load = Load(transfer_bytes_per_s=transfer)
            self._ledger.workers.on_load_report(name, load, 0.0)
        if settings.disaggregation.mode == FLEXIBLE or any(map(only_prefills, instances.values())):
            self.solver.cost = cost = PairCost(settings.disaggregation)
            if cost.removed_blocks is not None:
                cost.removed_blocks = _RemovedRuns(blocks)
            self._view.removed_blocks = cost.removed_blocks

    def choose(self, request: FastRequest) -> None:
        if self._admission is not None:
            self._admission.admit(request)
        else:
            self._submit(request)

    def _submit(self, request: FastRequest) -> None:
        key = f"{request.row}/0/0"
        prompt = Prompt(request.prompt_tokens, request.keys[: request.units])
        self._requests[key] = request
        pending = PendingRequest(key, prompt, self._run_tokens, self._heap.time_s, request.excluded)
        pending.max_tokens = STOPS.max_tokens
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
        if request.placed is not None:
            request.placed.output_tokens = request.output_tokens
            self._ledger.end(request.placed, None)
            request.placed = None  # its token log refers to the request
            if len(self.solver):
                self._schedule()

    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        pass

    def on_kv_events(self, number: int, events: Sequence[KvEvent]) -> None:
        self._view.apply(str(number), events)

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
                    request.source = int(placed.worker.name)
                self._send(request, placed.answering.name)
            if not solver.unfinished:
                break
        for pending, error in solver.pop_rejected():
            request = self._requests.pop(pending.id)
            self._reject(request, error)
            if self._admission is not None:
                self._admission.on_rejected(request)
        due = solver.next_run_s(now)
        if due is not None and (self._due_s is None or due < self._due_s):
            self._due_s = due
            self._heap.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        if self._due_s is not None and self._heap.time_s >= self._due_s:
            self._due_s = None
            if len(self.solver):
                self._schedule()

"""A deployment for tests of the planner, whose time, starts, faults and figures tests decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from dynamo.core.errors import NotFound, PlaneUnavailable
from dynamo.core.timing.model import Timing
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.planner import ScalePlanner, plan_once
from dynamo.operations.planner.values import Demand, EngineLimits, KindState, Order, ScaleDecision

TIMING = Timing(c0=12.0, c1=0.09, c2=0.05, c3=6e-5)
LIMITS = EngineLimits(max_seqs=256, kv_tokens=600_000, step_tokens=8192)


@dataclass
class Worker:
    """A worker that serves from `ready_s` on, and leaves at `gone_s`."""

    ready_s: float
    gone_s: float = float("inf")


@dataclass
class Cluster(Connector):
    """Kinds of workers in virtual time. `start_s` and `drain_s` are what both take."""

    kinds: dict[str, KindState]
    start_s: float = 30.0
    drain_s: float = 20.0
    now_s: float = 0.0
    orders: list[Order] = field(default_factory=list)
    fail_next: int = 0
    """So many of the next orders fail."""
    unreachable: bool = False
    late_s: float = 0.0
    """Figures of the kinds are so old."""

    def __post_init__(self) -> None:
        self.workers = {
            name: [Worker(0.0) for _ in range(kind.wanted)] for name, kind in self.kinds.items()
        }
        self._numbers: set[int] = set()
        self._seen: list[tuple[float, Mapping[str, KindState]]] = []

    async def observe(self) -> Mapping[str, KindState]:
        if self.unreachable:
            raise PlaneUnavailable("the deployment does not answer")
        self._seen.append((self.now_s, self.states()))
        return next(
            (states for at, states in reversed(self._seen) if at <= self.now_s - self.late_s),
            self._seen[0][1],
        )

    async def scale(self, order: Order) -> None:
        if order.kind not in self.workers:
            raise NotFound(f"no kind is called {order.kind}")
        if self.fail_next:
            self.fail_next -= 1
            raise PlaneUnavailable("the supervisor does not answer")
        if order.number in self._numbers:
            return
        self._numbers.add(order.number)
        self.orders.append(order)
        if order.takes_from:
            count = order.count - len(self.wanted(order.kind))
            for worker in self.wanted(order.takes_from)[:count]:
                self.workers[order.takes_from].remove(worker)
                self.workers[order.kind].append(worker)
        self.set_size(order.kind, order.count)

    def set_size(self, kind: str, count: int) -> None:
        """Start or drain workers: those that do not serve yet leave first, at once."""
        wanted = self.wanted(kind)
        newest = sorted(wanted, key=lambda each: -each.ready_s)
        for worker in newest[: max(0, len(wanted) - count)]:
            serves = worker.ready_s <= self.now_s
            worker.gone_s = self.now_s + (self.drain_s if serves else 0.0)
        for _ in range(count - len(wanted)):
            self.workers[kind].append(Worker(self.now_s + self.start_s))

    def wanted(self, kind: str) -> list[Worker]:
        """Return the workers that are to run."""
        return [each for each in self.workers[kind] if each.gone_s == float("inf")]

    def states(self) -> dict[str, KindState]:
        """Return the kinds as they are now."""
        states = {}
        for name, kind in self.kinds.items():
            wanted = self.wanted(name)
            ready = sum(each.ready_s <= self.now_s for each in wanted)
            gone = [each for each in self.workers[name] if each not in wanted]
            states[name] = replace(
                kind,
                wanted=len(wanted),
                ready=ready,
                starting=len(wanted) - ready,
                draining=sum(each.gone_s > self.now_s for each in gone),
            )
        return states

    def gpus(self) -> int:
        """Return the GPUs that all workers hold now."""
        return sum(
            (state.ready + state.starting + state.draining) * (state.gpus or 1)
            for state in self.states().values()
        )

    async def plan(self, planner: ScalePlanner, demand: Demand | None) -> ScaleDecision:
        """Let the planner decide once, with this demand of the only model."""

        async def measure() -> Mapping[str, Demand]:
            return {} if demand is None else {"": demand}

        return await plan_once(planner, self, measure, lambda _: None, self.now_s)


def make_demand(requests: int = 0, **fields: float) -> Demand:
    """Return the demand of 15 s: prompts of 1,000 tokens, answers of 200."""
    values = {
        "prompt_tokens": requests * 1000.0,
        "ended": requests,
        "output_tokens": requests * 200.0,
        **fields,
    }
    return Demand(15.0, requests, timing=TIMING, limits=LIMITS, **values)  # type: ignore[arg-type]

"""The workers of a replay over time: they start, drain, die, and change their roles."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.errors import NotFound, nearest_name_hint
from dynamo.core.values import BOTH_ROLES
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers

Lifetime = Literal["starting", "ready", "draining", "gone"]


class Startup(msgspec.Struct, frozen=True):
    """The time from the order of a worker until it serves: uniform between two times."""

    low_s: float = 0.0
    high_s: float = 0.0

    def draw(self, rng: Random) -> float:
        """Return the time that one start takes."""
        spread_s = self.high_s - self.low_s
        return self.low_s + spread_s * rng.random() if spread_s else self.low_s


class KindCounts(msgspec.Struct, frozen=True):
    """The workers of one kind. `wanted` are ordered and not told to leave. `failing` of them have
    died, and nobody has ordered others in their place."""

    wanted: int
    starting: int
    ready: int
    draining: int
    failing: int = 0


class FleetChange(msgspec.Struct, frozen=True):
    """The workers of one kind from a time on, until its next change."""

    time_s: float
    kind: str
    starting: int
    ready: int
    draining: int


class FleetDemand(msgspec.Struct, frozen=True):
    """The requests that arrived and ended since the start of the replay, and those of now.

    `requests` and their `prompt_tokens` are arrivals, also those that are rejected. `cached_tokens`
    and `output_tokens` are those of the `ended` requests. `queued_tokens`: prompt tokens that no
    worker has computed yet, `running`: requests that decode, `waiting`: requests without a worker.
    """

    requests: int
    prompt_tokens: int
    ended: int
    cached_tokens: int
    output_tokens: int
    queued_tokens: int
    running: int
    waiting: int


@dataclass(slots=True, eq=False)
class FleetWorker:
    """A worker since its order. `group` has its engine with the roles of now."""

    number: int
    kind: str
    group: ReplayGroup
    ordered_s: float
    state: Lifetime = "starting"
    left_s: float = math.inf

    @property
    def serves(self) -> bool:
        """Whether the worker has requests, or may get some."""
        return self.state in ("ready", "draining")


class ReplayFleet(ABC):
    """The workers of a replay, which scripts and planners change at virtual times: those of
    `clock`, which calls them back with `call_at`. `workers` holds all workers, numbered in order of
    their orders, also those that are gone, `draining` those that drain. The workers of the plan are
    ready from the start. `moved` counts requests that lost a worker."""

    def __init__(
        self, workers: ReplayWorkers, clock: Clock, rng: Random, startup: Startup | None = None
    ) -> None:
        self.clock = clock
        self.workers: list[FleetWorker] = []
        self.timeline: list[FleetChange] = []
        self._startup, self._rng = startup or Startup(), rng
        self._kinds = {group.kind: group for group in workers.groups}
        self._dead = Counter[str]()
        self.draining: dict[FleetWorker, None] = {}
        self.moved = 0
        for number, group in enumerate(workers):
            self.workers.append(FleetWorker(number, group.kind, group, 0.0, "ready"))
        for kind in self._kinds:
            self._note(kind)

    @abstractmethod
    def demand(self) -> FleetDemand:
        """Return the load."""

    @abstractmethod
    def count_requests(self, worker: FleetWorker) -> int:
        """Return how many requests and prompts for others a worker has."""

    @abstractmethod
    def _on_changed(self, worker: FleetWorker) -> None:
        """Let the router see a worker that is ready, has other roles, drains or is gone."""

    @abstractmethod
    def _on_died(self, worker: FleetWorker) -> None:
        """Move the requests of a worker that has died. The router does not see it any more."""

    @property
    def is_starting(self) -> bool:
        """Whether any worker starts."""
        return any(worker.state == "starting" for worker in self.workers)

    def observe(self) -> Mapping[str, KindCounts]:
        """Return the workers of each kind."""
        return {kind: self._count(kind) for kind in self._kinds}

    def of_kind(self, kind: str, state: Lifetime = "ready") -> Sequence[FleetWorker]:
        """Return the workers of a kind in a state, the least busy first. Raises `NotFound`."""
        self._group(kind)
        workers = [each for each in self.workers if each.kind == kind and each.state == state]
        return sorted(workers, key=self.count_requests)

    def start(self, kind: str, start_s: float | None = None) -> FleetWorker:
        """Order a worker of a kind, which serves after `start_s` (default: by `startup`). Raises
        `NotFound` for an unknown kind."""
        group, now = self._group(kind), self.clock.now()
        worker = FleetWorker(len(self.workers), kind, group, now)
        self.workers.append(worker)
        self._dead[kind] = max(0, self._dead[kind] - 1)
        self._note(kind)
        start_s = self._startup.draw(self._rng) if start_s is None else start_s
        if start_s:
            self.clock.call_at(now + start_s, partial(self._on_started, worker))
        else:
            self._on_started(worker)
        return worker

    def drain(self, worker: FleetWorker) -> None:
        """Let a worker leave after its last request, or at once if it only starts."""
        if worker.state == "starting":
            self._leave(worker)
        elif worker.state == "ready":
            self._set_state(worker, "draining")
            self.leave_if_drained(worker)

    def revive(self, worker: FleetWorker) -> None:
        """Let a worker that drains stay. Others are ignored."""
        if worker.state == "draining":
            self._set_state(worker, "ready")

    def kill(self, worker: FleetWorker, *, restart: bool = False) -> None:
        """Let a worker die, as at a crash: what it has computed is lost. Its requests go on at
        other workers. `restart`: another one is started in its place."""
        if worker.state == "gone":
            return
        served = worker.state != "starting"
        self._dead[worker.kind] += worker.state != "draining"
        self._leave(worker)
        if served:
            self._on_died(worker)
        if restart:
            self.start(worker.kind)

    def set_role(self, worker: FleetWorker, role: str) -> None:
        """Change what a worker computes at once: `prefill`, `decode` or `both`. From then on it is
        of the kind that has this role, if there is one. Requests that it has end there."""
        roles = BOTH_ROLES if role == "both" else (role,)
        if worker.state == "gone" or worker.group.engine.roles == roles:
            return
        group, before = worker.group, worker.kind
        worker.group = replace(group, engine=replace(group.engine, roles=roles))
        kinds = [kind for kind, each in self._kinds.items() if each.engine.roles == roles]
        worker.kind = before if before in kinds else next(iter(kinds), before)
        for kind in {before, worker.kind}:
            self._note(kind)
        if worker.state == "ready":
            self._on_changed(worker)

    def leave_if_drained(self, worker: FleetWorker) -> None:
        """Let a draining worker go whose last request has ended."""
        if worker.state == "draining" and not self.count_requests(worker):
            self._leave(worker)

    def check_draining(self) -> None:
        """Let the draining workers go whose last requests have ended."""
        for worker in [*self.draining]:
            self.leave_if_drained(worker)

    @property
    def has_changed(self) -> bool:
        """Whether there were other workers than those of the plan."""
        return len(self.timeline) > len(self._kinds)

    def lifetimes_s(self, end_s: float, begin_s: float = 0.0) -> Iterator[float]:
        """Yield how long each worker held its GPUs between two times: starting and draining
        count."""
        for worker in self.workers:
            yield max(0.0, min(worker.left_s, end_s) - max(worker.ordered_s, begin_s))

    def _group(self, kind: str) -> ReplayGroup:
        group = self._kinds.get(kind)
        if group is None:
            hint = nearest_name_hint(kind, self._kinds)
            raise NotFound(f"there is no kind of workers {kind!r}", hint=hint)
        return group

    def _on_started(self, worker: FleetWorker) -> None:
        if worker.state == "starting":
            self._set_state(worker, "ready")

    def _leave(self, worker: FleetWorker) -> None:
        worker.left_s = self.clock.now()
        self._set_state(worker, "gone")

    def _set_state(self, worker: FleetWorker, state: Lifetime) -> None:
        self.draining.pop(worker, None)
        worker.state = state
        if state == "draining":
            self.draining[worker] = None
        self._note(worker.kind)
        self._on_changed(worker)

    def _count(self, kind: str) -> KindCounts:
        states = Counter(each.state for each in self.workers if each.kind == kind)
        starting, ready, dead = states["starting"], states["ready"], self._dead[kind]
        wanted = starting + ready + dead
        return KindCounts(wanted, starting, ready, states["draining"], dead)

    def _note(self, kind: str) -> None:
        """Add the present counts of a kind to the timeline."""
        counts, now = self._count(kind), self.clock.now()
        last = self.timeline[-1] if self.timeline else None
        change = FleetChange(now, kind, counts.starting, counts.ready, counts.draining)
        if last is not None and (last.time_s, last.kind) == (now, kind):
            self.timeline[-1] = change
        else:
            self.timeline.append(change)

"""Cache and load of every worker over time, as far as the router knows them: for the picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.core.values import Load
from dynamo.scheduling.router.explain.watch import RoutingWatch

EVERY_S = 1.0
KEPT = 900


class WorkerSample(msgspec.Struct, frozen=True):
    """One worker at one moment. Blocks and requests are counts of its own; `sent`: requests under
    way there from this router; `routed`: those sent since the sample before."""

    cached_blocks: int = 0
    active_blocks: int = 0
    total_blocks: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    sent: int = 0
    routed: int = 0
    view: str = ""


class Sample(msgspec.Struct, frozen=True):
    """All workers at one moment (Unix time); `waiting`: requests held in the router."""

    at: float
    waiting: int
    workers: dict[str, WorkerSample]


class Timeline:
    """The last `kept` samples."""

    def __init__(self, watch: RoutingWatch, kept: int = KEPT) -> None:
        self._watch = watch
        self._samples: deque[Sample] = deque(maxlen=kept)
        self._routed: dict[str, int] = {}

    def sample(
        self,
        at: float,
        workers: Sequence[str],
        loads: Mapping[str, Load],
        *,
        views: Mapping[str, str],
        waiting: int,
    ) -> None:
        """Keep how it is now."""
        made = {name: self._worker(name, loads.get(name), views.get(name, "")) for name in workers}
        self._watch.forget(workers)
        self._routed = dict(self._watch.routed)
        self._samples.append(Sample(at, waiting, made))

    def since(self, at: float = 0.0) -> list[Sample]:
        """Samples after a moment, oldest first."""
        return [one for one in self._samples if one.at > at]

    def _worker(self, name: str, load: Load | None, view: str) -> WorkerSample:
        load = load or Load()
        routed = self._watch.routed[name] - self._routed.get(name, 0)
        return WorkerSample(
            cached_blocks=load.cached_blocks,
            active_blocks=load.active_blocks,
            total_blocks=load.total_blocks,
            running=load.running,
            waiting=load.waiting,
            prefill_tokens=load.prefill_tokens,
            sent=self._watch.active[name],
            routed=routed,
            view=view,
        )

"""Scripts that change the workers of a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.core.settings.units import parse_seconds
from dynamo.operations.bench.traces import numbered_lines
from dynamo.operations.replay.fleet import FleetWorker, ReplayFleet
from dynamo.operations.replay.workers import ReplayWorkers, check_count

HINT = 'a line is like {"time": 60, "action": "start", "kind": "worker", "count": 2}'


class FleetEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a script: at `time` seconds, `count` workers of a `kind` start, drain, die or get a
    `role`. The least busy workers drain, the busiest ones die. `worker` names one by its number
    instead. `startup` is the time of these starts. Workers that die start again unless `restart` is
    false."""

    time: float
    action: Literal["start", "drain", "die", "role"]
    kind: str = "worker"
    count: int = 1
    worker: int | None = None
    role: Literal["", "prefill", "decode", "both"] = ""
    startup: float | None = None
    restart: bool = True

    @property
    def fault(self) -> str:
        """Why the event cannot be, or ""."""
        if not all(0 <= each < math.inf for each in (self.time, self.startup or 0.0)):
            return "times are finite and not negative"
        if self.count < 1 or (self.worker or 0) < 0:
            return "count is at least 1, and worker a number from 0"
        if (self.action == "role") != bool(self.role):
            return "the action role, and no other, names a role: prefill, decode or both"
        return ""

    def apply(self, fleet: ReplayFleet) -> None:
        """Do it. Raises `NotFound` for an unknown kind."""
        if self.action == "start":
            for _ in range(self.count):
                fleet.start(self.kind, self.startup)
            return
        for worker in self._workers(fleet):
            if self.action == "drain":
                fleet.drain(worker)
            elif self.action == "die":
                fleet.kill(worker, restart=self.restart)
            else:
                fleet.set_role(worker, self.role)

    def _workers(self, fleet: ReplayFleet) -> Sequence[FleetWorker]:
        if self.worker is not None:
            return fleet.workers[self.worker : self.worker + 1]
        ready = fleet.of_kind(self.kind)
        if self.action == "die":
            ready = ready[::-1]
        elif self.action == "drain":  # a worker that starts is the least busy
            ready = [*fleet.of_kind(self.kind, "starting"), *ready]
        return ready[: self.count]


def read_events(path: str) -> list[FleetEvent]:
    """Read a script of JSON lines. Times are seconds, or texts such as "2m". Raises `ConfigError`.
    Blocks."""
    lines = numbered_lines(path, HINT)
    return [_parse(line, f"{path}, line {number}") for number, line in lines]


def check_events(events: Sequence[FleetEvent], workers: ReplayWorkers) -> None:
    """Raise `ConfigError` for an event of a kind or a worker that there cannot be, and for more
    workers than a replay simulates."""
    kinds, most = [group.kind for group in workers.groups], workers.count
    check_count(most)
    for event in sorted(events, key=lambda event: event.time):
        if event.worker is None and event.kind not in kinds:
            hint = nearest_name_hint(event.kind, kinds)
            raise ConfigError(f"there is no kind of workers {event.kind!r}", hint=hint)
        if event.worker is not None and event.worker >= most:
            raise ConfigError(
                f"there is no worker {event.worker} at {event.time:g} s of the script",
                hint=f"workers are numbered from 0, and until then {most} were there at most",
            )
        if event.action == "start" or (event.action == "die" and event.restart):
            most += event.count
            check_count(most)


def schedule_events(fleet: ReplayFleet, events: Sequence[FleetEvent]) -> None:
    """Apply each event at its time."""
    for event in events:
        fleet.clock.call_at(event.time, partial(event.apply, fleet))


def _parse(line: bytes, place: str) -> FleetEvent:
    try:
        fields: Mapping[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        times = {
            name: parse_seconds(fields[name])
            for name in ("time", "startup")
            if isinstance(fields.get(name), str)
        }
        event = msgspec.convert({**fields, **times}, FleetEvent)
        fault = event.fault
    except ValueError as error:  # of msgspec, too
        fault = str(error)
    if fault:
        raise ConfigError(f"{place}: {fault}", hint=HINT)
    return event

"""Predicts when the supervisor of a model's lost workers will have started one again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from dynamo.core.clock import Clock
from dynamo.core.errors import NoWorkers
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.supervisors import SUPERVISOR_KEY, SupervisorRecord, SupervisorView
from dynamo.scheduling.admission.sleeping_workers import SleepingWorkers

UNKNOWN_START_S = 5.0
"""The predicted duration of a start before a supervisor has measured one."""
MIN_PREDICTION_S = 0.5
CRASH_LOOP_RETRY_S = 10.0


LIMITS_HINT = (
    "send it again then; router.max_queue_wait, router.ttft_slo and the request's own timeout "
    "limit the wait"
)


class LoadPrediction(NamedTuple):
    """When a model that is loaded on demand will serve. `load_s`: how long its last load took, 0:
    unknown. `waited_s`: since when it has been wanted. With `backoff_s` the model could not be
    loaded, for this `reason`, and is loaded again on request when that time is over."""

    load_s: float
    waited_s: float
    backoff_s: float = 0.0
    reason: str = ""

    @property
    def left_s(self) -> float:
        """The predicted seconds until the model serves."""
        return predict_left_s(self.load_s or UNKNOWN_START_S, self.waited_s)

    def check(self, limit_s: float) -> None:
        """Raise `NoWorkers` if the model is not expected to serve in `limit_s`."""
        if self.backoff_s or self.left_s > limit_s:
            raise self.error(limit_s)

    def error(self, limit_s: float) -> NoWorkers:
        """Return the error of a request that waits at most `limit_s`."""
        if self.backoff_s:
            return NoWorkers(
                f"this model cannot be loaded: {self.reason}",
                hint="it is loaded again at a later request; see the log of its worker",
                retry_after_s=self.backoff_s,
            )
        known = f"which takes {self.load_s:.1f} s" if self.load_s else "for the first time"
        return NoWorkers(
            f"this model is being loaded, {known}: expected in {self.left_s:.1f} s"
            f"{f' ({self.reason})' if self.reason else ''}; this request may wait {limit_s:.1f} s",
            hint=LIMITS_HINT,
            retry_after_s=self.left_s,
        )


def predict_left_s(start_s: float, passed_s: float) -> float:
    """Return the predicted rest of a start. A start that is overdue is predicted to take as long
    again as it is overdue."""
    return max(abs(start_s - passed_s), MIN_PREDICTION_S)


class WorkerStarts:
    """Remembers which supervisors ran the workers of one client, and reads their records in `view`.

    A worker is expected while the client has no instance and one of these supervisors keeps
    processes of that kind running. Workers that were drained or scaled to zero are not expected,
    neither are workers that run on with another role, or that no supervisor started. A worker that
    sleeps is expected, too: `sleeping` wakes it for a request. For a model on demand,
    `predict_load` says when it is loaded; None for others.
    """

    def __init__(
        self,
        client: Client,
        view: SupervisorView,
        clock: Clock,
        sleeping: SleepingWorkers | None = None,
        predict_load: Callable[[], LoadPrediction | None] = lambda: None,
    ) -> None:
        self._sleeping = sleeping
        self._predict_load = predict_load
        self._client = client
        self._view = view
        self._clock = clock
        self._kinds: set[str] = set()
        self._lost_at_s = clock.now()
        self._last_instances: Mapping[str, Instance] = client.instances
        self._unsubscribe = [
            client.on_change(self._on_instances_changed),
            client.view.on_instance_removed(lambda instance: self._remember([instance])),
        ]

    def close(self) -> None:
        """Stop following the instances."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    @property
    def is_expected(self) -> bool:
        """Whether a supervisor keeps a worker of this client running or loads its model, or one
        sleeps."""
        if self._sleeping:
            return True
        if (load := self._predict_load()) is not None:
            return not load.backoff_s
        return any(record.desired.get(kind) for kind, record in self._records())

    def is_expected_within(self, limit_s: float) -> bool:
        """Whether a worker is expected, at the latest in `limit_s`. A sleeping one is woken. Raises
        `NoWorkers` if it is expected later, or if the workers are in a crash loop."""
        if self._sleeping is not None:
            self._sleeping.wake_one()
        if self._sleeping:
            return True
        if (load := self._predict_load()) is not None:
            load.check(limit_s)
        elif self.is_expected:
            if self.predict_s() > limit_s:
                raise self.late_error(limit_s)
        elif reason := self.describe():
            raise NoWorkers(
                f"no worker serves this model now: {reason}",
                hint="the supervisor keeps trying; see the log of the worker",
                retry_after_s=CRASH_LOOP_RETRY_S,
            )
        else:
            return False
        return True

    def predict_s(self) -> float:
        """Return the predicted seconds until an expected worker serves."""
        durations_s = [
            record.start_s.get(kind, UNKNOWN_START_S)
            for kind, record in self._records()
            if record.desired.get(kind)
        ]
        return predict_left_s(min(durations_s, default=0.0), self._clock.now() - self._lost_at_s)

    def describe(self) -> str:
        """Return why no worker serves at present, as far as a supervisor knows, or ""."""
        if self._sleeping:
            return "one wakes up"
        if (load := self._predict_load()) is not None:
            return load.reason or "it is loaded when it is wanted"
        if self.is_expected:
            return "its supervisor starts one"
        reasons = (record.failing.get(kind) for kind, record in self._records())
        return next((f"crash loop: {reason}" for reason in reasons if reason), "")

    def late_error(self, limit_s: float) -> NoWorkers:
        """Return the error of a request that waits at most `limit_s` for an expected worker."""
        start = "one wakes up" if self._sleeping else "its supervisor starts one"
        if not self._sleeping and (load := self._predict_load()) is not None:
            return load.error(limit_s)
        return NoWorkers(
            f"no worker serves this model now: {start}, expected in "
            f"{self.predict_s():.1f} s; this request may wait {limit_s:.1f} s",
            hint=LIMITS_HINT,
            retry_after_s=self.predict_s(),
        )

    def _records(self) -> Iterator[tuple[str, SupervisorRecord]]:
        for value in self._kinds:
            supervisor, _, kind = value.partition("/")
            if (record := self._view.records.get(supervisor)) is not None:
                yield kind, record

    def _on_instances_changed(self) -> None:
        live = self._client.instances
        if not live and self._last_instances:
            self._lost_at_s = self._clock.now()
            rejected = self._client.view.rejected
            gone = self._last_instances.values()
            changed = [instance for instance in gone if instance.id in rejected]
            self._kinds -= {instance.capabilities.get(SUPERVISOR_KEY) for instance in changed}
            self._remember(instance for instance in gone if instance.id not in rejected)
        self._last_instances = live

    def _remember(self, lost: Iterable[Instance]) -> None:
        """Add the supervisors of lost instances, and drop supervisors that are gone."""
        values = {instance.capabilities.get(SUPERVISOR_KEY) for instance in lost}
        live = {kind for kind in self._kinds if kind.partition("/")[0] in self._view.records}
        self._kinds = live | {value for value in values if value and isinstance(value, str)}

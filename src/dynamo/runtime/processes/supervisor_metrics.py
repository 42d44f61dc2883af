"""The metrics of a supervisor, and what alerts read of its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, get_args

from dynamo.core.settings import Settings
from dynamo.models.downloads.fetch_counts import FETCHED
from dynamo.runtime.deployment import ProcessState
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.disk_space import DiskSpaceMonitor
from dynamo.telemetry import Registry
from dynamo.telemetry.gpus import Gpus


class ScrapedProcess(NamedTuple):
    """A child whose status port has metrics."""

    name: str
    role: str
    status_url: str


class AlertWatch(Protocol):
    """Derives alerts from metrics."""

    async def run(
        self, metrics: Registry, list_processes: Callable[[], Sequence[ScrapedProcess]]
    ) -> None:
        """Evaluate alerts until cancelled."""

    def list_active(self) -> Sequence[Mapping[str, Any]]:
        """Return the active alerts, as `/health` shows them."""


def declare_supervisor_metrics(
    metrics: Registry,
    children: Sequence[ChildProcess],
    disk_space: DiskSpaceMonitor,
    settings: Settings,
) -> None:
    """Declare the metrics of a supervisor, and those of the GPUs of its host."""
    custom = settings.monitoring.custom_metrics
    Gpus().declare_metrics(metrics, [m.name for m in custom if m.shows == "gpu_utilization"])

    def count_states() -> Mapping[tuple[str, ...], float]:
        counts = Counter((child.spec.role, _state(child)) for child in children)
        roles = dict.fromkeys(child.spec.role for child in children)
        return {(role, state): counts[role, state] for role in roles for state in STATES}

    metrics.counter(
        "dynamo_supervisor_restarts_total",
        "Processes started again",
        ("name", "child_role"),
        callback=lambda: {(c.spec.name, c.spec.role): c.restarts for c in children},
    )
    metrics.counter(
        "dynamo_supervisor_hung_total",
        "Times that the event loop of a process hung",
        ("name",),
        callback=lambda: {(child.spec.name,): child.hangs for child in children},
    )
    metrics.gauge(
        "dynamo_supervisor_processes",
        "Processes by role and state",
        ("child_role", "state"),
        callback=count_states,
    )
    metrics.gauge(
        "dynamo_supervisor_disk_full_ratio",
        "1 while the disk of the state folder is full, otherwise 0",
        callback=lambda: float(bool(disk_space.warning)),
    )
    FETCHED.declare(metrics)


def list_scraped(children: Sequence[ChildProcess]) -> Sequence[ScrapedProcess]:
    """Return the children that can answer a scrape."""
    return [
        ScrapedProcess(child.spec.name, child.spec.role, child.report.status_url)
        for child in children
        if child.pid and child.report.status_url and not child.hung
    ]


STATES: Sequence[str] = get_args(ProcessState)


def _state(child: ChildProcess) -> str:
    if child.hung:
        return "hung"
    if not child.pid:
        return "restarting" if child.restarts else "starting"
    return child.report.state

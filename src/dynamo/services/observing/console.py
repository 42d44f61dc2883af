"""A deployment beside its stories, for the console: processes, alerts, logs and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import Forbidden, ModelNotReady, NotFound
from dynamo.core.host.pids import age_s
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.operations.running import read_alerts
from dynamo.runtime.deployment import ProcessRecord, add_waiting_children, deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.control import ControlRequest, send_control_request
from dynamo.runtime.processes.process_record import SUPERVISOR
from dynamo.runtime.processes.supervisor_report import SupervisorReport

FRESH_S = 0.9
"""A reading of the processes serves all viewers for so long."""
PACE_S = 60
ANSWER_TIMEOUT_S = 5.0


class ShownProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the deployment on this host. `address`: the HTTP URL for users, or "". `reason`:
    why it is not healthy, or how the one before it ended."""

    name: str
    instance: str
    role: str
    state: str
    model: str
    engine: str
    address: str
    restarts: int
    reason: str
    age_s: float


class DeploymentConsole:
    """Reads the records of the deployment's processes on this host, and asks its supervisor."""

    def __init__(self, runtime: DistributedRuntime, observer: DeploymentObserver) -> None:
        self._runtime, self._observer = runtime, observer
        self._deployment = deployment_of(runtime.settings)
        self._processes: Sequence[ShownProcess] = ()
        self._alerts: Sequence[Mapping[str, Any]] = ()
        self._read_at_s = float("-inf")

    @property
    def frontends(self) -> Sequence[str]:
        """The URLs of the frontends, as they listen, at the last reading."""
        return [each.address for each in self._processes if each.role == "frontend"]

    async def show_deployment(self) -> Mapping[str, Any]:
        """Return the deployment with its processes, the observer's `Activity` and alerts."""
        clock = self._runtime.clock
        if clock.now() - self._read_at_s >= FRESH_S:
            self._read_at_s = clock.now()
            self._processes, self._alerts = await clock.offload(self._read)
        return {
            "deployment": self._deployment.id,
            "processes": self._processes,
            "alerts": self._alerts,
            "activity": self._observer.show_activity(PACE_S),
        }

    def _read(self) -> tuple[Sequence[ShownProcess], Sequence[Mapping[str, Any]]]:
        records = add_waiting_children(self._deployment.live_processes())
        return [_show_process(record) for record in records], read_alerts(records)

    async def read_logs(self, process: str) -> Sequence[str]:
        """Return the last lines of a process, without secrets. Raises `Forbidden`,
        `ModelNotReady`."""
        server = self._runtime.settings.server
        if server.log_prompts and not server.api_keys:
            raise Forbidden(
                "the logs hold prompts (server.log_prompts), and this port asks for no key",
                hint="set server.api_keys, or read the logs where they are written",
            )
        report = await self._runtime.clock.offload(self._ask_supervisor, process)
        return report.lines.get(process, ())

    async def list_settings(self) -> Sequence[Mapping[str, Any]]:
        """Return the settings that are no defaults, without secrets, and where they come from.
        Raises `ModelNotReady`."""
        report = await self._runtime.clock.offload(self._ask_supervisor, SUPERVISOR)
        return [
            {"key": key, "value": value, "origin": report.origins.get(key, "")}
            for key, value in sorted(report.settings.items())
        ]

    def _ask_supervisor(self, process: str) -> SupervisorReport:
        request = ControlRequest("report", process)
        try:
            (text,) = send_control_request(request, self._deployment.folder, ANSWER_TIMEOUT_S)
        except (OSError, NotFound) as error:
            raise ModelNotReady(f"the supervisor does not answer: {error}") from None
        return msgspec.json.decode(text, type=SupervisorReport)


def _show_process(record: ProcessRecord) -> ShownProcess:
    return ShownProcess(
        name=record.name,
        instance=record.instance or record.name,
        role=record.role,
        state=record.state,
        model=record.model,
        engine=record.engine,
        address=record.address if record.address.startswith("http") else "",
        restarts=record.restarts,
        reason=record.reason,
        age_s=age_s(record.start_ticks) if record.pid else 0.0,
    )

"""A deployment beside its stories, for the console: processes, alerts, logs and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.core.errors import Forbidden, ModelNotReady, NotFound, StoreUnavailable
from dynamo.core.host.pids import age_s
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.operations.running import read_alerts
from dynamo.runtime.deployment import ProcessRecord, add_waiting_children, deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process_record import SUPERVISOR
from dynamo.runtime.processes.supervisor_report import SupervisorReport, ask_supervisor

FRESH_S = 0.9
"""A reading of the processes serves all viewers for so long."""
REPORTS_S, REPORTED_S = 10.0, 300.0
"""Causes, promise and routing are looked at so often; routing of the last `REPORTED_S`."""
PACE_S = 60
ANSWER_TIMEOUT_S = 5.0


SHOWN = ("name", "role", "state", "model", "engine", "restarts", "reason")
"""Of a process. `reason`: why it is not healthy, or how the one before it ended."""


class DeploymentConsole:
    """Reads the records of the deployment's processes on this host, and asks its supervisor."""

    def __init__(self, runtime: DistributedRuntime, observer: DeploymentObserver) -> None:
        self._runtime, self._observer = runtime, observer
        self._deployment = deployment_of(runtime.settings)
        self.frontends: Sequence[str] = ()
        self._processes: Mapping[str, Mapping[str, Any]] = {}
        self._reports: Mapping[str, Any] = {}
        self._alerts: Sequence[Mapping[str, Any]] = ()
        self._read_at_s = self._reported_at_s = float("-inf")

    async def show_deployment(self) -> Mapping[str, Any]:
        """Return the deployment: its processes, activity, alerts and reports. A worker is a row,
        the values that `show_workers` has by name."""
        clock, observer = self._runtime.clock, self._observer
        if clock.now() - self._read_at_s >= FRESH_S:
            self._read_at_s = clock.now()
            self._processes, self._alerts = await clock.offload(self._read)
        if clock.now() - self._reported_at_s >= REPORTS_S:
            self._reported_at_s = clock.now()
            self._reports = {
                "causes": observer.group_causes(),
                "slo": await self._report_slo(),
                "routing": await observer.report(REPORTED_S),
            }
        activity = observer.show_activity(PACE_S)
        return {
            "deployment": self._deployment.id,
            "processes": self._processes,
            **activity,
            "workers": {name: [*each.values()] for name, each in activity["workers"].items()},
            "stories": observer.received,
            "alerts": self._alerts,
            **self._reports,
        }

    async def _report_slo(self) -> Any:
        try:
            return await self._observer.report_slo()
        except StoreUnavailable as error:
            return {"reason": str(error)}

    def _read(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        records = add_waiting_children(self._deployment.live_processes())
        urls = (each.address for each in records if each.role == "frontend")
        self.frontends = [url for url in urls if url.startswith("http")]
        now_s = self._runtime.clock.wall()
        processes = {each.instance or each.name: _show_process(each, now_s) for each in records}
        return processes, read_alerts(records)

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
        try:
            return ask_supervisor(self._deployment.folder, process, ANSWER_TIMEOUT_S)
        except (OSError, NotFound) as error:
            raise ModelNotReady(f"the supervisor does not answer: {error}") from None


def _show_process(record: ProcessRecord, now_s: float) -> Mapping[str, Any]:
    """Return the fields that are not empty, and `since`, the Unix time of its start."""
    shown = {name: value for name in SHOWN if (value := getattr(record, name))}
    return shown | ({"since": round(now_s - age_s(record.start_ticks))} if record.pid else {})

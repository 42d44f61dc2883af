"""The state that `dynamo top` shows: workers, pace, slow requests and alerts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.core.host.pids import age_s
from dynamo.telemetry.logs import escape_unprintable

if TYPE_CHECKING:
    from dynamo.operations.router_client import RouterClient
    from dynamo.runtime.deployment import Deployment, ProcessRecord

SECONDS = 60
PAGE_BYTES = 4096


class WorkerRow(msgspec.Struct, kw_only=True):
    """A worker. Local facts are 0 or "" where its process runs on another host. `loads`: requests
    that it had in the last seconds, running and waiting. `tiers`: blocks by memory tier."""

    name: str
    instance: str
    state: str = ""
    model: str = ""
    pid: int = 0
    age_s: float = 0.0
    resident_bytes: int = 0
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    active_ratio: float = 0.0
    cached_ratio: float = 0.0
    tiers: Mapping[str, tuple[int, int]] = {}
    loads: Sequence[int] = ()

    @property
    def load(self) -> int:
        """Its requests."""
        return self.running + self.waiting


class TopState(msgspec.Struct, kw_only=True):
    """A deployment at one time, with `pace` and `slow` of the observer's `show_activity`. `reason`:
    why nothing newer is known. `alerts`: active ones."""

    deployment: str
    at: float = 0.0
    waiting: int = 0
    workers: Sequence[WorkerRow] = ()
    pace: Mapping[str, Sequence[Any]] = {}
    slow: Sequence[Mapping[str, Any]] = ()
    alerts: Sequence[Mapping[str, Any]] = ()
    reason: str = ""


class TopReader:
    """Reads the state of a deployment: from its observer, and from its records where it runs on
    this host."""

    def __init__(self, client: RouterClient, deployment: Deployment | None) -> None:
        self._client, self.deployment = client, deployment
        self._loads: dict[str, deque[int]] = {}
        self.last = TopState(deployment="" if deployment is None else deployment.id)

    def read(self) -> TopState:
        """Return the present state. Blocks. After an error the last one has the reason."""
        try:
            activity = _escape(self._client.activity(SECONDS))
        except DynamoError as error:
            self.last = msgspec.structs.replace(self.last, reason=escape_unprintable(str(error)))
            return self.last
        from dynamo.operations.running import read_alerts

        records = {} if self.deployment is None else _records(self.deployment)
        workers = [self._row(name, each, records) for name, each in activity["workers"].items()]
        workers += [
            _record_row(record)
            for name, record in records.items()
            if record.role == "worker" and name not in activity["workers"]
        ]
        self._forget({row.instance for row in workers})
        self.last = TopState(
            deployment=self.last.deployment,
            at=activity["at"],
            waiting=activity["waiting"],
            workers=workers,
            pace=activity["pace"],
            slow=activity["slow"],
            alerts=_escape(read_alerts(list(records.values()))),
        )
        return self.last

    def _row(
        self, instance: str, activity: Mapping[str, Any], records: Mapping[str, ProcessRecord]
    ) -> WorkerRow:
        record = records.get(instance)
        row = WorkerRow(name=instance.rpartition("-")[0] or instance, instance=instance)
        if record is not None:
            row = _record_row(record)
        blocks = max(1, activity["total_blocks"])
        row.running, row.waiting = activity["running"], activity["waiting"]
        row.prefill_tokens = activity["prefill_tokens"]
        row.active_ratio = activity["active_blocks"] / blocks
        row.cached_ratio = activity["cached_blocks"] / blocks
        row.tiers = activity["tiers"]
        loads = self._loads.setdefault(instance, deque(maxlen=SECONDS))
        loads.append(row.load)
        row.loads = list(loads)
        return row

    def _forget(self, instances: set[str]) -> None:
        for name in [name for name in self._loads if name not in instances]:
            del self._loads[name]

    def read_logs(self, name: str) -> Sequence[str]:
        """Return the last lines of a process. Blocks. Raises `DynamoError`, `OSError`."""
        from dynamo.runtime.processes.supervisor_report import ask_supervisor

        if self.deployment is None:
            return ("the logs are on the host of the deployment",)
        lines = ask_supervisor(self.deployment.folder, name, 5.0).lines.get(name, ())
        return [escape_unprintable(line) for line in lines] or (f"no lines of {name} are kept",)

    def find_request(self, name: str) -> Sequence[str]:
        """Return the story of a request as lines. Blocks. Raises `DynamoError`."""
        from dynamo.cli.observer.why import format_story

        story = self._client.find_stories(name)[0]
        return [escape_unprintable(line) for line in format_story(story).splitlines()]

    def drain(self, name: str, progress: Callable[[str], None]) -> None:
        """Take a process out of service. Blocks. Raises `DynamoError`, `OSError`."""
        from dynamo.runtime.processes.control import ControlRequest, send_control_request

        if self.deployment is None:
            progress("only the owner of a deployment on this host can drain its processes")
            return
        for message in send_control_request(
            ControlRequest("drain", name), self.deployment.folder, 120.0
        ):
            progress(escape_unprintable(message))


def _records(deployment: Deployment) -> dict[str, ProcessRecord]:
    """Return the processes by instance, or by name where one is being replaced."""
    from dynamo.runtime.deployment import add_waiting_children

    records = add_waiting_children(deployment.live_processes())
    return {record.instance or record.name: record for record in records}


def _record_row(record: ProcessRecord) -> WorkerRow:
    return WorkerRow(
        name=escape_unprintable(record.name),
        instance=record.instance or record.name,
        state=record.state,
        model=escape_unprintable(record.model),
        pid=record.pid,
        age_s=age_s(record.start_ticks),
        resident_bytes=_resident_bytes(record.pid),
        restarts=record.restarts,
    )


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def _escape(value: Any) -> Any:
    """Return a value from JSON with every text escaped: names come from clients."""
    if isinstance(value, str):
        return escape_unprintable(value)
    if isinstance(value, dict):
        return {escape_unprintable(key): _escape(each) for key, each in value.items()}
    return [_escape(each) for each in value] if isinstance(value, list) else value

"""Records of processes: written to the deployment's folder while a process lives, and deleted from
discovery after its death. A server would otherwise list them until leases expire. The supervisor
announces in discovery which processes it keeps running."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.communication.directory import WATCH_RETRY_S, RecordChange, follow_records
from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.host.pids import start_ticks
from dynamo.core.settings import Settings
from dynamo.runtime.background import ThreadBackground
from dynamo.runtime.deployment import (
    ChildStatus,
    Deployment,
    ProcessRecord,
    WaitingChild,
    new_instance_id,
)
from dynamo.runtime.discovery import RepublishingDiscovery
from dynamo.runtime.planes import planes_of
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.process_names import kind_of_process
from dynamo.runtime.supervisors import KindRecord, SupervisorRecord

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 15.0
"""Interval at which a process checks that its record still exists."""
MAX_LEASE_TTL_S = 5.0
"""Requests wait for the processes of a dead supervisor until its lease has expired."""
SELF_EXPIRING_PLANES = ("file:", "memory:")
"""Planes that drop the records of a process when it dies. Kubernetes drops them with the pod."""
PROCESSES_PREFIX = "/_processes/"
"""The prefix of the keys of processes in discovery; the role and the instance follow."""


def process_key(record: ProcessRecord) -> str:
    """Return the key of a process in discovery."""
    return f"{PROCESSES_PREFIX}{record.role}/{record.instance}"


SUPERVISOR = "supervisor"


def supervisor_record(
    deployment: Deployment, namespace: str, address: str, cards: dict[str, tuple[str, ...]]
) -> ProcessRecord:
    """Return the record of this process, which is the supervisor of a deployment."""
    return ProcessRecord(
        deployment=deployment.id,
        role=SUPERVISOR,
        name=SUPERVISOR,
        pid=os.getpid(),
        namespace=namespace,
        address=address,
        instance=new_instance_id(SUPERVISOR),
        start_ticks=start_ticks(os.getpid()),
        cards_by_name=cards,
    )


class ProcessRecordWriter:
    """Writes, refreshes and removes the record of a process."""

    def __init__(self, deployment: Deployment, record: ProcessRecord, clock: Clock) -> None:
        self.record = record
        self._deployment = deployment
        self._clock = clock
        self._write_lock = threading.Lock()
        self._written: ProcessRecord | None = None
        self._removed = False

    async def create(self, **fields: Any) -> None:
        """Change fields of the record and write it. Raises `ConfigError`."""
        self.record = replace(self.record, **fields)
        await self._clock.offload(self._write)

    async def update(self, **fields: Any) -> None:
        """Change fields of the record and write it. A failure is logged, and the next refresh tries
        again: only `dynamo ps` and `dynamo stop` need the record."""
        try:
            await self.create(**fields)
        except ConfigError as error:
            text = "the process record was not written; the process serves without it"
            log.warning(text, extra={"fields": {"error": error.message}})

    async def keep_alive(self, on_refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refresh the record until cancelled, and call `on_refresh` each time."""
        while True:
            await self._clock.sleep(REFRESH_INTERVAL_S)
            with suppress(ConfigError, OSError):  # the process can serve without its record
                await self._clock.offload(self._write)
                if on_refresh is not None:
                    await on_refresh()

    async def remove(self) -> None:
        """Delete the record. Nothing writes it afterwards."""
        await self._clock.offload(self._remove)

    def _write(self) -> None:
        """Write the present record, or refresh it if it is written already. A cancelled call may
        run after its successor, and after `remove`."""
        with self._write_lock:
            record = self.record
            if self._removed:
                return
            if record is self._written:
                self._deployment.refresh_record(record)
                return
            self._deployment.write_record(record)
            self._written = record

    def _remove(self) -> None:
        with self._write_lock:
            self._removed = True
            self._deployment.remove_record(self.record)


def describe_workers(
    children: Sequence[ChildProcess], start_s: dict[str, float], known: dict[str, KindRecord]
) -> SupervisorRecord:
    """Return the record of the workers among the children of a supervisor, by kind. `start_s` keeps
    the durations of the last starts, and `known` the kinds, which may have no process now."""
    desired = Counter[str]()
    failing, kinds = dict[str, str](), known.copy()
    for child in children:
        if child.spec.role != "worker" or child.spec.standby:
            continue  # no request waits for it
        kind, engine = kind_of_process(child.spec.name), child.spec.settings.engine
        start_s[kind] = child.start_s or start_s.get(kind, 0.0)
        state = "draining"
        if child.desired:
            state = "ready" if child.ready else "sleeping" if child.sleeping else "starting"
            if reason := child.crash_loop_reason or child.start_error:
                failing[kind] = f"{child.spec.name} {reason}"
            else:
                desired[kind] += 1
        if kind not in kinds:
            devices = child.spec.cards or engine.device_ids
            gpus = len(devices) or engine.tensor_parallel_size * max(1, engine.data_parallel_size)
            known[kind] = KindRecord(
                gpus=0 if engine.urls else gpus, role=engine.role, model=child.spec.model
            )
            kinds[kind] = known[kind]
        record = kinds[kind]
        kinds[kind] = replace(record, **{state: getattr(record, state) + 1})
    started = {kind: round(seconds, 2) for kind, seconds in start_s.items() if seconds}
    return SupervisorRecord(dict(desired), started, failing, kinds)


def describe_children(
    children: Sequence[ChildProcess],
) -> tuple[dict[int, ChildStatus], dict[str, WaitingChild]]:
    """Return the children that hang or were restarted, by pid, and by name those that died and were
    not replaced yet by a process with a record of its own."""
    status = {
        child.pid: ChildStatus(child.hung, child.restarts)
        for child in children
        if child.pid and (child.hung or child.restarts)
    }
    waiting = {
        child.spec.name: WaitingChild(child.spec.role, child.restarts, child.last_exit)
        for child in children
        if not (child.pid and child.report.key) and child.restarts and child.desired
    }
    return status, waiting


def describe_restarts(children: Sequence[ChildProcess]) -> dict[str, dict[str, object]]:
    """Return how often the children that died were started again, and how they ended."""
    return {
        child.spec.name: {"count": child.restarts, "last_exit": child.last_exit}
        for child in children
        if child.restarts
    }


class SupervisorDiscovery:
    """Announces a supervisor in discovery and which processes it keeps running, and deletes the
    records of dead ones there. The connection has a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._background: ThreadBackground | None = None
        self._plane: Discovery | None = None
        self._records: dict[str, bytes] = {}
        self._open_lock, self._put_lock = asyncio.Lock(), asyncio.Lock()

    def announce(self, key: str, record: msgspec.Struct) -> None:
        """Put a record of the supervisor if it changed."""
        value = msgspec.json.encode(record)
        if value != self._records.get(key):
            self._records[key] = value
            self._submit(partial(self._put, key))

    def refresh(self) -> None:
        """Put the last records again, since their lease may be lost."""
        for key in self._records:
            self._submit(partial(self._put, key))

    def delete(self, key: str) -> None:
        """Delete the record `key` of a dead process and all records under the same lease, as soon
        as the server is reachable. An empty key is ignored."""
        if key and not planes_of(self._settings).discovery.startswith(SELF_EXPIRING_PLANES):
            self._submit(partial(self._delete, key))

    async def list_keys(self, prefix: str) -> Sequence[str]:
        """Return the keys below a prefix. Raises `PlaneUnavailable`."""
        if self._background is None:
            return ()
        return await self._background.run(self._list_keys(prefix))

    async def _list_keys(self, prefix: str) -> Sequence[str]:
        return list(await (await self._open()).get(prefix))

    def follow(self, prefix: str, on_state: Callable[[Mapping[str, bytes]], None]) -> None:
        """Call `on_state` on this loop with the records below a prefix, by the rest of their keys,
        now and after each change."""
        loop = asyncio.get_running_loop()

        def publish(state: Mapping[str, bytes]) -> None:
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(on_state, state)

        self._submit(partial(self._follow, prefix, publish))

    async def _follow(self, prefix: str, publish: Callable[[Mapping[str, bytes]], None]) -> None:
        state: dict[str, bytes] = {}

        def apply(batch: Sequence[RecordChange], replaces: bool) -> None:
            if replaces:
                state.clear()
            for change in batch:
                state.pop(key := change.key.removeprefix(prefix), None)
                if change.value is not None:
                    state[key] = change.value
            publish(state.copy())

        while True:
            try:
                await follow_records(await self._open(), prefix, apply, SystemClock())
            except (DynamoError, OSError) as error:  # the plane cannot be opened
                fields = {"prefix": prefix, "error": str(error)}
                log.warning("records cannot be followed yet", extra={"fields": fields})
            await asyncio.sleep(WATCH_RETRY_S)

    async def close(self) -> None:
        """Withdraw the records. Records that could not be deleted expire with their leases."""
        self._records.clear()
        if self._background is not None:
            await self._background.run(self._close_plane())
            await self._background.close()

    def _submit(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if planes_of(self._settings).discovery.startswith("memory:"):
            return  # other processes cannot read it
        if self._background is None:
            self._background = ThreadBackground("dynamo-supervisor-discovery")
        self._background.submit(work())

    async def _open(self) -> Discovery:
        async with self._open_lock:
            if self._plane is None:
                planes = planes_of(self._settings)
                ttl_s = min(planes.discovery_options.lease_ttl_s, MAX_LEASE_TTL_S)
                options = replace(planes.discovery_options, lease_ttl_s=ttl_s)
                plane = await open_discovery(planes.discovery, options)
                expiring = planes.discovery.startswith(SELF_EXPIRING_PLANES)
                self._plane = plane if expiring else RepublishingDiscovery(plane)
            return self._plane

    async def _put(self, key: str) -> None:
        try:
            plane = await self._open()
            async with self._put_lock:
                if (value := self._records.get(key)) is not None:
                    await plane.put(key, value)
        except (DynamoError, OSError) as error:
            text = "the supervisor's record was not written; requests do not wait for restarts"
            log.warning(text, extra={"fields": {"error": str(error)}})

    async def _close_plane(self) -> None:
        if self._plane is not None:
            async with self._put_lock:  # a later write would take a new lease
                await self._plane.close()

    async def _delete(self, key: str) -> None:
        try:
            plane = await self._open()
            await plane.revoke_lease_of(key)
        except DynamoError as error:
            fields = {"key": key, "error": error.message}
            log.warning("the record of a dead process stays", extra={"fields": fields})

"""Records of supervisors in discovery: the processes that each of them keeps running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal
from urllib.parse import quote

import msgspec

from dynamo.communication.directory import RecordChange, follow_records
from dynamo.communication.discovery import Discovery
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS

log = logging.getLogger(__name__)

SUPERVISORS_PREFIX = "/_supervisors/"
SUPERVISOR_KEY = "supervisor"
"""The capability of an instance that names its supervisor and its kind of process."""


class KindRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The processes of a kind that serve, start (or are started again), drain and sleep. `gpus`:
    those of one process, 0: unknown. `role` and `model`: those of its settings."""

    ready: int = 0
    starting: int = 0
    draining: int = 0
    sleeping: int = 0
    gpus: int = 0
    role: str = ""
    model: str = ""


LoadState = Literal["unloaded", "loading", "loaded", "leaving", "failed"]


class LoadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that is loaded when it is wanted. A `leaving` one is loaded and ends its requests, so
    that another one gets its memory: requests wait for its next load. `load_s`: the duration of the
    last load, 0: unknown. A `failed` model is loaded again on request unless `backoff_s`, the
    seconds until then, is above 0. `embeds`: its requests want vectors, and those of others text.
    """

    state: LoadState = "unloaded"
    reason: str = ""
    load_s: float = 0.0
    backoff_s: float = 0.0
    embeds: bool = False


class SupervisorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a live supervisor, by kind of process such as `worker`.

    `desired` counts the processes that the supervisor keeps running, without those that stop on
    purpose. `start_s` is the duration of the last start. `failing` says why no process of a kind
    can be expected to serve. `kinds` is for those who change the numbers.
    `models` has the aliases of each model that is to be served in `namespace`, by its id: a model
    that a record does not list any more was removed. `on_demand` has those of them that run only
    while they are wanted. `adapters` has the folder of each LoRA adapter that a model is to have,
    by model and name; "": its workers would load it, and it was unloaded.
    """

    desired: dict[str, int] = {}
    start_s: dict[str, float] = {}
    failing: dict[str, str] = {}
    kinds: dict[str, KindRecord] = {}
    models: dict[str, tuple[str, ...]] = {}
    namespace: str = ""
    on_demand: dict[str, LoadRecord] = {}
    adapters: dict[str, dict[str, str]] = {}


def supervisor_record_key(supervisor: str) -> str:
    """Return the discovery key of the supervisor with this instance id."""
    return SUPERVISORS_PREFIX + supervisor


def removals_prefix(namespace: str, model: str) -> str:
    """Return the prefix of the keys of frontends that still have requests for a removed model; the
    frontend's instance id follows."""
    return f"/{namespace}/removals/{quote(model, safe='')}/"


def uses_prefix(namespace: str) -> str:
    """Return the prefix of the keys of frontends that have requests for a model which is loaded
    when it is wanted; the model's id and the frontend's instance id follow. The value is `WAITING`
    while a request is in flight that came before the model was loaded, else `IN_USE`."""
    return f"/{namespace}/uses/"


WAITING, IN_USE = b"waiting", b"in use"


def supervised_kind(supervisor: str, kind: str) -> str:
    """Return the value of the capability `SUPERVISOR_KEY`."""
    return f"{supervisor}/{kind}"


class SupervisorView:
    """The records of all supervisors in discovery, by instance id. `is_read` is set when they were
    read for the first time."""

    def __init__(self, discovery: Discovery, clock: Clock) -> None:
        self._discovery = discovery
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self.records: dict[str, SupervisorRecord] = {}
        self.is_read = asyncio.Event()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the records."""
        self._listeners.append(listener)

    async def follow(self) -> None:
        """Follow the records until cancelled."""
        await follow_records(self._discovery, SUPERVISORS_PREFIX, self._apply, self._clock)

    def _apply(self, batch: Sequence[RecordChange], replace: bool) -> None:
        if replace:
            self.records.clear()
        for change in batch:
            supervisor = change.key.removeprefix(SUPERVISORS_PREFIX)
            self.records.pop(supervisor, None)
            if change.value is None:
                continue
            try:
                record = msgspec.json.decode(change.value, type=SupervisorRecord)
                self.records[supervisor] = record
            except DECODE_ERRORS as error:
                fields = {"key": change.key, "error": str(error)}
                log.warning("invalid record of a supervisor", extra={"fields": fields})
        self.is_read.set()
        for listener in self._listeners:
            listener()

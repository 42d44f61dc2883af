"""Who serves an endpoint: the record in discovery, and a live view of it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dynamo.communication.discovery import Discovery, RecordChange
from dynamo.communication.requests import Requests
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, NotFound
from dynamo.core.tasks import BackgroundTasks

log = logging.getLogger(__name__)

PING_ENDPOINT = "_ping"
PROBE_INTERVAL_S = 0.02
MAX_PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 2.0
WATCH_RETRY_S = 0.5


class Instance(msgspec.Struct, frozen=True):
    """One process that serves one endpoint. `address` names its incarnation too."""

    id: str
    address: str
    namespace: str
    component: str
    endpoint: str
    capabilities: dict[str, Any] = {}
    lease_id: str = ""


TRANSPORT_RECORD_NAMES = {"nats": "nats_tcp"}
"""Names of transports in records, where they are not the address's scheme."""


class InstanceRecord(msgspec.Struct, frozen=True):
    """An instance as it stands in discovery (JSON; the seeds' fields)."""

    component: str
    endpoint: str
    namespace: str
    lease_id: str = ""
    transport: dict[str, str] = {}
    capabilities: dict[str, Any] = {}
    nixl_metadata: Any = None


InstanceFilter = Callable[[Instance], bool]

_decode = msgspec.json.Decoder(InstanceRecord, strict=False).decode


def workers_prefix(namespace: str, component: str = "", endpoint: str = "") -> str:
    """The prefix of all instances in a namespace, of a component, of an endpoint."""
    parts = [part for part in (component, quote(endpoint, safe="")) if part]
    return "/".join(["", namespace, "workers", *parts, ""])


def instance_key(instance: Instance) -> str:
    """`/{namespace}/workers/{component}/{endpoint}/{instance}`; a slash in a name is %2F."""
    prefix = workers_prefix(instance.namespace, instance.component, instance.endpoint)
    return prefix + instance.id


def encode_instance(instance: Instance) -> bytes:
    """The record of `instance`."""
    scheme = instance.address.split(":", 1)[0]
    return msgspec.json.encode(
        InstanceRecord(
            component=instance.component,
            endpoint=instance.endpoint,
            namespace=instance.namespace,
            lease_id=instance.lease_id,
            transport={TRANSPORT_RECORD_NAMES.get(scheme, scheme): instance.address},
            capabilities=instance.capabilities,
        )
    )


def decode_instance(key: str, value: bytes) -> Instance | None:
    """The instance of a record; None, with a warning, for a bad entry."""
    try:
        record = _decode(value)
        address = next(iter(record.transport.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, StopIteration) as error:
        log.warning("bad instance record", extra={"fields": {"key": key, "error": str(error)}})
        return None
    return Instance(
        id=key.rsplit("/", 1)[-1],
        address=address,
        namespace=record.namespace,
        component=record.component,
        endpoint=record.endpoint,
        capabilities=record.capabilities,
        lease_id=record.lease_id,
    )


class InstanceView:
    """The instances under one discovery prefix, now. One whose connection broke is withheld until
    discovery announces it again or it answers a probe: a dead worker looks idle. `where` leaves
    out whom it answers False for."""

    def __init__(
        self,
        discovery: Discovery,
        requests: Requests,
        prefix: str,
        clock: Clock,
        where: InstanceFilter | None = None,
    ) -> None:
        self._discovery = discovery
        self._requests = requests
        self._prefix = prefix
        self._filter = where
        self._clock = clock
        self._tasks = BackgroundTasks()
        self._known: dict[str, Instance] = {}
        self._unreachable: set[str] = set()
        self._ejected: set[str] = set()
        self._probing: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._removal_listeners: list[Callable[[Instance], None]] = []
        self._synced = asyncio.Event()
        self._closed = False
        self._remove_broken_listener: Callable[[], None] | None = None
        self.live: Mapping[str, Instance] = {}

    async def start(self) -> None:
        """Returns when the present state is known."""
        self._remove_broken_listener = self._requests.on_connection_broken(self.mark_unreachable)
        self._tasks.start(self._watch_forever(), f"watch {self._prefix}")
        await self._synced.wait()

    async def close(self) -> None:
        """Stop watching and probing; what is known stays as it is."""
        if self._remove_broken_listener is not None and not self._closed:
            self._remove_broken_listener()
        self._closed = True
        await self._tasks.close()

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` whenever `live` changed. Returns the way to stop that."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def on_instance_removed(self, callback: Callable[[Instance], None]) -> Callable[[], None]:
        """Call `callback` with every instance that discovery names no more, after `live` changed.
        Returns the way to stop that."""
        self._removal_listeners.append(callback)
        return lambda: self._removal_listeners.remove(callback)

    def mark_unreachable(self, address: str) -> None:
        """Leave out every instance at `address` for now."""
        broken = {one.id for one in self._known.values() if one.address == address}
        if self._closed or not broken - self._unreachable:
            return
        log.warning("instance withheld", extra={"fields": {"address": address}})
        self._unreachable |= broken
        self._refresh()
        if address not in self._probing:
            self._probing.add(address)
            self._tasks.start(self._probe(address), f"probe {address}")

    def eject(self, instance_id: str) -> bool:
        """Leave out an instance that is there and not fit, until `readmit`. False where it is not
        there, is out already, or half of all are ejected: some answer is better than none."""
        if instance_id in self._ejected or instance_id not in self._known:
            return False
        if 2 * (len(self._ejected) + 1) > len(self._known) or len(self.live) <= 1:
            return False
        self._ejected.add(instance_id)
        self._refresh()
        return True

    def readmit(self, instance_id: str) -> None:
        """An ejected instance is fit again."""
        self._ejected.discard(instance_id)
        self._refresh()

    def describe_unavailable(self) -> str:
        """Why those that discovery names are not called, in words; "" where it names none."""
        counts = Counter(map(self._unavailable_reason, self._known))
        return ", ".join(f"{count} {why}" for why, count in sorted(counts.items()))

    def _unavailable_reason(self, name: str) -> str:
        if name in self._unreachable:
            return "not answering"
        return "unhealthy" if name in self._ejected else "excluded for this call"

    async def _watch_forever(self) -> None:
        while True:
            try:
                await self._watch()
            except Exception as error:  # noqa: BLE001 - what was known stays until it is back
                log.warning("discovery watch failed", extra={"fields": {"error": str(error)}})
            await self._clock.sleep(WATCH_RETRY_S)

    async def _watch(self) -> None:
        async with self._discovery.watch(self._prefix) as changes:
            first = True
            async for batch in changes:
                self._apply(batch, replace=first)
                first = False

    def _apply(self, batch: Sequence[RecordChange], *, replace: bool) -> None:
        before = self._known
        known = {} if replace else dict(before)
        for change in batch:
            name = change.key.rsplit("/", 1)[-1]
            found = None if change.value is None else decode_instance(change.key, change.value)
            if found is None or not (self._filter is None or self._filter(found)):
                known.pop(name, None)
            else:
                known[name] = found
            if not replace or before.get(name) != found:
                self._unreachable.discard(name)
        self._known = known
        self._unreachable &= known.keys()
        self._ejected &= known.keys()
        self._synced.set()
        self._refresh()
        for name in before.keys() - known.keys():
            for mourner in tuple(self._removal_listeners):
                mourner(before[name])

    def _refresh(self) -> None:
        out = self._unreachable | self._ejected
        live = {name: one for name, one in self._known.items() if name not in out}
        if live == self.live:
            return
        self.live = live
        for listener in tuple(self._listeners):
            listener()

    async def _probe(self, address: str) -> None:
        delay_s = PROBE_INTERVAL_S
        try:
            while any(self._known[name].address == address for name in self._unreachable):
                await self._clock.sleep(delay_s)
                if await self._is_reachable(address):
                    back = {one.id for one in self._known.values() if one.address == address}
                    self._unreachable -= back
                    log.info("instance answers again", extra={"fields": {"address": address}})
                    self._refresh()
                delay_s = min(delay_s * 2, MAX_PROBE_INTERVAL_S)
        finally:
            self._probing.discard(address)

    async def _is_reachable(self, address: str) -> bool:
        """Whether the process is there: any answer counts, "no such endpoint" too."""
        context = Context(request_id="probe")
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._requests.call(address, PING_ENDPOINT, b"", context, lambda _: True)
        except NotFound:
            return True
        except (DynamoError, OSError, TimeoutError):
            return False
        return True

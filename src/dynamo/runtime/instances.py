"""Who serves an endpoint: the record in discovery, and a live view of it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dynamo.communication.discovery import Change, Discovery
from dynamo.communication.requests import Requests
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, NotFound
from dynamo.core.tasks import Tasks

log = logging.getLogger(__name__)

PING = "_ping"
PROBE_S = 0.02
PROBE_CAP_S = 2.0
PROBE_TIMEOUT_S = 2.0
REWATCH_S = 0.5


class Instance(msgspec.Struct, frozen=True):
    """One process that serves one endpoint. `address` names its incarnation too."""

    id: str
    address: str
    namespace: str
    component: str
    endpoint: str
    capabilities: dict[str, Any] = {}
    lease_id: str = ""


TRANSPORTS = {"nats": "nats_tcp"}
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


Where = Callable[[Instance], bool]

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
            transport={TRANSPORTS.get(scheme, scheme): instance.address},
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
        where: Where | None = None,
    ) -> None:
        self._discovery = discovery
        self._requests = requests
        self._prefix = prefix
        self._where = where
        self._clock = clock
        self._tasks = Tasks()
        self._known: dict[str, Instance] = {}
        self._withheld: set[str] = set()
        self._ejected: set[str] = set()
        self._probing: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._mourners: list[Callable[[Instance], None]] = []
        self._seen = asyncio.Event()
        self._closed = False
        self._stop_listening: Callable[[], None] | None = None
        self.live: Mapping[str, Instance] = {}

    async def start(self) -> None:
        """Returns when the present state is known."""
        self._stop_listening = self._requests.on_broken(self.withhold)
        self._tasks.start(self._follow(), f"watch {self._prefix}")
        await self._seen.wait()

    async def close(self) -> None:
        """Stop watching and probing; what is known stays as it is."""
        if self._stop_listening is not None and not self._closed:
            self._stop_listening()
        self._closed = True
        await self._tasks.close()

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` whenever `live` changed. Returns the way to stop that."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def on_left(self, callback: Callable[[Instance], None]) -> Callable[[], None]:
        """Call `callback` with every instance that discovery names no more, after `live` changed.
        Returns the way to stop that."""
        self._mourners.append(callback)
        return lambda: self._mourners.remove(callback)

    def withhold(self, address: str) -> None:
        """Leave out every instance at `address` for now."""
        broken = {one.id for one in self._known.values() if one.address == address}
        if self._closed or not broken - self._withheld:
            return
        log.warning("instance withheld", extra={"fields": {"address": address}})
        self._withheld |= broken
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

    def absence(self) -> str:
        """Why those that discovery names are not called, in words; "" where it names none."""
        counts = Counter(map(self._absence, self._known))
        return ", ".join(f"{count} {why}" for why, count in sorted(counts.items()))

    def _absence(self, name: str) -> str:
        if name in self._withheld:
            return "not answering"
        return "unhealthy" if name in self._ejected else "not wanted for this call"

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch()
            except Exception as error:  # noqa: BLE001 - what was known stays until it is back
                log.warning("discovery watch failed", extra={"fields": {"error": str(error)}})
            await self._clock.sleep(REWATCH_S)

    async def _watch(self) -> None:
        async with self._discovery.watch(self._prefix) as changes:
            first = True
            async for batch in changes:
                self._apply(batch, replace=first)
                first = False

    def _apply(self, batch: Sequence[Change], *, replace: bool) -> None:
        before = self._known
        known = {} if replace else dict(before)
        for change in batch:
            name = change.key.rsplit("/", 1)[-1]
            found = None if change.value is None else decode_instance(change.key, change.value)
            if found is None or not (self._where is None or self._where(found)):
                known.pop(name, None)
            else:
                known[name] = found
            if not replace or before.get(name) != found:
                self._withheld.discard(name)
        self._known = known
        self._withheld &= known.keys()
        self._ejected &= known.keys()
        self._seen.set()
        self._refresh()
        for name in before.keys() - known.keys():
            for mourner in tuple(self._mourners):
                mourner(before[name])

    def _refresh(self) -> None:
        out = self._withheld | self._ejected
        live = {name: one for name, one in self._known.items() if name not in out}
        if live == self.live:
            return
        self.live = live
        for listener in tuple(self._listeners):
            listener()

    async def _probe(self, address: str) -> None:
        delay_s = PROBE_S
        try:
            while any(self._known[name].address == address for name in self._withheld):
                await self._clock.sleep(delay_s)
                if await self._answers(address):
                    back = {one.id for one in self._known.values() if one.address == address}
                    self._withheld -= back
                    log.info("instance answers again", extra={"fields": {"address": address}})
                    self._refresh()
                delay_s = min(delay_s * 2, PROBE_CAP_S)
        finally:
            self._probing.discard(address)

    async def _answers(self, address: str) -> bool:
        """Whether the process is there: any answer counts, "no such endpoint" too."""
        context = Context(request_id="probe")
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._requests.call(address, PING, b"", context, lambda _: True)
        except NotFound:
            return True
        except (DynamoError, OSError, TimeoutError):
            return False
        return True

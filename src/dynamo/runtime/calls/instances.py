"""Instances of an endpoint: their records in discovery and a live view of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from urllib.parse import quote

import msgspec

from dynamo.communication.directory import RecordChange, follow_records
from dynamo.communication.discovery import Discovery
from dynamo.communication.requests import Requests
from dynamo.core.clock import Backoff, Clock
from dynamo.core.context import Context
from dynamo.core.errors import DECODE_ERRORS, DynamoError, NotFound
from dynamo.core.tasks import BackgroundTasks

log = logging.getLogger(__name__)

PING_ENDPOINT = "_ping"
PROBE_INTERVAL_S = 0.02
MAX_PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 2.0
CONNECTION_BROKE = "not answering"
NOT_CONNECTED = "not connected yet"
CHANGED = "serving with another role or model"
MAX_CONCURRENT_PROBES = 512
SMALL_FLEET = 64
"""Up to this many instances, each answer to a probe updates the view at once."""
UPDATE_DELAY_S = 1e-5
"""In a larger fleet, answers are collected for this time per instance: an update reads them all."""


class Instance(msgspec.Struct, frozen=True):
    """A process that serves an endpoint. `address` identifies its incarnation too."""

    id: str
    address: str
    namespace: str
    component: str
    endpoint: str
    capabilities: dict[str, Any] = {}
    lease_id: str = ""


TRANSPORT_RECORD_NAMES = {"nats": "nats_tcp"}
"""Names of transports in records that differ from the scheme of the address."""


class InstanceRecord(msgspec.Struct, frozen=True):
    """The JSON record of an instance in discovery, in the record format of Dynamo."""

    component: str
    endpoint: str
    namespace: str
    lease_id: str = ""
    transport: dict[str, str] = {}
    capabilities: dict[str, Any] = {}
    nixl_metadata: Any = None


InstanceFilter = Callable[[Instance], bool]

_decode = msgspec.json.Decoder(InstanceRecord, strict=False).decode


def instances_prefix(namespace: str, component: str = "", endpoint: str = "") -> str:
    """The key prefix of all instances of a namespace, a component or an endpoint."""
    parts = [part for part in (component, quote(endpoint, safe="")) if part]
    return "/".join(["", namespace, "workers", *parts, ""])


def instance_key(instance: Instance) -> str:
    """`/{namespace}/workers/{component}/{endpoint}/{instance}`. A slash in a name becomes %2F."""
    prefix = instances_prefix(instance.namespace, instance.component, instance.endpoint)
    return prefix + instance.id


def encode_instance(instance: Instance) -> bytes:
    """Encode the record of `instance`."""
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
    """Decode a record. Returns None and logs a warning for a bad record."""
    try:
        record = _decode(value)
        address = next(iter(record.transport.values()))
    except (*DECODE_ERRORS, StopIteration) as error:
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
    """A live view of the instances under a discovery prefix that `accepts` returns True for. An
    instance whose connection broke is withheld until discovery announces it again or it answers a
    probe. A dead worker would otherwise look idle and attract calls. With `verify`, an announced
    instance is withheld until it answered a probe, over a connection with a handshake."""

    def __init__(
        self,
        discovery: Discovery,
        requests: Requests,
        prefix: str,
        clock: Clock,
        accepts: InstanceFilter | None = None,
        *,
        verify: bool = False,
    ) -> None:
        self._verify = verify
        self._discovery = discovery
        self._requests = requests
        self._prefix = prefix
        self._accepts = accepts
        self._clock = clock
        self._tasks = BackgroundTasks()
        self._known: dict[str, Instance] = {}
        self._ids_by_address: defaultdict[str, set[str]] | None = None
        self._rejected: dict[str, Instance] = {}
        self._unreachable: dict[str, str] = {}
        self._ejected: set[str] = set()
        self._probing: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._reason_listeners: list[Callable[[], None]] = []
        self._removal_listeners: list[Callable[[Instance], object]] = []
        self._rejection_listeners: list[Callable[[Instance], object]] = []
        self._synced = asyncio.Event()
        self._probe_slots = asyncio.Semaphore(MAX_CONCURRENT_PROBES)
        self._update_scheduled = False
        self._closed = False
        self._remove_broken_listener: Callable[[], None] | None = None
        self.live: Mapping[str, Instance] = {}

    async def start(self) -> None:
        """Start the watch. Returns when the present instances are known."""
        self._remove_broken_listener = self._requests.on_connection_broken(self.mark_unreachable)
        following = follow_records(self._discovery, self._prefix, self._apply, self._clock)
        self._tasks.start(following, f"watch {self._prefix}")
        await self._synced.wait()

    async def close(self) -> None:
        """Stop watching and probing. `live` does not change any more."""
        if self._remove_broken_listener is not None and not self._closed:
            self._remove_broken_listener()
        self._closed = True
        await self._tasks.close()

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each change of `live`. Returns a function that unsubscribes."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def on_reason_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` when probes were answered or the reasons of failed ones changed."""
        self._reason_listeners.append(callback)

    def on_instance_removed(self, callback: Callable[[Instance], object]) -> Callable[[], None]:
        """Call `callback` with every instance that leaves discovery, after `live` changed. An
        instance that `accepts` rejects after a change has not left. Returns a function that
        unsubscribes."""
        self._removal_listeners.append(callback)
        return lambda: self._removal_listeners.remove(callback)

    def on_instance_rejected(self, callback: Callable[[Instance], object]) -> Callable[[], None]:
        """Call `callback` with every instance that `accepts` rejects after a change, after `live`
        changed. Returns a function that unsubscribes."""
        self._rejection_listeners.append(callback)
        return lambda: self._rejection_listeners.remove(callback)

    def mark_unreachable(self, address: str) -> None:
        """Withhold every instance at `address` and begin to probe the address."""
        broken = self._ids_at(address)
        if self._closed or not broken - self._unreachable.keys():
            return
        text = "connection broke; instance gets no requests until it answers"
        log.warning(text, extra={"fields": self._log_fields(address)})
        self._unreachable |= dict.fromkeys(broken, CONNECTION_BROKE)
        self._refresh()
        self._start_probing(address, at_once=False)

    def eject(self, instance_id: str) -> bool:
        """Exclude an unhealthy instance until `readmit`. Returns whether it was excluded. An
        instance is not excluded if it is unknown or excluded already. At least half of the
        instances and one live instance remain: some answer is better than none."""
        if instance_id in self._ejected or instance_id not in self._known:
            return False
        if 2 * (len(self._ejected) + 1) > len(self._known) or len(self.live) <= 1:
            return False
        self._ejected.add(instance_id)
        self._refresh()
        return True

    def readmit(self, instance_id: str) -> None:
        """End the exclusion that `eject` began."""
        self._ejected.discard(instance_id)
        self._refresh()

    def describe_unavailable(self) -> str:
        """Why announced instances are not called, as text; "" if discovery announces none."""
        counts = Counter(map(self._unavailable_reason, self._known))
        if self._rejected:
            counts[CHANGED] = len(self._rejected)
        return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))

    @property
    def rejected(self) -> Mapping[str, Instance]:
        """The instances that were accepted once and are not any more, by id."""
        return self._rejected

    @property
    def ejected(self) -> Collection[str]:
        """The ids of the instances that were ejected for their failures."""
        return self._ejected

    @property
    def verifying(self) -> bool:
        """Whether no instance is live and the first probe of some is not answered yet."""
        return not self.live and NOT_CONNECTED in self._unreachable.values()

    def unreachable_reasons(self) -> Mapping[str, str]:
        """Return by id why announced instances cannot be reached."""
        return self._unreachable

    def _unavailable_reason(self, name: str) -> str:
        if (reason := self._unreachable.get(name)) is not None:
            return reason
        return "unhealthy" if name in self._ejected else "excluded for this call"

    def _apply(self, batch: Sequence[RecordChange], replace: bool) -> None:
        before, followed = self._known, self._rejected | self._known
        # `replace`: the batch is the whole list, as after a new connection to discovery.
        known = {} if replace else dict(before)
        rejected = {} if replace else self._rejected
        announced: list[Instance] = []
        for change in batch:
            name = change.key.rsplit("/", 1)[-1]
            instance = None if change.value is None else decode_instance(change.key, change.value)
            rejected.pop(name, None)
            # An instance that was accepted before and is refused now stays as rejected.
            if instance is None or not (self._accepts is None or self._accepts(instance)):
                known.pop(name, None)
                if instance is not None and name in followed:
                    rejected[name] = instance
            else:
                known[name] = instance
                if not replace or before.get(name) != instance:
                    announced.append(instance)
        self._known, self._rejected = known, rejected
        self._ids_by_address = None
        self._admit_announced(announced, before)
        self._unreachable = {
            name: reason for name, reason in self._unreachable.items() if name in known
        }
        self._ejected &= known.keys()
        self._synced.set()
        self._refresh()
        # Listeners last: they may read the new state.
        for name in followed.keys() - known.keys() - rejected.keys():
            for listener in tuple(self._removal_listeners):
                listener(followed[name])
        for name in before.keys() & rejected.keys() - known.keys():
            for listener in tuple(self._rejection_listeners):
                listener(rejected[name])

    def _admit_announced(
        self, announced: Sequence[Instance], before: Mapping[str, Instance]
    ) -> None:
        """Admit instances that discovery announced, or probe them first with `verify`."""
        for instance in announced:
            former, name = before.get(instance.id), instance.id
            moved = former is None or former.address != instance.address
            if not self._verify:
                self._unreachable.pop(name, None)
            elif moved or name in self._unreachable:
                self._unreachable.setdefault(name, NOT_CONNECTED)
                self._start_probing(instance.address, at_once=True)

    def _ids_at(self, address: str) -> AbstractSet[str]:
        index = self._ids_by_address
        if index is None:
            index = self._ids_by_address = defaultdict(set)
            for name, instance in self._known.items():
                index[instance.address].add(name)
        return index.get(address, frozenset())

    def _log_fields(self, address: str) -> Mapping[str, str]:
        return {"instance": ",".join(sorted(self._ids_at(address))), "address": address}

    def _refresh(self) -> None:
        excluded = self._unreachable.keys() | self._ejected
        live = {name: known for name, known in self._known.items() if name not in excluded}
        if live == self.live:
            return
        self.live = live
        for listener in tuple(self._listeners):
            listener()

    def _start_probing(self, address: str, *, at_once: bool) -> None:
        if address not in self._probing:
            self._probing.add(address)
            self._tasks.start(self._probe_until_reachable(address, at_once), f"probe {address}")
        elif at_once:  # do not wait for the next probe
            self._tasks.start(self._probe(address), f"probe {address} now")

    async def _probe_until_reachable(self, address: str, at_once: bool) -> None:
        backoff = Backoff(PROBE_INTERVAL_S, MAX_PROBE_INTERVAL_S)
        try:
            while not self._unreachable.keys().isdisjoint(self._ids_at(address)):
                await self._clock.sleep(0.0 if at_once else backoff.next_s())
                await self._probe(address)
                at_once = False
        finally:
            self._probing.discard(address)

    async def _probe(self, address: str) -> None:
        """Admit the instances at `address` if a process answers there. Otherwise record why not."""
        error = await self._ping(address)
        withheld = self._ids_at(address) & self._unreachable.keys()
        before = {self._unreachable[name] for name in withheld}
        if not error:
            for name in withheld:
                del self._unreachable[name]
            if before - {NOT_CONNECTED}:
                log.info("instance answers again", extra={"fields": self._log_fields(address)})
            self._update_after_probe()
        elif before - {error}:
            self._unreachable |= dict.fromkeys(withheld, error)
            if NOT_CONNECTED in before:
                fields = {**self._log_fields(address), "reason": error}
                log.warning("announced instance gets no requests", extra={"fields": fields})
            self._update_after_probe()

    def _update_after_probe(self) -> None:
        """Update `live` and report reasons, in a large fleet for many probes together."""
        if len(self._known) <= SMALL_FLEET:
            self._update()
        elif not self._update_scheduled:
            self._update_scheduled = True
            delay_s = UPDATE_DELAY_S * len(self._known)
            self._clock.call_at(self._clock.now() + delay_s, self._update)

    def _update(self) -> None:
        self._update_scheduled = False
        if not self._closed:
            self._refresh()
            for listener in self._reason_listeners:
                listener()

    async def _ping(self, address: str) -> str:
        """Return "" if a process answers at `address`, otherwise the error. The error of an unknown
        endpoint is an answer, too."""
        context = Context(request_id="probe")
        try:
            async with self._probe_slots, asyncio.timeout(PROBE_TIMEOUT_S):
                await self._requests.call(address, PING_ENDPOINT, b"", context, lambda _: True)
        except NotFound:
            return ""
        except TimeoutError:
            return f"unreachable: no answer within {PROBE_TIMEOUT_S:g} s"
        except (DynamoError, OSError) as error:
            text = str(error)  # without the address, so that equal reasons can be counted
            return f"unreachable: {text.partition(' cannot be reached: ')[2] or text}"
        return ""

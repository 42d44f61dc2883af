"""A client of one endpoint: who serves it, which one to take, the call itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from types import MappingProxyType
from typing import Any

from dynamo.communication.requests import FlowWindow, Requests, Sink
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, NoWorkers
from dynamo.runtime.calls.instances import Instance, InstanceView
from dynamo.runtime.calls.interruptible import Interruptible
from dynamo.runtime.calls.load_balancing import InstanceLoad, LoadBalancer
from dynamo.runtime.calls.streams import ResponseStream, encode_item

log = logging.getLogger(__name__)


class Client:
    """Instances as discovery announces them, minus those withheld; picks; calls.

    `instances`: the live ones, by id. `on_work` is called when an instance that had no call of this
    client gets one.
    """

    def __init__(
        self,
        path: str,
        view: InstanceView,
        requests: Requests,
        rng: Random | None = None,
        on_close: Callable[[Client], None] | None = None,
    ) -> None:
        self.path = path
        self._view = view
        self._requests = requests
        self._on_close = on_close
        self.on_instance_busy: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loads: dict[str, InstanceLoad] = {}
        self.instances: Mapping[str, Instance] = {}
        self.rng = rng or Random()
        self._balancer = LoadBalancer(self.rng)
        view.on_change(self._refresh)
        self._refresh()

    def in_flight(self, instance_id: str) -> int:
        """Calls of this client that the instance works on now."""
        slot = self._loads.get(instance_id)
        return 0 if slot is None else slot.in_flight

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when `instances` changed. Returns the way to stop that."""
        return self._view.on_change(callback)

    async def wait_for_instances(self, count: int = 1, timeout_s: float | None = None) -> None:
        """Return when at least `count` are there. Raises `NoWorkers` after `timeout_s`."""
        changed = asyncio.Event()
        stop = self.on_change(changed.set)
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._view.live) < count:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            if not self._view.live:
                raise self.no_workers_error() from None
            raise NoWorkers(
                f"{len(self._view.live)} of {count} instances of {self.path} after {timeout_s} s"
            ) from None
        finally:
            stop()

    def pick(self, mode: str, allowed: Container[str] | None = None) -> Instance:
        """One live instance by `mode` (of the ids in `allowed`). Raises `NoWorkers`."""
        try:
            return self._balancer.pick(mode, allowed).instance
        except LookupError:
            raise self.no_workers_error() from None

    def no_workers_error(self, who: str = "instance", of: str = "") -> NoWorkers:
        """The error of having nobody to call, and why. `who` is missing, of what (the endpoint)."""
        of = of or self.path
        if why := self._view.describe_unavailable():
            message = f"no {who} of {of} can be asked now: {why}"
            hint = "what does not answer now comes back by itself when it does"
        else:
            message = f"no {who} serves {of} now"
            hint = "none has announced itself: start one (`dynamo ps` shows what runs)"
        return NoWorkers(message, hint=hint, retry_after_s=1.0)

    async def call(
        self,
        instance: Instance,
        payload: bytes,
        context: Context,
        sink: Sink,
        *,
        window: FlowWindow | None = None,
    ) -> None:
        """Call that instance; see `Requests.call` for what is promised and raised."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # asks the kernel, every time
        slot = self._begin_call(instance)
        try:
            with Interruptible(slot.calls, self._loop):
                await self._requests.call(
                    instance.address, self.path, payload, context, sink, window=window
                )
        except InstanceGone:
            self._view.mark_unreachable(instance.address)
            raise
        finally:
            self._end_call(slot)

    @contextmanager
    def track_call(self, instance: Instance) -> Iterator[None]:
        """What happens within is a call of that instance, to the picks."""
        slot = self._begin_call(instance)
        try:
            yield
        finally:
            self._end_call(slot)

    def _begin_call(self, instance: Instance) -> InstanceLoad:
        slot = self._loads.get(instance.id) or self._add_load(instance)
        slot.in_flight += 1
        if slot.in_flight == 1 and self.on_instance_busy is not None:
            self.on_instance_busy()
        return slot

    def _end_call(self, slot: InstanceLoad) -> None:
        slot.in_flight -= 1
        if not slot.in_flight and not slot.live:
            self._loads.pop(slot.instance.id, None)

    def busy_instances(self) -> Iterator[Instance]:
        """The instances that work on calls of this client, those that have left too."""
        for slot in tuple(self._loads.values()):
            if slot.in_flight:
                yield slot.instance

    def interrupt(self, instance_id: str, error: DynamoError) -> int:
        """End the calls that the instance works on: each raises a copy of `error`, and the instance
        is told that its caller left. How many there were."""
        slot = self._loads.get(instance_id)
        calls = tuple(slot.calls) if slot is not None else ()
        for call in calls:
            call.interrupt(type(error)(error.message, hint=error.hint))
        return len(calls)

    def mark_unreachable(self, instance: Instance) -> None:
        """Leave it out until it answers a probe or discovery announces it again."""
        self._view.mark_unreachable(instance.address)

    def eject(self, instance_id: str) -> bool:
        """Leave it out until `readmit`. False: it is out already, or half of all are."""
        return self._view.eject(instance_id)

    def readmit(self, instance_id: str) -> None:
        """Take it in again."""
        self._view.readmit(instance_id)

    def on_instance_removed(self, callback: Callable[[Instance], None]) -> Callable[[], None]:
        """Call `callback` with every instance that discovery names no more. Returns the way to stop
        that."""
        return self._view.on_instance_removed(callback)

    def generate(
        self, request: Any, *, mode: str = "round_robin", context: Context | None = None
    ) -> ResponseStream:
        """Call one instance picked by `mode`; `request` and the items are msgpack values."""
        return self._open_stream(lambda: self.pick(mode), request, context)

    def round_robin(self, request: Any, context: Context | None = None) -> ResponseStream:
        """`generate` by turns."""
        return self.generate(request, mode="round_robin", context=context)

    def random(self, request: Any, context: Context | None = None) -> ResponseStream:
        """`generate` at random."""
        return self.generate(request, mode="random", context=context)

    def direct(
        self, request: Any, instance_id: str, context: Context | None = None
    ) -> ResponseStream:
        """Call that instance. Raises `InstanceGone` (on iteration) where it is not there."""
        return self._open_stream(lambda: self._find_instance(instance_id), request, context)

    async def close(self) -> None:
        """Stop watching. Calls under way go on."""
        if self._on_close is not None:
            self._on_close(self)
        await self._view.close()

    def _find_instance(self, instance_id: str) -> Instance:
        found = self._view.live.get(instance_id)
        if found is None:
            raise InstanceGone(f"{self.path} has no instance {instance_id} that can be asked now")
        return found

    def _open_stream(
        self, choose: Callable[[], Instance], request: Any, context: Context | None
    ) -> ResponseStream:
        about = context or Context(request_id=secrets.token_hex(8))

        async def start(sink: Sink, window: FlowWindow) -> None:
            await self.call(choose(), encode_item(request), about, sink, window=window)

        return ResponseStream(start)

    def _add_load(self, instance: Instance) -> InstanceLoad:
        """A slot for an instance that is no candidate (any more)."""
        slot = self._loads[instance.id] = InstanceLoad(instance)
        return slot

    def _refresh(self) -> None:
        live = self._view.live
        self.instances = MappingProxyType(live)
        for name in self._loads.keys() - live.keys():
            if self._loads[name].in_flight == 0:
                del self._loads[name]
        for name, instance in live.items():
            slot = self._loads.get(name)
            if slot is None:
                self._loads[name] = InstanceLoad(instance)
            elif slot.instance is not instance:
                slot.update_instance(instance)
        self._balancer.set_candidates([self._loads[name] for name in live])

"""A client of one endpoint: live instances, load balancing, calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Container, Iterator, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

from dynamo.communication.requests import FlowWindow, Requests, Sink
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, NoWorkers
from dynamo.core.shared_payload import SharedPayload
from dynamo.runtime.calls.instances import Instance, InstanceView
from dynamo.runtime.calls.interruptible import Interruptible
from dynamo.runtime.calls.load_balancing import InstanceLoad, LoadBalancer
from dynamo.runtime.calls.streams import ResponseStream, encode_item


class Client:
    """Balances and makes calls over the live instances of one endpoint. `instances` maps the id of
    each live instance to it. `on_instance_busy` is called when an instance without a call of this
    client gets one. `view` can withhold instances that do not answer or are unhealthy.
    Load balancing counts this client's calls, or by another function (`count_by`)."""

    def __init__(
        self,
        path: str,
        view: InstanceView,
        requests: Requests,
        rng: Random | None = None,
        on_close: Callable[[Client], None] | None = None,
    ) -> None:
        self.path = path
        self.view = view
        self._requests = requests
        self._on_close = on_close
        self.on_instance_busy: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loads: dict[str, InstanceLoad] = {}
        self.instances: Mapping[str, Instance] = {}
        self.rng = rng or Random()
        self._balancer = LoadBalancer(self.rng, self._count_calls)
        view.on_change(self._refresh)
        self._refresh()

    def in_flight(self, instance_id: str) -> int:
        """Number of requests of this process that the instance works on."""
        return self._balancer.count_requests(instance_id)

    def count_by(self, count_requests: Callable[[str], int]) -> None:
        """Count the requests at an instance by this function, instead of the calls."""
        self._balancer.count_requests = count_requests

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when `instances` changed. Returns a function that unsubscribes."""
        return self.view.on_change(callback)

    async def wait_for_instances(self, count: int = 1, timeout_s: float | None = None) -> None:
        """Return when at least `count` are live. Raises `NoWorkers` after `timeout_s`."""
        changed = asyncio.Event()
        stop = self.on_change(changed.set)
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.view.live) < count:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            if not self.view.live:
                raise self.no_workers_error() from None
            live = f"{len(self.view.live)} of {count} instances of {self.path}"
            raise NoWorkers(f"{live} are live after {timeout_s} s") from None
        finally:
            stop()

    def pick(self, mode: str, allowed: Container[str] | None = None) -> Instance:
        """Pick a live instance by `mode`, among the ids in `allowed`. Raises `NoWorkers`."""
        try:
            return self._balancer.pick(mode, allowed).instance
        except LookupError:
            raise self.no_workers_error() from None

    def no_workers_error(self, kind: str = "instance", service: str = "") -> NoWorkers:
        """The error for a call without a live instance. Its message names the `kind` of process
        and the `service`, by default the endpoint's path."""
        service = service or self.path
        if reasons := self.view.describe_unavailable():
            message = f"no {kind} of {service} is available now: {reasons}"
            hint = "an instance returns to service by itself when it answers again"
        else:
            message = f"no {kind} serves {service} now"
            hint = "none is registered: start one (`dynamo ps` lists the running processes)"
        return NoWorkers(message, hint=hint, retry_after_s=1.0)

    async def call(
        self,
        instance: Instance,
        payload: bytes,
        context: Context,
        sink: Sink,
        *,
        window: FlowWindow | None = None,
        shared: SharedPayload | None = None,
    ) -> None:
        """Call `instance`. Ordering and errors are those of `Requests.call`."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # cached: each lookup is a getpid() call
        load = self._loads.get(instance.id)
        if load is None:  # the instance is not a candidate any more
            load = self._loads[instance.id] = InstanceLoad(instance)
        if not load.calls and self.on_instance_busy is not None:
            self.on_instance_busy()
        try:
            with Interruptible(load.calls, self._loop):
                await self._requests.call(
                    instance.address,
                    self.path,
                    payload,
                    context,
                    sink,
                    window=window,
                    shared=shared,
                )
        except InstanceGone:
            self.view.mark_unreachable(instance.address)
            raise
        finally:
            if not load.calls and not load.live:
                self._loads.pop(load.instance.id, None)

    async def collect(self, instance: Instance, payload: bytes, context: Context) -> list[bytes]:
        """Call `instance` and return all payloads of the answer. Raises the errors of `call`."""
        payloads: list[bytes] = []

        def sink(payload: bytes) -> bool:
            payloads.append(payload)
            return True

        await self.call(instance, payload, context, sink)
        return payloads

    def busy_instances(self) -> Iterator[Instance]:
        """The instances with calls of this client, including instances that left discovery, and
        those with requests."""
        for load in tuple(self._loads.values()):
            if load.calls or self.in_flight(load.instance.id):
                yield load.instance

    def interrupt(self, instance_id: str, error: DynamoError) -> int:
        """Cancel this client's calls of the instance; each raises a copy of `error`. The instance
        cancels its handlers. Returns the number of calls."""
        load = self._loads.get(instance_id)
        calls = tuple(load.calls) if load is not None else ()
        for call in calls:
            call.interrupt(type(error)(error.message, hint=error.hint))
        return len(calls)

    def generate(
        self, request: Any, *, mode: str = "round_robin", context: Context | None = None
    ) -> ResponseStream:
        """Call an instance picked by `mode`. `request` and the items are msgpack values."""
        return self._open_stream(lambda: self.pick(mode), request, context)

    def round_robin(self, request: Any, context: Context | None = None) -> ResponseStream:
        """Call the next instance, as Dynamo's client names it."""
        return self.generate(request, mode="round_robin", context=context)

    def random(self, request: Any, context: Context | None = None) -> ResponseStream:
        """Call a random instance, as Dynamo's client names it."""
        return self.generate(request, mode="random", context=context)

    def direct(
        self, request: Any, instance_id: str, context: Context | None = None
    ) -> ResponseStream:
        """Call one instance. Iterating raises `InstanceGone` if it is not live."""
        return self._open_stream(lambda: self._find_instance(instance_id), request, context)

    async def close(self) -> None:
        """Stop watching discovery. Calls in flight continue."""
        if self._on_close is not None:
            self._on_close(self)
        await self.view.close()

    def _find_instance(self, instance_id: str) -> Instance:
        instance = self.view.live.get(instance_id)
        if instance is None:
            raise InstanceGone(f"instance {instance_id} of {self.path} is not available now")
        return instance

    def _open_stream(
        self, choose: Callable[[], Instance], request: Any, context: Context | None
    ) -> ResponseStream:
        call_context = context or Context(request_id=secrets.token_hex(8))

        async def start(sink: Sink, window: FlowWindow) -> None:
            await self.call(choose(), encode_item(request), call_context, sink, window=window)

        return ResponseStream(start)

    def _count_calls(self, instance_id: str) -> int:
        load = self._loads.get(instance_id)
        return 0 if load is None else len(load.calls)

    def _refresh(self) -> None:
        live = self.view.live
        self.instances = MappingProxyType(live)
        for name in self._loads.keys() - live.keys():
            if not self._loads[name].calls:
                del self._loads[name]
        for name, instance in live.items():
            load = self._loads.get(name)
            if load is None:
                self._loads[name] = InstanceLoad(instance)
            elif load.instance is not instance:
                load.update_instance(instance)
        self._balancer.set_candidates([self._loads[name] for name in live])

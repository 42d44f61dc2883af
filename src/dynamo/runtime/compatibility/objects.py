"""The runtime of NVIDIA Dynamo's bindings and the namespaces, components and endpoints in it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from dynamo.communication.requests import RequestHandler, ResponseWriter
from dynamo.core.errors import ConfigError, InvalidRequest
from dynamo.core.tasks import BackgroundTasks, wait_for_first
from dynamo.runtime.calls.streams import decode_item, encode_item
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.compatibility.calls import (
    CompatClient,
    CompatContext,
    await_handler,
    instance_number,
    pass_on,
)
from dynamo.runtime.compatibility.errors import refuse_name, static_error
from dynamo.runtime.compatibility.metrics import EndpointMetrics
from dynamo.runtime.component import Endpoint, parse_reference
from dynamo.runtime.environment import environment_settings
from dynamo.runtime.processes.status import status_server_of

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

log = logging.getLogger(__name__)

Handler = Callable[..., AsyncGenerator[Any, None]]
PROGRAM_HEALTH_KEY = "program"


class RegisteredModel(Protocol):
    """A model of `register_model`, which the handler of its endpoint answers."""

    async def serve(self, handler: Handler) -> None:
        """Announce the model. Raises `ConfigError` and `ModelUnavailable`."""

    async def withdraw(self) -> None:
        """Take the model back."""


class CompatToken:
    """A cancellation token that is cancelled with its runtime."""

    def __init__(self, parent: CancellationToken) -> None:
        self._parent = parent
        self._own = CancellationToken()

    def cancel(self) -> None:
        """Cancel this token."""
        self._own.cancel()

    async def cancelled(self) -> None:
        """Wait until this token or its runtime is cancelled."""
        await wait_for_first(self._own.wait(), self._parent.wait())


class CompatRuntime:
    """The runtime of a program: `DistributedRuntime(loop, "file", "tcp")` there. `native` is the
    runtime below. Planes open in the background; calls that need them wait. `shutdown` and the end
    of the event loop withdraw the endpoints and close the planes."""

    def __init__(self, native: DistributedRuntime) -> None:
        self.native = native
        self.tasks = BackgroundTasks(on_failure=lambda _: None)
        self.handlers: dict[str, Handler] = {}
        self.models: dict[str, RegisteredModel] = {}
        self.drains = False
        """Whether the program gets time to end when the process stops: it serves something."""
        self.closed = CancellationToken()
        self._status_url: str | None = None
        self._opening = self.tasks.start(self._open(), "open planes")
        self._life = BackgroundTasks(on_failure=lambda _: None)
        self._life.start(self._live(), "runtime")

    @classmethod
    def create(
        cls,
        native: type[DistributedRuntime],
        event_loop: asyncio.AbstractEventLoop,
        discovery_backend: str = "",
        request_plane: Any = "",
        *_: Any,
        **__: Any,
    ) -> CompatRuntime:
        """Return the runtime of the environment's settings, over one of the class `native`.
        `discovery_backend` and `request_plane` hold where the environment names none. Raises
        `ConfigError`."""
        if request_plane is True:  # `is_static` of early versions
            raise static_error()
        settings = environment_settings(discovery_backend, str(request_plane or ""))
        del event_loop  # the running one
        return cls(native(settings, "process", ""))

    def stop_on(self, *signals: signal.Signals) -> None:
        """Stop with the first of these signals. The second acts as if there were no handler."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for number in signals:
                loop.remove_signal_handler(number)
            self.shutdown()

        for number in signals:
            with suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, stop)

    def note_service(self) -> None:
        """Note that the program serves something, and drain it at SIGTERM unless the program has a
        handler of its own."""
        self.drains = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.stop_on(signal.SIGTERM)

    def namespace(self, name: str) -> CompatNamespace:
        """Return a namespace."""
        return CompatNamespace(self, name)

    def endpoint(self, reference: str) -> CompatEndpoint:
        """Return the endpoint of `namespace.component.endpoint`. Raises `ConfigError`."""
        return CompatEndpoint(self, *parse_reference(reference.removeprefix("dyn://")))

    def shutdown(self) -> None:
        """Stop this process: served endpoints drain."""
        self.native.stopping.cancel()

    def child_token(self) -> CompatToken:
        """Return a token that is cancelled when this process stops. The program ends by itself."""
        self.note_service()
        return CompatToken(self.native.stopping)

    def system_status_server_url(self) -> str | None:
        """Return the URL of the status port, or None if it is not wanted or not open yet."""
        return self._status_url

    def set_health_status(self, ready: bool) -> None:
        """Report on the status port whether the program is ready."""
        if ready:
            self.native.health.set_healthy(PROGRAM_HEALTH_KEY)
        else:
            self.native.health.set_unhealthy(PROGRAM_HEALTH_KEY, "the program is not ready")

    def __getattr__(self, name: str) -> Any:
        refuse_name("runtime", name)

    async def ready(self) -> None:
        """Wait until the planes are open. Raises `ConfigError` if they cannot be opened."""
        await asyncio.wait({self._opening})
        self._opening.result()

    async def _open(self) -> None:
        await self.native.open()
        if _wants_status_port():
            status = status_server_of(self.native)
            await status.start()
            self.native.add_shutdown_hook(lambda _: status.stop())
            self._status_url = status.url
            log.info("status port", extra={"fields": {"url": status.url}})

    async def _live(self) -> None:
        try:
            await self.ready()
            await self.native.stopping.wait()
        finally:
            await self._close()

    async def _close(self) -> None:
        try:
            opened = self._opening.done() and not self._opening.cancelled()
            if opened and self._opening.exception() is None:
                await self.native.shutdown()
        finally:
            self.shutdown()
            await self.tasks.close()
            self.closed.cancel()


def _wants_status_port() -> bool:
    port = os.environ.get("DYN_SYSTEM_PORT", "-1")
    enabled = os.environ.get("DYN_SYSTEM_ENABLED", "").lower() in {"1", "true"}
    return enabled or not port.startswith("-")


class CompatNamespace:
    """A namespace."""

    def __init__(self, runtime: CompatRuntime, name: str) -> None:
        self._runtime = runtime
        self._name = name

    def component(self, name: str) -> CompatComponent:
        """Return a component of this namespace."""
        return CompatComponent(self._runtime, self._name, name)


class CompatComponent:
    """A component of a namespace."""

    def __init__(self, runtime: CompatRuntime, namespace: str, name: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self._name = name

    def endpoint(self, name: str) -> CompatEndpoint:
        """Return an endpoint of this component."""
        return CompatEndpoint(self._runtime, self._namespace, self._name, name)

    async def create_service(self) -> None:
        """Do nothing: a component exists once an endpoint is served."""


class CompatEndpoint:
    """An endpoint of a component."""

    def __init__(self, runtime: CompatRuntime, namespace: str, component: str, name: str) -> None:
        self.runtime = runtime
        native = runtime.native.namespace(namespace).component(component).endpoint(name)
        self.native: Endpoint = native
        self.metrics = EndpointMetrics(runtime.native.metrics, namespace, component, name)

    def __getattr__(self, name: str) -> Any:
        refuse_name("endpoint", name)

    def connection_id(self) -> int:
        """Return the number of this process's instance."""
        return instance_number(self.runtime.native.instance_id)

    async def serve_endpoint(
        self,
        handler: Handler,
        graceful_shutdown: bool = True,
        metrics_labels: Any = None,
        health_check_payload: Any = None,
    ) -> None:
        """Serve `handler(request)` or `handler(request, context)` until the process has drained.

        The last three arguments have no effect: the runtime always drains, labels its metrics and
        probes its processes by itself. Raises `ConfigError` for a coroutine function.
        """
        del graceful_shutdown, metrics_labels, health_check_payload
        runtime, path = self.runtime, self.native.path
        serve = _request_handler(handler, path, runtime.tasks)
        await runtime.ready()
        if runtime.native.stopping.cancelled:
            return
        served = await self.native.serve(serve)
        try:
            if model := runtime.models.get(path):
                await model.serve(handler)
        except BaseException:
            await served.withdraw()
            raise
        runtime.handlers[path] = handler
        runtime.note_service()
        await runtime.closed.wait()

    async def client(self, router_mode: Any = None) -> CompatClient:
        """Open a client. `router_mode` is the way in which its `generate` chooses instances."""
        await self.runtime.ready()
        return CompatClient(await self.native.client(), str(router_mode or "round_robin"))


def bind_handler(function: Handler) -> tuple[Callable[[Any, CompatContext], Any], bool]:
    """Return a handler as a function of request and context, and whether it reads the context."""
    parameters = inspect.signature(function).parameters
    if "context" in parameters:
        return lambda request, context: function(request, context=context), True
    if len(parameters) == 2:
        return function, True
    return lambda request, _: function(request), False


def _request_handler(function: Handler, path: str, tasks: BackgroundTasks) -> RequestHandler:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"the handler of {path} must be an async generator function", hint="use `yield` in it"
        )
    start, reads_context = bind_handler(function)

    async def answer(payload: bytes, context: CompatContext, out: ResponseWriter) -> None:
        async def send(item: Any) -> bool:
            await out.wait_for_window()
            return out.send(encode_item(item))

        try:
            await pass_on(start(decode_item(payload), context), send)
        except InvalidRequest as error:
            fields = {"endpoint": path, "error": error.message}
            log.warning("a handler refused a request", extra={"fields": fields})
            raise

    async def handle(payload: bytes, out: ResponseWriter) -> None:
        call = out.context
        context = CompatContext(call.request_id, call.metadata, trace=call.trace)
        await await_handler(tasks, answer(payload, context, out), context, reads_context)

    return handle

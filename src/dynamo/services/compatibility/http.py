"""`HttpService` of NVIDIA Dynamo's bindings: the OpenAI API over engines of the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.application import Application, Gateway, ServedModel
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.communication.requests import Sink
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.tasks import BackgroundTasks, wait_for_first
from dynamo.runtime.calls.streams import decode_item, encode_item
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.compatibility.calls import CompatContext, await_handler, pass_on
from dynamo.runtime.compatibility.objects import bind_handler
from dynamo.runtime.environment import environment_settings
from dynamo.sdk.service_model import ServiceModelRecord
from dynamo.services.service_models import ServiceModelProcessor
from dynamo.telemetry import Registry

DEFAULT_PORT = 8080


class HttpAsyncEngine:
    """A program's function of an OpenAI request, and of a context, that returns an async
    iterator of OpenAI's chunks."""

    def __init__(self, generator: Callable[..., Any], event_loop: Any = None) -> None:
        del event_loop  # the running loop
        self.start, self.reads_context = bind_handler(generator)


class EngineClient:
    """Calls an engine as a `Client` calls an instance. `takes_prompts`: the engine reads the last
    message as `prompt`."""

    def __init__(self, engine: HttpAsyncEngine, *, takes_prompts: bool) -> None:
        self._engine = engine
        self._takes_prompts = takes_prompts
        self._tasks = BackgroundTasks(on_failure=lambda _: None)

    def pick(self, mode: str) -> None:
        """Pick the only instance."""

    async def call(
        self, instance: None, payload: bytes, context: Context, sink: Sink, window: None
    ) -> None:
        """Answer a chat request. Raises what the engine raises."""
        del instance, window
        body = decode_item(payload)
        if self._takes_prompts:
            body["prompt"] = body.pop("messages")[-1]["content"]
        call = CompatContext(context.request_id, context.metadata, trace=context.trace)

        async def send(item: Any) -> bool:
            wanted = not call.is_stopped() and sink(encode_item(item))
            if not wanted:
                call.kill()
            return wanted

        work = pass_on(self._engine.start(body, call), send)
        await await_handler(self._tasks, work, call, self._engine.reads_context)


class HttpService:
    """The OpenAI API on a port for models of this process, without workers."""

    def __init__(self, port: int | None = None, *, wait_for_first_item: bool = False) -> None:
        del wait_for_first_item  # a status is sent with the first item in any case
        self._port = DEFAULT_PORT if port is None else port
        self._gateway = Gateway()
        self._names: dict[bool, dict[str, ServedModel]] = {False: {}, True: {}}
        self._clock = SystemClock()
        self._stopping = CancellationToken()
        self._tasks = BackgroundTasks(on_failure=lambda _: None)

    def add_chat_completions_model(self, model: str, *checksum_and_engine: Any) -> None:
        """Serve a model for chats: the arguments are name, a checksum in later versions, engine."""
        self._add(model, checksum_and_engine[-1], takes_prompts=False)

    def add_completions_model(self, model: str, *checksum_and_engine: Any) -> None:
        """Serve a model for prompts: the arguments are name, a checksum in later versions, and
        engine."""
        self._add(model, checksum_and_engine[-1], takes_prompts=True)

    def list_chat_completions_models(self) -> list[str]:
        """Return the names of the models for chats."""
        return sorted(self._names[False])

    def list_completions_models(self) -> list[str]:
        """Return the names of the models for prompts."""
        return sorted(self._names[True])

    def enable_endpoint(self, *_: Any) -> None:
        """Do nothing: all routes are served."""

    def run(self, runtime_or_token: Any) -> asyncio.Future[None]:
        """Listen until the runtime stops or the token is cancelled. Returns what to await; its
        errors are `PortInUse` and `ConfigError`."""
        child_token = getattr(runtime_or_token, "child_token", None)
        token = runtime_or_token if child_token is None else child_token()
        return self._tasks.start(self._serve(token))

    def shutdown(self) -> None:
        """Stop listening."""
        self._stopping.cancel()

    def _add(self, model: str, engine: HttpAsyncEngine, *, takes_prompts: bool) -> None:
        record = ServiceModelRecord(model, "", "", "", streams=True, derived=False)
        client: Any = EngineClient(engine, takes_prompts=takes_prompts)
        processor = ServiceModelProcessor(record, client, self._gateway, unknown_roles="")
        served = ServedModel((model,), processor, int(self._clock.wall()), 0, "program")
        self._names[takes_prompts][model] = served
        self._gateway.add(served)

    async def _serve(self, token: Any) -> None:
        settings = await self._clock.offload(environment_settings)
        server = settings.server
        application = Application(server, self._gateway, self._clock, Registry())
        http = HttpServer(
            application.handle,
            HttpLimits.from_settings(server),
            self._clock,
            on_error=application.on_error,
            check_headers=application.check_headers,
        )
        await http.start(server.http_host, self._port)
        try:
            await wait_for_first(token.cancelled(), self._stopping.wait())
        finally:
            await http.stop(settings.runtime.drain_s)
            await application.close(0.0)

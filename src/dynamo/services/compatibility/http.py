"""`HttpService` of NVIDIA Dynamo's bindings: the OpenAI API over engines of the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NoReturn

from dynamo.application import Application, Gateway, ServedModel
from dynamo.application.openai.service_chat import ChatChunkReader, chat_request_to_dict
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import Unsupported
from dynamo.core.tasks import BackgroundTasks, wait_for_first
from dynamo.core.text import ChatRequest, CompletionRequest, TextReply
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.compatibility.calls import CompatContext, await_handler
from dynamo.runtime.compatibility.errors import handler_error
from dynamo.runtime.compatibility.objects import bind_handler
from dynamo.runtime.environment import environment_settings
from dynamo.telemetry import Registry

DEFAULT_PORT = 8080


class HttpAsyncEngine:
    """A program's function of an OpenAI request, and of a context, that returns an async
    iterator of OpenAI's chunks."""

    def __init__(self, generator: Callable[..., Any], event_loop: Any = None) -> None:
        del event_loop  # the running loop
        self.start, self.reads_context = bind_handler(generator)


class EngineProcessor:
    """The text processor of a model of an `HttpAsyncEngine`. `takes_prompts`: its requests have a
    prompt, not messages."""

    def __init__(self, engine: HttpAsyncEngine, *, takes_prompts: bool) -> None:
        self._engine = engine
        self._takes_prompts = takes_prompts
        self._tasks = BackgroundTasks(on_failure=lambda _: None)

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        """Answer a conversation. Raises `Unsupported` for an engine of prompts."""
        if self._takes_prompts:
            raise Unsupported("this model takes prompts", hint="POST /v1/completions")
        reader = ChatChunkReader(reply, request.options.n)
        await self._answer(chat_request_to_dict(request), context, reader)

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Answer a prompt; engines of chats get it as a user's message. Raises `Unsupported` for
        token ids and echo."""
        if request.echo or isinstance(request.prompt, bytes):
            self._refuse()
        message = {"role": "user", "content": request.prompt}
        body = chat_request_to_dict(ChatRequest(request.model, (message,), request.options))
        if self._takes_prompts:
            del body["messages"]
            body["prompt"] = request.prompt
        await self._answer(body, context, ChatChunkReader(reply, request.options.n))

    async def tokenize(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `Unsupported`: an engine of text has no tokenizer."""
        self._refuse()

    detokenize = texts = tokenize

    async def _answer(
        self, body: dict[str, Any], context: Context, reader: ChatChunkReader
    ) -> None:
        call = CompatContext(context.request_id, context.metadata, trace=context.trace)
        work = self._pass_on(body, call, reader)
        await await_handler(self._tasks, work, call, self._engine.reads_context)

    async def _pass_on(
        self, body: dict[str, Any], call: CompatContext, reader: ChatChunkReader
    ) -> None:
        try:
            async with aclosing(self._engine.start(body, call)) as items:
                left = False
                async for item in items:
                    if left:
                        return
                    left = call.is_stopped() or not reader.receive(item)
                    if left:
                        call.kill()
        except Exception as error:
            raise handler_error(error) from error
        if not call.is_stopped():
            reader.end()

    def _refuse(self) -> NoReturn:
        raise Unsupported(
            "this model has no tokenizer here", hint="POST /v1/chat/completions", param="model"
        )


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
        processor = EngineProcessor(engine, takes_prompts=takes_prompts)
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

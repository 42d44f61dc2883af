"""Chat over the request plane: endpoints of the frontend and of a processor process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import msgspec

from dynamo.application import Gateway
from dynamo.application.gateway import UnloadedModel, find_worker_model
from dynamo.application.openai.service_chat import (
    ChatAnswerReply,
    ChatChunkReply,
    chat_request_from_dict,
)
from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.text import ChatRequest
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.sdk.decorators import spec_of
from dynamo.services.components import Processor
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.routing import ProcessRouting
from dynamo.services.service_models import ServiceModelWatcher

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ProcessorEndpoints:
    """Answers `Processor.chat` and `Processor.answer` over the request plane."""

    def __init__(self, runtime: DistributedRuntime, gateway: Gateway) -> None:
        self._runtime = runtime
        self._gateway = gateway
        self._unknown_roles = runtime.settings.server.unknown_roles
        self._call_numbers = count(1)

    async def start(self) -> None:
        """Serve both endpoints until the runtime shuts down."""
        spec = spec_of(Processor)
        component = self._runtime.namespace().component(spec.name)
        await component.endpoint(spec.endpoints["chat"].name).serve(self._handle_chat)
        await component.endpoint(spec.endpoints["answer"].name).serve(self._handle_answer)

    async def _handle_chat(self, payload: bytes, out: ResponseWriter) -> None:
        async with self._read_request(payload, out.context) as (request, processor):
            await self._chat(request, processor, out)

    async def _chat(self, request: ChatRequest, processor: Any, out: ResponseWriter) -> None:
        head = {
            "id": f"chatcmpl-{out.context.request_id}",
            "created": int(self._runtime.clock.wall()),
            "model": request.model,
        }

        def send(chunk: dict[str, Any]) -> bool:
            return out.send(_encode(chunk))

        reply = ChatChunkReply(send, head, request.options.n)
        await processor.chat(request, self._own_context(out.context), reply)

    async def _handle_answer(self, payload: bytes, out: ResponseWriter) -> None:
        async with self._read_request(payload, out.context) as (request, processor):
            options = msgspec.structs.replace(request.options, n=1)
            reply = ChatAnswerReply()
            single = msgspec.structs.replace(request, options=options)
            await processor.chat(single, self._own_context(out.context), reply)
            out.send(_encode(reply.answer))

    def _own_context(self, context: Context) -> Context:
        """Return the context with a unique id, since a service may make several calls under the id
        of one HTTP request."""
        own_id = f"{context.request_id}.{next(self._call_numbers)}"
        return msgspec.structs.replace(context, request_id=own_id)

    @asynccontextmanager
    async def _read_request(
        self, payload: bytes, context: Context
    ) -> AsyncIterator[tuple[ChatRequest, Any]]:
        """Yield a request and its processor. Its model is loaded first, if it is on demand."""
        async with AsyncExitStack() as stack:
            try:
                request = self._decode_request(payload)
            except UnloadedModel as error:
                if (load := self._gateway.load) is None:
                    raise
                await stack.enter_async_context(load(error.model, context.timeout_s))
                request = self._decode_request(payload)
            yield request

    def _decode_request(self, payload: bytes) -> tuple[ChatRequest, Any]:
        body = _decode(payload)
        model = body.get("model") if isinstance(body, dict) else None
        name, served = find_worker_model(self._gateway, model)
        return chat_request_from_dict(body, name, self._unknown_roles), served.processor


log = logging.getLogger(__name__)


class ProcessorService:
    """Serves all announced models over the request plane, without HTTP."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Serve until the runtime shuts down."""
        gateway = Gateway()
        ModelWatcher(runtime, gateway, ProcessRouting(runtime)).start()
        ServiceModelWatcher(runtime, gateway).start()
        await ProcessorEndpoints(runtime, gateway).start()
        log.info("processor serves", extra={"fields": {"instance": runtime.instance_id}})

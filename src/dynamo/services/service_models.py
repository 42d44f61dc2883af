"""Models that user services offer: discovered by their records and served like any model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from dynamo.application import Gateway, ServedModel
from dynamo.application.gateway import MODELS_HEALTH_KEY, find_worker_model
from dynamo.application.openai.service_chat import (
    ChatChunkReader,
    chat_request_from_dict,
    chat_request_to_dict,
)
from dynamo.core.context import Context
from dynamo.core.errors import Unsupported
from dynamo.core.text import ChatRequest, CompletionRequest, TextReply
from dynamo.runtime.calls.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.sdk.handle import call_with_retries
from dynamo.sdk.service_model import ServiceModelRecord, service_models_prefix
from dynamo.services.catalogue import ModelRecords

log = logging.getLogger(__name__)

SERVICE_OWNER = "service"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ServiceModelWatcher:
    """Follows the models that services offer and adds them to a gateway.

    A model stays while its services are away; calls wait for a service and then fail.
    """

    def __init__(self, runtime: DistributedRuntime, gateway: Gateway) -> None:
        self._runtime = runtime
        self._gateway = gateway
        prefix = service_models_prefix(runtime.settings.runtime.namespace)
        self._records = ModelRecords(
            runtime, prefix, msgspec.json.Decoder(ServiceModelRecord).decode
        )
        self._open_models: dict[str, tuple[ServiceModelRecord, Client]] = {}

    def start(self) -> None:
        """Follow the offers until the runtime shuts down."""
        self._runtime.tasks.start(self._records.follow(self._open_if_changed), "service models")

    async def _open_if_changed(self, model: str) -> None:
        records = self._records.by_model[model]
        previous = self._open_models.get(model)
        if not records or (previous is not None and previous[0] in records.values()):
            return
        record = next(iter(records.values()))
        served, fields = self._gateway.models.get(model), {"model": model}
        if served is not None and served.owned_by != SERVICE_OWNER:
            log.error("a service offers a model that workers serve", extra={"fields": fields})
            return
        runtime = self._runtime
        component = runtime.namespace(record.namespace).component(record.component)
        client = await component.endpoint(record.endpoint).client()
        processor = ServiceModelProcessor(
            record, client, self._gateway, runtime.settings.server.unknown_roles
        )
        self._open_models[model] = (record, client)
        created = int(runtime.clock.wall())
        self._gateway.add(
            ServedModel((model,), processor, created, 0, SERVICE_OWNER, record.derived)
        )
        if not record.derived:
            runtime.health.set_healthy(MODELS_HEALTH_KEY)
        if previous is not None:
            await previous[1].close()
        fields["service"] = record.component
        log.info("service model ready", extra={"fields": fields})


@dataclass(eq=False)
class ServiceModelProcessor:
    """The text processor of a model that a service offers.

    The service's chat endpoint streams texts or chunks, or answers once: with a text, a completion,
    or another request, which is then answered by a model that workers serve.
    """

    record: ServiceModelRecord
    client: Client
    gateway: Gateway
    unknown_roles: str

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        """Answer by the service."""
        body = chat_request_to_dict(request)
        reader = ChatChunkReader(reply, request.options.n)
        reply.prompt(0)
        if self.record.streams:
            await call_with_retries(
                self.client, _encode(body), context, lambda item: reader.receive(_decode(item))
            )
            reader.end()
            return
        answers: list[bytes] = []

        def sink(payload: bytes) -> bool:
            answers.append(payload)
            return True

        await call_with_retries(self.client, _encode(body), context, sink)
        answer = _decode(answers[0]) if answers else ""
        if isinstance(answer, dict) and "messages" in answer:
            await self._forward_request(answer, context, reply)
        else:
            reader.receive(answer)
            reader.end()

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Answer a prompt as a user's message. Raises `Unsupported` for token ids and echo."""
        if request.echo or isinstance(request.prompt, bytes):
            raise self._chat_only_error()
        message = {"role": "user", "content": request.prompt}
        await self.chat(ChatRequest(request.model, (message,), request.options), context, reply)

    async def tokenize(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `Unsupported`: a service has no tokenizer."""
        raise self._chat_only_error()

    detokenize = token_strings = token_bytes = tokenize

    async def _forward_request(
        self, body: dict[str, Any], context: Context, reply: TextReply
    ) -> None:
        name, served = find_worker_model(self.gateway, body.get("model"))
        request = chat_request_from_dict(body, name, self.unknown_roles)
        await served.processor.chat(request, context, reply)

    def _chat_only_error(self) -> Unsupported:
        return Unsupported(
            f"model {self.record.model!r} is a service, without tokenizer and echo",
            hint="POST /v1/chat/completions",
            param="model",
        )

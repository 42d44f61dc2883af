"""Models that users' services answer for: found by their offers, served like any other."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from dynamo.application import Gateway, ServedModel
from dynamo.application.gateway import MODELS_HEALTH_KEY, find_worker_model
from dynamo.application.openai.service_chat import (
    ChatChunkReader,
    chat_request_from_dict,
    chat_request_to_dict,
)
from dynamo.communication.discovery import RecordChange
from dynamo.core.context import Context
from dynamo.core.errors import Unsupported
from dynamo.core.text import ChatRequest, CompletionRequest, TextReply
from dynamo.runtime.calls.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.sdk.handle import call_with_retries
from dynamo.sdk.service_model import ServiceModelRecord, service_models_prefix

log = logging.getLogger(__name__)

WATCH_RETRY_S = 1.0
SERVICE_OWNER = "service"

_decode_offer = msgspec.json.Decoder(ServiceModelRecord).decode
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ServiceModelWatcher:
    """Follows the offers of a namespace and gives them to a gateway. A model stays there while its
    services are away: calls wait for them, then tell so."""

    def __init__(self, runtime: DistributedRuntime, gateway: Gateway) -> None:
        self._runtime = runtime
        self._gateway = gateway
        self._prefix = service_models_prefix(runtime.settings.runtime.namespace)
        self._offers: defaultdict[str, dict[str, ServiceModelRecord]] = defaultdict(dict)
        self._open_models: dict[str, tuple[ServiceModelRecord, Client]] = {}

    def start(self) -> None:
        """From now on until the runtime shuts down."""
        self._runtime.tasks.start(self._run(), "offers")

    async def _run(self) -> None:
        while True:
            try:
                async with self._runtime.discovery.watch(self._prefix) as changes:
                    self._offers.clear()
                    async for batch in changes:
                        await self._apply_changes(batch)
            except Exception as error:  # noqa: BLE001 - what is served stays so meanwhile
                log.warning("offers watch failed", extra={"fields": {"error": str(error)}})
            await self._runtime.clock.sleep(WATCH_RETRY_S)

    async def _apply_changes(self, batch: Sequence[RecordChange]) -> None:
        changed = set()
        for change in batch:
            quoted, _, instance = change.key.removeprefix(self._prefix).rpartition("/")
            offers = self._offers[unquote(quoted)]
            offers.pop(instance, None)
            changed.add(unquote(quoted))
            try:
                if change.value is not None:
                    offers[instance] = _decode_offer(change.value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                fields = {"key": change.key, "error": str(error)}
                log.warning("bad offer", extra={"fields": fields})
        for model in changed:
            await self._open_if_changed(model)

    async def _open_if_changed(self, model: str) -> None:
        offers = self._offers[model]
        before = self._open_models.get(model)
        if not offers or (before is not None and before[0] in offers.values()):
            return
        offer = next(iter(offers.values()))
        there = self._gateway.models.get(model)
        if there is not None and there.owned_by != SERVICE_OWNER:
            log.error(
                "a service offers a model that workers serve", extra={"fields": {"model": model}}
            )
            return
        runtime = self._runtime
        component = runtime.namespace(offer.namespace).component(offer.component)
        client = await component.endpoint(offer.endpoint).client()
        processor = ServiceModelProcessor(
            offer, client, self._gateway, runtime.settings.server.unknown_roles
        )
        self._open_models[model] = (offer, client)
        made = int(runtime.clock.wall())
        self._gateway.add(ServedModel((model,), processor, made, 0, SERVICE_OWNER, offer.derived))
        if not offer.derived:
            runtime.health.set_healthy(MODELS_HEALTH_KEY)
        if before is not None:
            await before[1].close()
        log.info("model offered", extra={"fields": {"model": model, "service": offer.component}})


class ServiceModelProcessor:
    """One model that a service answers for. Its `chat` streams texts or chunks, or answers once:
    a text, a completion, or another request, which then goes to the model by the usual way."""

    def __init__(
        self, offer: ServiceModelRecord, client: Client, gateway: Gateway, unknown_roles: str
    ) -> None:
        self._offer = offer
        self._client = client
        self._gateway = gateway
        self._unknown_roles = unknown_roles

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        """Ask the service."""
        body = chat_request_to_dict(request)
        reader = ChatChunkReader(reply)
        if self._offer.streams:
            await call_with_retries(
                self._client, _encode(body), context, lambda item: reader.receive(_decode(item))
            )
            reader.end()
            return
        answers: list[bytes] = []

        def sink(payload: bytes) -> bool:
            answers.append(payload)
            return True

        await call_with_retries(self._client, _encode(body), context, sink)
        answer = _decode(answers[0]) if answers else ""
        if isinstance(answer, dict) and "messages" in answer:
            await self._forward_request(answer, context, reply)
        else:
            reader.receive(answer)
            reader.end()

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Ask the service, the prompt being what a user says. Raises `Unsupported` for what only a
        model can do with a prompt."""
        if request.echo or isinstance(request.prompt, bytes):
            raise self._chat_only_error()
        said = {"role": "user", "content": request.prompt}
        await self.chat(ChatRequest(request.model, (said,), request.options), context, reply)

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]], *, add_special: bool = True
    ) -> list[int]:
        """Raises `Unsupported`."""
        del prompt, add_special
        raise self._chat_only_error()

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Raises `Unsupported`."""
        del ids
        raise self._chat_only_error()

    async def texts(self, ids: Sequence[int]) -> list[str]:
        """Raises `Unsupported`."""
        del ids
        raise self._chat_only_error()

    async def _forward_request(
        self, body: dict[str, Any], context: Context, reply: TextReply
    ) -> None:
        name, served = find_worker_model(self._gateway, body.get("model"))
        request = chat_request_from_dict(body, name, self._unknown_roles)
        await served.processor.chat(request, context, reply)

    def _chat_only_error(self) -> Unsupported:
        return Unsupported(
            f"model {self._offer.model!r} is a service: it has no tokens and echoes no prompt",
            hint="POST /v1/chat/completions",
            param="model",
        )

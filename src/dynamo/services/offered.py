"""Models that users' services answer for: found by their offers, served like any other."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from dynamo.application import Gateway, Served
from dynamo.application.pieces import PieceReader, plain_request, read_plain
from dynamo.communication.discovery import Change
from dynamo.core.context import Context
from dynamo.core.errors import Unsupported
from dynamo.core.text import ChatRequest, CompletionRequest, TextReply
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.sdk.handle import deliver
from dynamo.sdk.offers import Offer, offers_prefix
from dynamo.services.model_names import MODELS, plain_model

log = logging.getLogger(__name__)

REWATCH_S = 1.0
OWNER = "service"

_decode_offer = msgspec.json.Decoder(Offer).decode
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Offers:
    """Follows the offers of a namespace and gives them to a gateway. A model stays there while its
    services are away: calls wait for them, then tell so."""

    def __init__(self, runtime: DistributedRuntime, gateway: Gateway) -> None:
        self._runtime = runtime
        self._gateway = gateway
        self._prefix = offers_prefix(runtime.settings.runtime.namespace)
        self._offers: defaultdict[str, dict[str, Offer]] = defaultdict(dict)
        self._served: dict[str, tuple[Offer, Client]] = {}

    def follow(self) -> None:
        """From now on until the runtime shuts down."""
        self._runtime.tasks.start(self._follow(), "offers")

    async def _follow(self) -> None:
        while True:
            try:
                async with self._runtime.discovery.watch(self._prefix) as changes:
                    self._offers.clear()
                    async for batch in changes:
                        await self._take(batch)
            except Exception as error:  # noqa: BLE001 - what is served stays so meanwhile
                log.warning("offers watch failed", extra={"fields": {"error": str(error)}})
            await self._runtime.clock.sleep(REWATCH_S)

    async def _take(self, batch: Sequence[Change]) -> None:
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
            await self._attend(model)

    async def _attend(self, model: str) -> None:
        offers = self._offers[model]
        before = self._served.get(model)
        if not offers or (before is not None and before[0] in offers.values()):
            return
        offer = next(iter(offers.values()))
        there = self._gateway.models.get(model)
        if there is not None and there.owned_by != OWNER:
            log.error(
                "a service offers a model that workers serve", extra={"fields": {"model": model}}
            )
            return
        runtime = self._runtime
        component = runtime.namespace(offer.namespace).component(offer.component)
        client = await component.endpoint(offer.endpoint).client()
        processor = Offered(offer, client, self._gateway, runtime.settings.server.unknown_roles)
        self._served[model] = (offer, client)
        made = int(runtime.clock.wall())
        self._gateway.add(Served((model,), processor, made, 0, OWNER, offer.derived))
        if not offer.derived:
            runtime.health.well_again(MODELS)
        if before is not None:
            await before[1].close()
        log.info("model offered", extra={"fields": {"model": model, "service": offer.component}})


class Offered:
    """One model that a service answers for. Its `chat` streams texts or chunks, or answers once:
    a text, a completion, or another request, which then goes to the model by the usual way."""

    def __init__(self, offer: Offer, client: Client, gateway: Gateway, unknown_roles: str) -> None:
        self._offer = offer
        self._client = client
        self._gateway = gateway
        self._unknown_roles = unknown_roles

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        """Ask the service."""
        body = plain_request(request)
        reader = PieceReader(reply)
        if self._offer.streams:
            await deliver(
                self._client, _encode(body), context, lambda item: reader.take(_decode(item))
            )
            reader.end()
            return
        answers: list[bytes] = []

        def sink(payload: bytes) -> bool:
            answers.append(payload)
            return True

        await deliver(self._client, _encode(body), context, sink)
        answer = _decode(answers[0]) if answers else ""
        if isinstance(answer, dict) and "messages" in answer:
            await self._go_on(answer, context, reply)
        else:
            reader.take(answer)
            reader.end()

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Ask the service, the prompt being what a user says. Raises `Unsupported` for what only a
        model can do with a prompt."""
        if request.echo or isinstance(request.prompt, bytes):
            raise self._chat_only()
        said = {"role": "user", "content": request.prompt}
        await self.chat(ChatRequest(request.model, (said,), request.options), context, reply)

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]], *, add_special: bool = True
    ) -> list[int]:
        """Raises `Unsupported`."""
        del prompt, add_special
        raise self._chat_only()

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Raises `Unsupported`."""
        del ids
        raise self._chat_only()

    async def texts(self, ids: Sequence[int]) -> list[str]:
        """Raises `Unsupported`."""
        del ids
        raise self._chat_only()

    async def _go_on(self, body: dict[str, Any], context: Context, reply: TextReply) -> None:
        name, served = plain_model(self._gateway, body.get("model"))
        request = read_plain(body, name, self._unknown_roles)
        await served.processor.chat(request, context, reply)

    def _chat_only(self) -> Unsupported:
        return Unsupported(
            f"model {self._offer.model!r} is a service: it has no tokens and echoes no prompt",
            hint="POST /v1/chat/completions",
            param="model",
        )

"""A worker's LoRA adapters: the endpoint that loads and unloads them, and those of its peers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from dynamo.communication.requests import ResponseWriter
from dynamo.core.adapters import adapter_name, decode_order
from dynamo.core.errors import DECODE_ERRORS, InvalidRequest
from dynamo.core.reply import LoraAdapters
from dynamo.models.card import ModelCard
from dynamo.runtime.distributed import DistributedRuntime

log = logging.getLogger(__name__)


class AdapterEndpoint:
    """Executes orders for the adapters of one engine. `announce` publishes what is loaded."""

    def __init__(self, adapters: LoraAdapters, announce: Callable[[], Awaitable[None]]) -> None:
        self._adapters = adapters
        self._announce = announce

    async def handle(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Load or unload an adapter, and answer with the id that the name has now. Raises
        `ProtocolError`, and the errors of the engine."""
        order = decode_order(payload)
        try:
            if order.path:
                await self._adapters.load(order.name, order.path, replace=order.replace)
            else:
                await self._adapters.unload(order.name)
        finally:
            await self._announce()
        paths = self._adapters.paths
        present = (adapter for adapter in paths if adapter_name(adapter) == order.name)
        outgoing.send(next(present, "").encode())


async def load_peer_adapters(
    adapters: LoraAdapters, runtime: DistributedRuntime, cards_prefix: str
) -> None:
    """Load the adapters in the cards of the model's other workers, which clients have had loaded.
    Adapters that cannot be loaded here are logged and left out."""
    for record in (await runtime.discovery.get(cards_prefix)).values():
        with suppress(*DECODE_ERRORS):
            engine = msgspec.json.decode(record, type=ModelCard).engine
            for adapter, path in (engine.adapters if engine else {}).items():
                await _load_peer_adapter(adapters, adapter_name(adapter), path)


async def _load_peer_adapter(adapters: LoraAdapters, name: str, path: str) -> None:
    try:
        await adapters.load(name, path)
    except InvalidRequest as error:
        fields = {"adapter": name, "error": error.message}
        log.warning("an adapter of other workers is not loaded", extra={"fields": fields})

"""A worker's LoRA adapters: the endpoint that loads and unloads them, and those of its model."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec

from dynamo.communication.directory import WATCH_RETRY_S
from dynamo.communication.requests import ResponseWriter
from dynamo.core.adapters import adapter_name, decode_order
from dynamo.core.errors import DECODE_ERRORS, InvalidRequest, NotFound, PlaneUnavailable
from dynamo.core.reply import LoraAdapters
from dynamo.models.card import ModelCard
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import SUPERVISORS_PREFIX, SupervisorRecord

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


async def load_model_adapters(
    adapters: LoraAdapters, runtime: DistributedRuntime, model: str, cards_prefix: str
) -> None:
    """Load the adapters that clients have had loaded: those in the records of the model's
    supervisors, which outlive its workers, and those in the cards of its other workers. Waits for
    discovery. Adapters that cannot be loaded here are logged and left out."""
    namespace = runtime.settings.runtime.namespace
    for record in (await _read_records(runtime, SUPERVISORS_PREFIX)).values():
        with suppress(*DECODE_ERRORS):
            supervisor = msgspec.json.decode(record, type=SupervisorRecord)
            if supervisor.namespace == namespace:
                for name, path in supervisor.adapters.get(model, {}).items():
                    await _load_or_unload(adapters, name, path)
    for record in (await _read_records(runtime, cards_prefix)).values():
        with suppress(*DECODE_ERRORS):
            engine = msgspec.json.decode(record, type=ModelCard).engine
            for adapter, path in (engine.adapters if engine else {}).items():
                await _load_or_unload(adapters, adapter_name(adapter), path)


async def _read_records(runtime: DistributedRuntime, prefix: str) -> Mapping[str, bytes]:
    while True:
        try:
            return await runtime.discovery.get(prefix)
        except PlaneUnavailable:  # its outage is logged
            await runtime.clock.sleep(WATCH_RETRY_S)


async def _load_or_unload(adapters: LoraAdapters, name: str, path: str) -> None:
    try:
        if path:
            await adapters.load(name, path)
        else:
            await adapters.unload(name)
    except NotFound:
        return  # not loaded
    except InvalidRequest as error:
        fields = {"adapter": name, "error": error.message}
        log.warning("an adapter of the model is not loaded", extra={"fields": fields})

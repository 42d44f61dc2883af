"""The routes that load and unload LoRA adapters, with vLLM's names and bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Protocol

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.openai.body import decode_body
from dynamo.application.routes import Route
from dynamo.core.adapters import AdapterOrder
from dynamo.core.errors import Forbidden

TEXT_CONTENT_TYPE = "text/plain; charset=utf-8"
AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter.

    `lora_path`: a folder on the hosts of the workers. `base_model`: the adapted model, which only
    needs a name where several can have adapters. `is_3d_lora_weight` has its default alone: vLLM
    reads the layout from the folder.
    """

    lora_name: AdapterName
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    base_model: str = ""
    is_3d_lora_weight: Literal[False] = False


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter. `lora_int_id` is vLLM's number, which workers choose."""

    lora_name: AdapterName
    lora_int_id: int | None = None


_load_decoder = msgspec.json.Decoder(LoadBody)
_unload_decoder = msgspec.json.Decoder(UnloadBody)


class OrderSender(Protocol):
    """Sends orders to workers: `services.adapters.AdapterOrders`."""

    async def execute(self, order: AdapterOrder) -> None: ...


class AdaptersHandler:
    """Loads and unloads adapters on all workers. `orders` is None where clients may not."""

    def __init__(self, orders: OrderSender | None) -> None:
        self._orders = orders

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        return {
            "/v1/load_lora_adapter": {"POST": self.load},
            "/v1/unload_lora_adapter": {"POST": self.unload},
        }

    async def load(self, exchange: Exchange) -> None:
        """POST /v1/load_lora_adapter."""
        body = decode_body(_load_decoder, exchange.request)
        order = AdapterOrder(body.lora_name, body.lora_path, body.load_inplace, body.base_model)
        await self._execute(exchange, order, "added")

    async def unload(self, exchange: Exchange) -> None:
        """POST /v1/unload_lora_adapter."""
        body = decode_body(_unload_decoder, exchange.request)
        await self._execute(exchange, AdapterOrder(body.lora_name), "removed")

    async def _execute(self, exchange: Exchange, order: AdapterOrder, done: str) -> None:
        if self._orders is None:
            raise Forbidden(
                "LoRA adapters cannot be loaded or unloaded here",
                hint="start with --allow-lora-updates; workers then read any folder of a request",
            )
        await self._orders.execute(order)
        text = f"Success: LoRA adapter '{order.name}' {done} successfully."
        exchange.send(TEXT_CONTENT_TYPE, text.encode())

"""The routes that load and unload LoRA adapters, and adapters among the models."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dynamo.core.adapters import AdapterOrder
from dynamo.services.adapters import AdapterProcessor


class RecordedOrders:
    """Records orders."""

    def __init__(self) -> None:
        self.orders: list[AdapterOrder] = []

    async def execute(self, order: AdapterOrder) -> None:
        self.orders.append(order)


async def post(connect: Any, site: Any, path: str, body: Any) -> Any:
    async with connect(site.port) as connection:
        connection.ask("POST", path, body)
        return await connection.answer()


async def test_orders_have_the_bodies_of_vllm(open_site: Any, connect: Any) -> None:
    orders = RecordedOrders()
    site = await open_site(adapter_orders=orders)
    load = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    answer = await post(connect, site, "/v1/load_lora_adapter", load)
    assert (answer.status, answer.body) == (
        200,
        b"Success: LoRA adapter 'sql' added successfully.",
    )
    await post(connect, site, "/v1/load_lora_adapter", load | {"load_inplace": True})
    await post(connect, site, "/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert orders.orders == [
        AdapterOrder("sql", "/adapters/sql"),
        AdapterOrder("sql", "/adapters/sql", replace=True),
        AdapterOrder("sql"),
    ]
    for wrong in ({"lora_name": "sql"}, load | {"lora_path": ""}, load | {"rank": 4}):
        answer = await post(connect, site, "/v1/load_lora_adapter", wrong)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert len(orders.orders) == 3


async def test_orders_need_the_setting(site: Any, connect: Any) -> None:
    body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    answer = await post(connect, site, "/v1/load_lora_adapter", body)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert "--allow-lora-updates" in answer.error["hint"]


async def test_an_adapter_is_listed_with_its_parent_and_named_in_requests(
    site: Any, connect: Any
) -> None:
    _, base = site.gateway.find("words")
    adapter = replace(
        base,
        names=("sql",),
        processor=AdapterProcessor(base.processor, "sql@1"),
        parent="words",
        root="/adapters/sql",
    )
    site.gateway.set_adapters("words", {"sql": adapter, "spoken": adapter})
    async with connect(site.port) as connection:
        connection.ask("GET", "/v1/models")
        listed = (await connection.answer()).json["data"]
    assert [model["id"] for model in listed] == ["words", "spoken", "sql"]
    assert (listed[2]["parent"], listed[2]["root"]) == ("words", "/adapters/sql")
    assert "parent" not in listed[1]
    for body in (
        {"model": "sql", "prompt": "a b"},
        {"model": "sql", "prompt": "a b", "cache_salt": "s"},
        {"model": "words", "prompt": "a b"},
    ):
        assert (await post(connect, site, "/v1/completions", body)).status == 200
    options = [request.options for request in site.processor.requests]
    assert [option.adapter for option in options] == ["sql@1", "sql@1", ""]
    assert len({option.salt for option in options}) == 3
    site.gateway.set_adapters("words", {})
    answer = await post(connect, site, "/v1/completions", {"model": "sql", "prompt": "a b"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")

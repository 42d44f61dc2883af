"""LoRA adapters in a frontend: those that workers announce, and orders to load and unload."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from dynamo.application import Gateway, ServedModel
from dynamo.core.adapters import ADAPTERS_ENDPOINT, AdapterOrder, adapter_name, encode_order
from dynamo.core.context import Context
from dynamo.core.errors import DeadlineExceeded, InvalidRequest, Unsupported
from dynamo.core.tasks import run_all
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.processor.adapter_processor import AdapterProcessor
from dynamo.scheduling.router.features import instance_adapters
from dynamo.services.model_pipeline import WORKER_COMPONENT

ORDER_TIMEOUT_S = 60.0
ANNOUNCEMENT_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.02


def served_adapters(base: ServedModel, instances: Collection[Instance]) -> dict[str, ServedModel]:
    """Return the adapters of a model's workers by name. If workers have different ones under a
    name, it means the one that most of them have."""
    counts: Counter[tuple[str, str]] = Counter()
    for instance in instances:
        counts.update(instance_adapters(instance).items())
    adapters: dict[str, ServedModel] = {}
    for (adapter, path), _ in counts.most_common():
        name = adapter_name(adapter)
        adapters.setdefault(
            name,
            replace(
                base,
                names=(name,),
                processor=AdapterProcessor(base.processor, adapter),
                parent=base.names[0],
                root=path,
            ),
        )
    return adapters


class AdapterOrders:
    """Sends orders to all workers that can have adapters, and waits until the gateway knows."""

    def __init__(self, runtime: DistributedRuntime, gateway: Gateway) -> None:
        self._runtime = runtime
        self._gateway = gateway
        self._client: Client | None = None

    async def execute(self, order: AdapterOrder) -> None:
        """Have all workers execute the order. Raises the first error of a worker, `Unsupported`
        without workers, and `InvalidRequest` for the name of a model."""
        served = self._gateway.models.get(order.name)
        if order.name in self._gateway.embedding_models or (served and not served.parent):
            raise InvalidRequest(
                f"{order.name!r} is the name of a model and not of an adapter", param="lora_name"
            )
        if self._client is None:
            component = self._runtime.namespace().component(WORKER_COMPONENT)
            self._client = await component.endpoint(ADAPTERS_ENDPOINT).client()
        workers = self._client.instances.values()
        if not workers:
            raise Unsupported(
                "no worker here has LoRA adapters",
                hint="start workers with engine vllm and --allow-lora-updates",
            )
        await run_all(*(self._send(self._client, worker, order) for worker in workers))
        await self._wait_for_announcement(order)

    async def _send(self, client: Client, worker: Instance, order: AdapterOrder) -> None:
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                await client.collect(worker, encode_order(order), Context("adapters"))
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {worker.id} has not answered within {ORDER_TIMEOUT_S:g} s",
                hint="GET /v1/models shows whether the adapter is loaded",
            ) from None

    async def _wait_for_announcement(self, order: AdapterOrder) -> None:
        clock = self._runtime.clock
        deadline = clock.now() + ANNOUNCEMENT_TIMEOUT_S
        while clock.now() < deadline and not self._is_known(order):
            await clock.sleep(POLL_INTERVAL_S)

    def _is_known(self, order: AdapterOrder) -> bool:
        served: Any = self._gateway.models.get(order.name)
        return (
            served is None if not order.path else served is not None and served.root == order.path
        )

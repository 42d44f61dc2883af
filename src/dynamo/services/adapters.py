"""LoRA adapters in a frontend: those that workers announce, and orders to load and unload."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from dynamo.application import Gateway, ServedModel
from dynamo.application.gateway import DEFAULT_MODEL
from dynamo.core.adapters import ADAPTERS_ENDPOINT, AdapterOrder, adapter_name, encode_order
from dynamo.core.context import Context
from dynamo.core.errors import DeadlineExceeded, DynamoError, InvalidRequest, NotFound, Unsupported
from dynamo.core.hashing import adapter_salt
from dynamo.core.tasks import run_all
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.router.features import instance_adapters
from dynamo.services.model_pipeline import WORKER_COMPONENT

T = TypeVar("T")


class AdapterProcessor:
    """Names an adapter by its id in all requests, and gives their blocks a salt of its own. `base`
    has the methods of `ChatProcessor`."""

    def __init__(self, base: Any, adapter: str) -> None:
        self.tokenize, self.detokenize = base.tokenize, base.detokenize
        self.token_strings, self.token_bytes = base.token_strings, base.token_bytes
        self.adapter = adapter

        self.chat = self._wrap(base.chat)
        self.complete = self._wrap(base.complete)
        self.prepare_completion = self._wrap(base.prepare_completion)

    def _wrap(self, method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        """Return a method of the model that answers with the adapter."""
        return lambda request, *rest: method(self._with_adapter(request), *rest)

    def _with_adapter(self, request: Any) -> Any:
        salt = adapter_salt(self.adapter, request.options.salt)
        return replace(request, options=replace(request.options, adapter=self.adapter, salt=salt))


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
        if name == DEFAULT_MODEL:
            continue
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
        """Have all workers execute the order, also where one of them fails. Raises the error of a
        worker, `Unsupported` without workers, and `InvalidRequest` for the name of a model."""
        if self._gateway.is_model_name(order.name):
            raise InvalidRequest(
                f"{order.name!r} is the name of a model and not of an adapter", param="lora_name"
            )
        if self._client is None:
            component = self._runtime.namespace().component(WORKER_COMPONENT)
            self._client = await component.endpoint(ADAPTERS_ENDPOINT).client()
        workers = self._find_workers(self._client.instances.values(), order)
        results = await run_all(*(self._send(self._client, worker, order) for worker in workers))
        adapters = [result for result in results if isinstance(result, str)]
        for result in results:
            unknown = isinstance(result, NotFound) and adapters  # by some of the workers
            if isinstance(result, DynamoError) and not unknown:
                raise result
        await self._wait_for_announcement(order, adapters[0])

    def _find_workers(
        self, instances: Collection[Instance], order: AdapterOrder
    ) -> Sequence[Instance]:
        """Return the workers of the model that an order adapts."""
        own = self._gateway.models.get(order.name)
        served = self._gateway.models.get(order.model) if order.model else own
        model = (served.parent or served.names[0]) if served else order.model
        if own and model and own.parent != model:
            raise InvalidRequest(
                f"{order.name!r} is an adapter of {own.parent!r} already",
                hint="choose another name, or unload it first",
                param="lora_name",
            )
        adapted = {instance.capabilities.get("model", model) for instance in instances}
        if not model and len(adapted) > 1:
            raise InvalidRequest(
                f"workers of several models can have LoRA adapters: {', '.join(sorted(adapted))}",
                hint="name the adapted one in base_model",
                param="base_model",
            )
        workers = [
            instance
            for instance in instances
            if not model or instance.capabilities.get("model", model) == model
        ]
        if not workers:
            raise Unsupported(
                f"no worker {f'of {model}' if model else 'here'} has LoRA adapters",
                hint="vllm has them, with --allow-lora-updates at the start; so has mock",
            )
        return workers

    async def _send(
        self, client: Client, worker: Instance, order: AdapterOrder
    ) -> str | DynamoError:
        """Return the id of the adapter that the worker has now ("": none), or its error."""
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                answers = await client.collect(worker, encode_order(order), Context("adapters"))
        except TimeoutError:
            return DeadlineExceeded(
                f"worker {worker.id} has not answered within {ORDER_TIMEOUT_S:g} s",
                hint="GET /v1/models shows whether the adapter is loaded",
            )
        except DynamoError as error:
            return error
        return b"".join(answers).decode()

    async def _wait_for_announcement(self, order: AdapterOrder, adapter: str) -> None:
        clock = self._runtime.clock
        deadline = clock.now() + ANNOUNCEMENT_TIMEOUT_S
        while clock.now() < deadline and self._known_adapter(order.name) != adapter:
            await clock.sleep(POLL_INTERVAL_S)

    def _known_adapter(self, name: str) -> str:
        """Return the id of the adapter that requests for a name get, "" if there is none."""
        served = self._gateway.models.get(name)
        return served.processor.adapter if served and served.parent else ""

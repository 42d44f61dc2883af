"""The API of NVIDIA Dynamo's bindings: calls, contexts, pydantic requests, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.processes import Open

from dynamo.core.errors import ConfigError, InvalidRequest, Unsupported
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime import DistributedRuntime, dynamo_endpoint, dynamo_worker
from dynamo.runtime.compatibility import CompatClient, CompatContext, CompatRuntime


class Numbers(BaseModel):
    count: int


class Answer(BaseModel):
    number: int


class Backend:
    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def generate(self, request: Any, context: CompatContext) -> AsyncIterator[Any]:
        try:
            for number in range(request):
                yield {"number": number, "id": context.id()}
                await asyncio.sleep(0)
        finally:
            self.ended.set()


@dynamo_endpoint(Numbers, Answer)
async def count(request: Numbers) -> AsyncIterator[Answer]:
    for number in range(request.count):
        yield Answer(number=number)


async def serve(runtime: DistributedRuntime, handler: Any, tasks: BackgroundTasks) -> CompatClient:
    endpoint = CompatRuntime(runtime).namespace("n").component("c").endpoint("e")
    tasks.start(endpoint.serve_endpoint(handler))
    client = await endpoint.client()
    assert await client.wait_for_instances() == client.instance_ids()
    return client


async def test_a_context_reaches_the_handler_and_stops_the_stream(open_runtime: Open) -> None:
    backend, context = Backend(), CompatContext("my-id")
    async with BackgroundTasks() as tasks:
        client = await serve(await open_runtime(), backend.generate, tasks)
        seen = []
        async for item in await client.generate(1 << 30, context=context):
            seen.append(item.data())
            if len(seen) == 3:
                context.stop_generating()
        assert seen == [{"number": number, "id": "my-id"} for number in range(3)]
        async with asyncio.timeout(5):
            await backend.ended.wait()
        assert await context.async_killed_or_stopped()


async def test_pydantic_models_validate_requests_and_answers(open_runtime: Open) -> None:
    async with BackgroundTasks() as tasks:
        client = await serve(await open_runtime(), count, tasks)
        for request in ({"count": 2}, '{"count": 2}'):
            items = [item async for item in await client.random(request, annotated=False)]
            assert items == [{"number": 0}, {"number": 1}]
        with pytest.raises(InvalidRequest, match="Numbers"):
            _ = [item async for item in await client.round_robin({"count": "many"})]


async def test_unknown_parts_are_refused(open_runtime: Open) -> None:
    runtime = CompatRuntime(await open_runtime())
    with pytest.raises(Unsupported, match="etcd_client"):
        runtime.etcd_client()
    with pytest.raises(ConfigError, match="async generator"):
        await runtime.endpoint("n.c.e").serve_endpoint(lambda request: request)
    with pytest.raises(ConfigError, match="static"):
        dynamo_worker(static=True)
    with pytest.raises(ConfigError, match="parentheses"):
        dynamo_worker(lambda runtime: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="constructor"):
        DistributedRuntime(asyncio.get_running_loop(), "etcd", False)  # type: ignore[arg-type]


async def test_a_worker_returns_its_result_and_ends_with_the_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYNAMO_RUNTIME__DISCOVERY", "memory:compatibility")
    monkeypatch.setenv("DYNAMO_RUNTIME__REQUESTS", "memory:")
    monkeypatch.setenv("DYNAMO_RUNTIME__EVENTS", "memory:")

    @dynamo_worker()
    async def add(runtime: CompatRuntime, first: int, second: int) -> int:
        return first + second

    @dynamo_worker()
    async def wait(runtime: CompatRuntime) -> None:
        runtime.shutdown()
        await asyncio.Event().wait()

    assert await add(1, second=2) == 3
    assert await wait() is None

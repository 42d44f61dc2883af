"""Serving and calling over memory planes: components, clients, streams, broken instances, drain."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from tests.unit.processes import Open

from dynamo.communication.discovery import RecordChange
from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import (
    ConfigError,
    InstanceGone,
    InvalidRequest,
    NoWorkers,
    ProtocolError,
    WorkerFailed,
)
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.component import parse_reference
from dynamo.runtime.lifecycle import LifecycleState

REFERENCE = "dynamo.Processor.chat/completions"


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def count_to(request: Any) -> AsyncGenerator[Any, None]:
    for number in range(request):
        yield number


async def client_of(runtime: DistributedRuntime, instances: int = 1) -> Client:
    client = await runtime.endpoint(REFERENCE).client()
    await client.wait_for_instances(instances)
    return client


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_names_are_built_as_in_the_seed_documents(open_runtime: Open) -> None:
    runtime = await open_runtime()
    endpoint = runtime.namespace("myapp").component("worker").endpoint("generate")
    assert endpoint.path == "myapp.worker.generate"
    assert runtime.endpoint(REFERENCE).path == REFERENCE
    assert runtime.namespace().name == "dynamo"
    assert runtime.runtime.id == runtime.instance_id


@pytest.mark.parametrize("text", ["", "a", "a.b", "a.b.", ".b.c", "a..c", "a b.c.d"])
def test_malformed_references_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_reference(text)


def test_an_endpoint_may_hold_slashes_and_dots() -> None:
    assert parse_reference("a.b.chat/v1.0") == ("a", "b", "chat/v1.0")


async def test_a_stream_between_two_runtimes(open_runtime: Open) -> None:
    server, caller = await open_runtime(), await open_runtime()
    await server.endpoint(REFERENCE).serve_items(count_to, capabilities={"weight": 2})
    client = await client_of(caller)
    (instance,) = client.instances.values()
    assert instance.id == server.instance_id
    assert instance.endpoint == "chat/completions"
    assert instance.capabilities == {"weight": 2}
    async with client.round_robin(3) as stream:
        assert await collect(stream) == [0, 1, 2]
    assert await collect(client.random(2)) == [0, 1]
    assert await collect(client.direct(1, instance.id)) == [0]
    assert client.in_flight(instance.id) == 0


async def test_a_coroutine_function_answers_with_one_item(open_runtime: Open) -> None:
    async def double(request: int) -> int:
        return request * 2

    runtime = await open_runtime()
    await runtime.endpoint(REFERENCE).serve_items(double)
    assert await (await client_of(runtime)).generate(21) == 42


async def test_awaiting_a_stream_is_an_error(open_runtime: Open) -> None:
    runtime = await open_runtime()
    await runtime.endpoint(REFERENCE).serve_items(count_to)
    client = await client_of(runtime)
    with pytest.raises(ProtocolError):
        await client.generate(3)
    assert await client.generate(0) is None


async def test_errors_of_the_handler_are_raised_by_the_stream(open_runtime: Open) -> None:
    async def refuse(request: Any) -> AsyncGenerator[Any, None]:
        yield "first"
        raise InvalidRequest("no", hint="do not")

    runtime = await open_runtime()
    await runtime.endpoint(REFERENCE).serve_items(refuse)
    client = await client_of(runtime)
    async with client.generate({}) as stream:
        assert await anext(stream) == "first"
        with pytest.raises(InvalidRequest) as caught:
            await anext(stream)
    assert caught.value.hint == "do not"


async def test_leaving_a_stream_cancels_the_handler(open_runtime: Open) -> None:
    ended = asyncio.Event()

    async def endless(request: Any) -> AsyncGenerator[Any, None]:
        try:
            while True:
                yield b"x" * 1000
        finally:
            ended.set()

    runtime = await open_runtime()
    await runtime.endpoint(REFERENCE).serve_items(endless)
    client = await client_of(runtime)
    async with aclosing(client.generate({})) as stream:
        await anext(stream)
    await ended.wait()
    ended.clear()
    dropped = client.generate({})
    await anext(dropped)
    del dropped
    await ended.wait()
    (instance,) = client.instances
    await until(lambda: client.in_flight(instance) == 0)


async def test_a_slow_consumer_blocks_the_producer(open_runtime: Open) -> None:
    produced = 0

    async def endless(request: Any) -> AsyncGenerator[Any, None]:
        nonlocal produced
        while True:
            produced += 1
            yield b"x" * 10_000

    runtime = await open_runtime()
    await runtime.endpoint(REFERENCE).serve_items(endless)
    client = await client_of(runtime)
    async with client.generate({}) as stream:
        await anext(stream)
        for _ in range(50):
            await asyncio.sleep(0)
        blocked_at = produced
        assert blocked_at < 40
        for _ in range(30):
            await anext(stream)
        await until(lambda: produced > blocked_at)


async def test_calls_without_an_instance_raise(open_runtime: Open) -> None:
    runtime = await open_runtime()
    client = await runtime.endpoint(REFERENCE).client()
    with pytest.raises(NoWorkers, match=f"no instance serves {REFERENCE} now"):
        await client.generate({})
    with pytest.raises(InstanceGone):
        await client.direct({}, "nobody")
    with pytest.raises(NoWorkers, match="no instance serves"):
        await client.wait_for_instances(2, timeout_s=0.001)


async def test_an_endpoint_is_served_once(open_runtime: Open) -> None:
    runtime = await open_runtime()
    await runtime.endpoint(REFERENCE).serve_items(count_to)
    with pytest.raises(ConfigError):
        await runtime.endpoint(REFERENCE).serve_items(count_to)


async def test_the_client_follows_instances(open_runtime: Open) -> None:
    caller, first, second = [await open_runtime() for _ in range(3)]
    changes: list[int] = []
    client = await caller.endpoint(REFERENCE).client()
    unsubscribe = client.on_change(lambda: changes.append(len(client.instances)))
    for server in (first, second):
        await server.endpoint(REFERENCE).serve_items(count_to)
    await client.wait_for_instances(2)
    await first.shutdown(0)
    await until(lambda: len(client.instances) == 1)
    unsubscribe()
    await second.shutdown(0)
    await until(lambda: not client.instances)
    assert changes[-2:] == [2, 1]


async def test_a_filter_selects_instances(open_runtime: Open) -> None:
    caller, *servers = [await open_runtime() for _ in range(3)]
    for server, model in zip(servers, ("a", "b"), strict=True):
        await server.endpoint(REFERENCE).serve_items(count_to, capabilities={"model": model})
    client = await caller.endpoint(REFERENCE).client(lambda seen: seen.capabilities["model"] == "b")
    await client.wait_for_instances()
    assert list(client.instances) == [servers[1].instance_id]


async def test_a_broken_instance_is_withheld_until_announced_again(open_runtime: Open) -> None:
    caller, server, other = [await open_runtime() for _ in range(3)]
    served = await server.endpoint(REFERENCE).serve_items(count_to)
    await other.endpoint(REFERENCE).serve_items(count_to)
    client = await client_of(caller, 2)
    server.requests.abort()  # type: ignore[attr-defined]
    with pytest.raises(InstanceGone):
        await client.direct(1, server.instance_id)
    assert list(client.instances) == [other.instance_id]
    assert {client.pick("round_robin").id for _ in range(4)} == {other.instance_id}
    assert served.instance is not None
    from dynamo.runtime.calls.instances import encode_instance, instance_key

    await server.discovery.put(instance_key(served.instance), encode_instance(served.instance))
    await client.wait_for_instances(2)


async def test_the_error_counts_unavailable_instances_by_reason(open_runtime: Open) -> None:
    caller, *servers = [await open_runtime() for _ in range(4)]
    for server in servers:
        await server.endpoint(REFERENCE).serve_items(count_to)
    client = await client_of(caller, 3)
    with pytest.raises(NoWorkers, match="available now: 3 excluded for this call"):
        client.pick("random", set())
    assert client.view.eject(servers[0].instance_id)
    for server in servers[1:]:
        server.requests.abort()  # type: ignore[attr-defined]
        with pytest.raises(InstanceGone):
            await client.direct(1, server.instance_id)
    with pytest.raises(NoWorkers, match="available now: 2 not answering, 1 unhealthy"):
        await client.generate({})
    with pytest.raises(NoWorkers, match="2 not answering"):
        await client.wait_for_instances(timeout_s=0)


async def test_a_connection_that_breaks_during_a_call_withholds_the_instance(
    open_runtime: Open,
) -> None:
    async def hang(payload: bytes, out: ResponseWriter) -> None:
        await asyncio.Event().wait()

    caller, server = await open_runtime(), await open_runtime()
    await server.endpoint(REFERENCE).serve(hang)
    client = await client_of(caller)
    instance = client.pick("random")
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        call = client.call(instance, b"", Context("r"), lambda _: True)
        task = tasks.start(call)
        await until(lambda: client.in_flight(instance.id) == 1)
        await asyncio.sleep(0)
        server.requests.abort()  # type: ignore[attr-defined]
        with pytest.raises(WorkerFailed):
            await task
    assert not client.instances
    assert client.in_flight(instance.id) == 0


async def test_an_answered_probe_readmits_the_instance(
    open_runtime: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime.calls.instances.PROBE_INTERVAL_S", 0.001)
    caller, server = await open_runtime(), await open_runtime()
    await server.endpoint(REFERENCE).serve_items(count_to)
    client = await client_of(caller)
    client.view.mark_unreachable(server.requests.address)
    assert not client.instances
    await client.wait_for_instances()
    assert await collect(client.direct(2, server.instance_id)) == [0, 1]


async def test_a_drain_waits_for_calls_in_flight(open_runtime: Open) -> None:
    finish = asyncio.Event()

    async def slow(request: Any) -> AsyncGenerator[Any, None]:
        yield 1
        await finish.wait()
        yield 2

    caller, server = await open_runtime(), await open_runtime()
    served = await server.endpoint(REFERENCE).serve_items(slow)
    client = await client_of(caller)
    async with BackgroundTasks() as tasks, client.generate({}) as stream:
        assert await anext(stream) == 1
        shutdown = tasks.start(server.shutdown(60))
        await until(lambda: not client.instances)
        assert served.lifecycle.state is LifecycleState.STOPPING
        finish.set()
        assert await collect(stream) == [2]
        await shutdown
    assert served.lifecycle.state is LifecycleState.DEREGISTERED
    assert server.stopping.cancelled


async def test_lifecycle_states_follow_health(open_runtime: Open) -> None:
    runtime = await open_runtime()
    runtime.health.set_unhealthy("model", "loading")
    served = await runtime.endpoint(REFERENCE).serve_items(count_to)
    assert served.lifecycle.state is LifecycleState.RUNNING
    runtime.health.set_healthy("model")
    assert served.lifecycle.state is runtime.lifecycle.state is LifecycleState.HEALTHY
    runtime.health.set_unhealthy("engine", "stuck")
    assert served.lifecycle.state is LifecycleState.RUNNING


async def test_registrations_return_after_a_lost_lease(open_runtime: Open) -> None:
    caller, server = await open_runtime(), await open_runtime()
    await server.endpoint(REFERENCE).serve_items(count_to)
    client = await client_of(caller)
    server.discovery._inner.lose_lease()  # type: ignore[attr-defined]
    await until(lambda: not client.instances)
    await client.wait_for_instances()


async def test_bad_records_are_skipped(open_runtime: Open) -> None:
    runtime = await open_runtime()
    key = "/dynamo/workers/Processor/chat%2Fcompletions/bad"
    await runtime.discovery.put(key, b'{"component": 1}')
    await runtime.endpoint(REFERENCE).serve_items(count_to)
    client = await client_of(runtime)
    assert list(client.instances) == [runtime.instance_id]
    client.view._apply([RecordChange(key, None)], replace=False)
    registry = await runtime.component_registry.components("dynamo")
    assert [instance.endpoint for instance in registry["Processor"]] == ["chat/completions"]
    assert await runtime.component_registry.components("elsewhere") == {}


async def test_namespaces_are_isolated(open_runtime: Open) -> None:
    runtime = await open_runtime()
    await runtime.endpoint("production.worker.generate").serve_items(count_to)
    client = await runtime.endpoint("development.worker.generate").client()
    assert not client.instances


async def test_a_closed_stream_starts_no_call(open_runtime: Open) -> None:
    requests: list[Any] = []

    async def record(request: Any) -> None:
        requests.append(request)

    runtime = await open_runtime()
    await runtime.endpoint(REFERENCE).serve_items(record)
    client = await client_of(runtime)
    stream = client.generate({})
    await stream.aclose()
    assert await collect(stream) == []
    for _ in range(20):
        await asyncio.sleep(0)
    assert requests == []


async def test_a_closed_client_is_garbage_collected(open_runtime: Open) -> None:
    runtime = await open_runtime()
    for _ in range(3):
        client = await runtime.endpoint(REFERENCE).client()
        dropped = weakref.ref(client)
        await client.close()
        del client
        gc.collect()
        assert dropped() is None

"""The API of NVIDIA Dynamo's bindings: calls, contexts, pydantic requests, metrics, refusals."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from pydantic import BaseModel

from dynamo._core import Client, Endpoint
from dynamo.core.errors import ConfigError, InstanceGone, InvalidRequest, NoWorkers, Unsupported
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime import (
    Context,
    DistributedRuntime,
    UnaryClient,
    dynamo_endpoint,
    dynamo_worker,
    serve_unary_endpoint,
)
from dynamo.runtime.environment import environment_settings, with_dyn_names

MakeClient = Callable[[Any], Awaitable[Client]]
_networks = itertools.count()


@pytest.fixture(autouse=True)
def planes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_RUNTIME__DISCOVERY", f"memory:compatibility-{next(_networks)}")
    monkeypatch.setenv("DYNAMO_RUNTIME__REQUESTS", "tcp://127.0.0.1:0")
    monkeypatch.setenv("DYNAMO_RUNTIME__EVENTS", "memory:")
    monkeypatch.setattr("dynamo.runtime.component.WITHDRAW_GRACE_S", 0.0)


@pytest.fixture
async def runtime() -> AsyncIterator[Any]:
    """The runtime of a program that calls the constructor."""
    runtime: Any = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")  # type: ignore[call-arg, arg-type]
    yield runtime
    runtime.shutdown()
    await runtime.closed.wait()


@pytest.fixture
async def serve(runtime: Any) -> AsyncIterator[MakeClient]:
    """`serve(handler)` serves a handler and returns a client of its endpoint."""
    names = itertools.count()
    async with BackgroundTasks() as tasks:

        async def serve(handler: Any) -> Client:
            endpoint: Endpoint = runtime.namespace("n").component("c").endpoint(f"e{next(names)}")
            tasks.start(endpoint.serve_endpoint(handler))
            client = await endpoint.client()
            assert await client.wait_for_instances() == client.instance_ids()
            return client

        yield serve


class Numbers(BaseModel):
    count: int


class Answer(BaseModel):
    number: int


@dynamo_endpoint(Numbers, Answer)
async def count(request: Numbers) -> AsyncIterator[Answer]:
    for number in range(request.count):
        yield Answer(number=number)


class Counting:
    """A handler that counts on and records how it ends."""

    def __init__(self) -> None:
        self.context: Any = None
        self.ended = asyncio.Event()
        self.end: BaseException | None = None
        self.saw_stop = False

    async def generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.context = context
        try:
            for number in itertools.count():
                if context.is_stopped():
                    self.saw_stop = True
                    if request == "leave":
                        return
                yield number
                await asyncio.sleep(0)
        except BaseException as error:
            self.end = error
            raise
        finally:
            self.ended.set()


async def wait_for(event: asyncio.Event) -> None:
    async with asyncio.timeout(5):
        await event.wait()


@pytest.mark.parametrize("request_text", ["leave", "go on"])
async def test_a_handler_sees_that_its_caller_stopped(serve: MakeClient, request_text: str) -> None:
    handler, context = Counting(), Context("my-id", {"user": "a"})
    client = await serve(handler.generate)
    seen = []
    async for item in await client.generate(request_text, context=context):
        seen.append(item.data())
        if len(seen) == 3:
            context.stop_generating()
    assert seen == [0, 1, 2]
    assert context.is_stopped()
    assert not context.is_killed()
    await wait_for(handler.ended)
    assert handler.saw_stop
    assert isinstance(handler.end, GeneratorExit if request_text == "go on" else type(None))
    assert (handler.context.id(), handler.context.metadata) == ("my-id", {"user": "a"})
    assert await handler.context.async_killed_or_stopped()


async def test_a_handler_sees_that_its_caller_has_left(serve: MakeClient) -> None:
    handler = Counting()
    client = await serve(handler.generate)
    stream = await client.round_robin("leave")
    assert (await anext(stream)).data() == 0
    del stream
    await wait_for(handler.ended)
    assert handler.context.is_killed()


async def test_a_stop_passes_through_a_service_between(serve: MakeClient) -> None:
    handler = Counting()
    backend = await serve(handler.generate)

    async def forward(request: Any, context: Context) -> AsyncIterator[Any]:
        async for item in await backend.generate(request, context=context):
            yield item.data()

    context = Context()
    stream = await (await serve(forward)).generate("leave", annotated=False, context=context)
    assert await anext(stream) == 0
    context.stop_generating()
    assert [item async for item in stream] == []
    await wait_for(handler.ended)
    assert handler.context.id() == context.id()


async def test_a_detached_context_goes_on(serve: MakeClient) -> None:
    context = Context("outer", {"user": "a"})
    other = context.detached("outer:part")
    context.stop_generating()
    assert (other.id(), other.is_stopped(), other.metadata) == ("outer:part", False, {"user": "a"})
    waiting = other.async_killed_or_stopped()
    assert not waiting.done()
    other.stop_generating()
    assert await waiting
    client = await serve(Counting().generate)
    assert [item async for item in await client.generate("leave", context=other)] == []


async def test_a_call_that_ended_is_not_stopped(serve: MakeClient) -> None:
    contexts = []

    async def answer(request: Any, *, context: Context) -> AsyncIterator[Any]:
        contexts.append(context)
        yield request

    client = await serve(answer)
    assert [item async for item in await client.generate("x", annotated=False)] == ["x"]
    assert not contexts[0].is_stopped()


async def test_a_call_begins_before_its_items_are_read(serve: MakeClient) -> None:
    begun = asyncio.Event()

    async def answer(request: Any) -> AsyncIterator[Any]:
        begun.set()
        yield request

    stream = await (await serve(answer)).random("x", annotated=False)
    await wait_for(begun)
    assert [item async for item in stream] == ["x"]


async def test_pydantic_models_validate_requests_and_answers(serve: MakeClient) -> None:
    client = await serve(count)
    for request in ({"count": 2}, '{"count": 2}'):
        items = [item async for item in await client.random(request, annotated=False)]
        assert items == [{"number": 0}, {"number": 1}]
    with pytest.raises(InvalidRequest, match="Numbers"):
        _ = [item async for item in await client.round_robin({"count": "many"})]


async def test_a_value_error_of_a_handler_is_one_for_its_caller(serve: MakeClient) -> None:
    async def refuse(request: Any) -> AsyncIterator[Any]:
        yield 1
        raise ValueError(f"{request} is not allowed")

    stream = await (await serve(refuse)).generate("w")
    assert (await anext(stream)).data() == 1
    with pytest.raises(ValueError, match="w is not allowed"):
        await anext(stream)


async def test_instances_have_numbers(serve: MakeClient, runtime: Any) -> None:
    client = await serve(count)
    (number,) = client.instance_ids()
    assert number == runtime.endpoint("dyn://n.c.e0").connection_id()
    stream = await client.direct({"count": 1}, number, annotated=False)
    assert [item async for item in stream] == [{"number": 0}]
    with pytest.raises(InstanceGone, match="7"):
        await client.direct({"count": 1}, 7)
    lonely = await runtime.endpoint("n.c.nobody").client()
    with pytest.raises(NoWorkers):
        await lonely.generate("x")


async def test_metrics_of_an_endpoint_are_scraped(runtime: Any) -> None:
    metrics = runtime.endpoint("n.c.e").metrics
    updates = metrics.create_intcounter("updates", "Updates", [("method", "callback")])
    usage = metrics.create_gaugevec("usage", "Usage", ["gpu"])
    metrics.create_histogram("delay", "Delay", buckets=[1.0]).observe(0.5)
    metrics.register_callback(updates.inc)
    metrics.register_callback(lambda: 1 / 0)
    metrics.register_prometheus_expfmt_callback(lambda: "foreign 1\n")
    usage.set(0.5, {"gpu": "0"})
    usage.add({"gpu": "0"}, 1)
    text = runtime.native.metrics.render()
    labels = 'dynamo_namespace="n",dynamo_component="c",dynamo_endpoint="e"'
    assert f'dynamo_component_updates{{{labels},method="callback"}} 1\n' in text
    assert f'dynamo_component_usage{{gpu="0",{labels}}} 1.5\n' in text
    assert f'dynamo_component_delay_bucket{{{labels},le="1.0"}} 1\n' in text
    assert text.endswith("\nforeign 1\n")
    assert updates.name == updates.name() == "dynamo_component_updates"
    assert updates.const_labels()["method"] == "callback"
    assert (updates.get(), usage.get({"gpu": "0"}), usage.variable_labels()) == (1, 1.5, ["gpu"])
    with pytest.raises(ValueError, match="gpu"):
        usage.inc()


async def test_unary_endpoints_answer_once(runtime: Any) -> None:
    async def double(request: int, *, context: Context) -> str:
        return f"{context.id()}: {2 * request}"

    endpoint = runtime.endpoint("n.c.unary")
    async with BackgroundTasks() as tasks:
        tasks.start(serve_unary_endpoint(endpoint, double))
        client = await endpoint.client()
        await client.wait_for_instances()
        assert await UnaryClient(client).complete(2, context=Context("me")) == "me: 4"


async def test_a_unary_client_refuses_several_items(serve: MakeClient) -> None:
    with pytest.raises(RuntimeError, match="2 items"):
        await UnaryClient(await serve(count)).complete({"count": 2})


async def serve_nothing(request: Any) -> None:
    """A coroutine function, which is no handler."""


async def test_a_handler_may_return_any_async_iterator(serve: MakeClient) -> None:
    class Items:
        def __init__(self, request: list[int]) -> None:
            self._items = iter(request)

        def __aiter__(self) -> Items:
            return self

        async def __anext__(self) -> int:
            for item in self._items:
                return item
            raise StopAsyncIteration

    client = await serve(Items)
    assert [item async for item in await client.generate([1, 2], annotated=False)] == [1, 2]
    client = await serve(lambda request: request)
    with pytest.raises(ConfigError, match="no async iterator"):
        await anext(await client.generate("x"))


async def test_unknown_parts_are_refused(runtime: Any) -> None:
    with pytest.raises(Unsupported, match="etcd_client"):
        runtime.etcd_client()
    assert not hasattr(runtime.endpoint("n.c.e"), "serve_bidirectional_endpoint")
    with pytest.raises(Unsupported, match="create_summary"):
        runtime.endpoint("n.c.e").metrics.create_summary("a", "b")
    with pytest.raises(ConfigError, match="async generator"):
        await runtime.endpoint("n.c.e").serve_endpoint(serve_nothing)
    with pytest.raises(ConfigError, match="static"):
        dynamo_worker(static=True)
    with pytest.raises(ConfigError, match="static"):
        DistributedRuntime(asyncio.get_running_loop(), "etcd", True)  # type: ignore[call-arg, arg-type]
    with pytest.raises(ConfigError, match="parentheses"):
        dynamo_worker(lambda runtime: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="constructor"):
        DistributedRuntime("etcd", "tcp", "")  # type: ignore[call-arg, arg-type]


async def test_a_program_that_serves_drains_at_sigterm(serve: MakeClient, runtime: Any) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    going_on = asyncio.Event()

    async def answer(request: Any) -> AsyncIterator[Any]:
        yield 1
        await going_on.wait()
        yield 2

    stream = await (await serve(answer)).generate("x", annotated=False)
    assert await anext(stream) == 1
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    signal.raise_signal(signal.SIGTERM)
    await runtime.native.stopping.wait()
    going_on.set()
    assert [item async for item in stream] == [2]
    await runtime.closed.wait()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_token_is_cancelled_alone_or_with_the_runtime(runtime: Any) -> None:
    alone, child = runtime.child_token(), runtime.child_token()
    alone.cancel()
    await alone.cancelled()
    assert not runtime.native.stopping.cancelled
    runtime.shutdown()
    await child.cancelled()


async def test_a_worker_returns_its_result_and_ends_with_the_runtime() -> None:
    @dynamo_worker(True)
    async def add(runtime: Any, first: int, second: int) -> int:
        return first + second

    @dynamo_worker()
    async def wait(runtime: Any) -> None:
        runtime.shutdown()
        await asyncio.Event().wait()

    @dynamo_worker()
    async def serve(runtime: Any) -> str:
        asyncio.get_running_loop().call_later(0, runtime.shutdown)
        await runtime.endpoint("n.c.e").serve_endpoint(count)
        await asyncio.sleep(0)
        return "cleaned up"

    assert await add(1, second=2) == 3
    assert await wait() is None
    assert await serve() == "cleaned up"


async def test_a_worker_raises_why_its_planes_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_RUNTIME__REQUESTS", "pigeon:")

    @dynamo_worker()
    async def wait(runtime: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ConfigError, match="pigeon"):
        await wait()


@pytest.mark.parametrize(
    ("environ", "arguments", "expected"),
    [
        ({}, ("etcd", "False"), {}),
        ({"DYN_FILE_KV": "/kv"}, (), {"DYNAMO_RUNTIME__DISCOVERY": "file:/kv"}),
        ({"DYN_FILE_KV": "/kv"}, ("file",), {"DYNAMO_RUNTIME__DISCOVERY": "file:/kv"}),
        ({"ETCD_ENDPOINTS": "a:1"}, (), {"DYNAMO_ETCD_ENDPOINTS": "a:1"}),
        ({"ETCD_ENDPOINTS": "a:1", "DYN_DISCOVERY_BACKEND": "file"}, ("etcd",), {}),
        ({}, ("mem",), {"DYNAMO_RUNTIME__DISCOVERY": "memory:dynamo"}),
        ({}, ("kubernetes",), {"DYNAMO_RUNTIME__DISCOVERY": "kubernetes:"}),
        ({"NATS_SERVER": "nats://a:1"}, ("", "tcp"), {}),
        ({"NATS_SERVER": "nats://a:1"}, ("", "nats"), {"DYNAMO_NATS_URL": "nats://a:1"}),
        ({"DYN_EVENT_PLANE": "nats"}, (), {"DYNAMO_RUNTIME__EVENTS": "nats://127.0.0.1:4222"}),
        ({"DYN_SYSTEM_PORT": "-1"}, (), {}),
        ({"DYN_SYSTEM_PORT": "81"}, (), {"DYNAMO_RUNTIME__STATUS_PORT": "81"}),
    ],
)
def test_variables_of_nvidia_dynamo_are_read(
    environ: dict[str, str], arguments: tuple[str, ...], expected: dict[str, str]
) -> None:
    assert with_dyn_names(environ, *arguments) == {**expected, **environ}


def test_own_variables_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE", "theirs")
    assert environment_settings().runtime.namespace == "theirs"
    monkeypatch.setenv("DYNAMO_RUNTIME__NAMESPACE", "ours")
    assert environment_settings().runtime.namespace == "ours"
    with pytest.raises(ConfigError, match="zookeeper"):
        with_dyn_names({}, "zookeeper")

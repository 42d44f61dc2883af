"""Deadlines of nested calls, and metrics of services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import DeadlineExceeded, InvalidRequest
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.runtime import DistributedRuntime
from dynamo.sdk import depends, dynamo_endpoint, service, time_left
from dynamo.sdk import request_context as request_module
from dynamo.sdk.handle import connect_service
from dynamo.sdk.request_context import set_current_request
from dynamo.sdk.serving import start_service
from dynamo.testing import local


@service()
class Inner:
    @dynamo_endpoint()
    async def left(self) -> float | None:
        return time_left()

    @dynamo_endpoint()
    async def sleep(self) -> None:
        await asyncio.Event().wait()

    @dynamo_endpoint()
    async def impatient(self) -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


@service()
class Outer:
    inner = depends(Inner)

    @dynamo_endpoint()
    async def both(self) -> list[float | None]:
        return [time_left(), await self.inner.left()]

    @dynamo_endpoint()
    async def sleep(self) -> None:
        await self.inner.sleep()

    @dynamo_endpoint()
    async def numbers(self, request: int) -> AsyncIterator[int]:
        for number in range(request):
            yield number

    @dynamo_endpoint()
    async def refuse(self) -> None:
        raise InvalidRequest("no")


@pytest.fixture(autouse=True)
def reset_current_request() -> Iterator[None]:
    yield
    request_module._current_request.set(None)


async def test_a_nested_call_gets_the_time_left() -> None:
    async with local(Outer) as graph:
        assert await graph[Outer].both() == [None, None]
        set_current_request(Context("r", timeout_s=50.0), SystemClock.now)
        outer, inner = await graph[Outer].both()

        assert outer is not None
        assert inner is not None
        assert 0 < inner < outer < 50


async def test_a_call_ends_at_its_deadline_and_no_call_starts_after_it() -> None:
    async with local(Outer) as graph:
        set_current_request(Context("r", timeout_s=0.02), SystemClock.now)
        with pytest.raises(DeadlineExceeded):
            await graph[Outer].sleep()
        set_current_request(Context("r", timeout_s=0.0), SystemClock.now)
        with pytest.raises(DeadlineExceeded, match="no time is left"):
            await graph[Outer].both()


async def test_a_timeout_inside_a_handler_is_not_the_deadline() -> None:
    async with local(Inner) as graph:
        set_current_request(Context("r", timeout_s=50.0), SystemClock.now)
        with pytest.raises(Exception, match="the handler of") as caught:
            await graph[Inner].impatient()
        assert not isinstance(caught.value, DeadlineExceeded)


async def test_calls_are_counted_by_endpoint_and_code() -> None:
    planes = RuntimeSettings(discovery="memory:counted", requests="memory:", events="memory:")
    async with await DistributedRuntime.create(Settings(runtime=planes)) as runtime:
        await start_service(Inner, runtime)
        await start_service(Outer, runtime)
        outer: Any = await connect_service(Outer, runtime)
        assert [number async for number in outer.numbers(3)] == [0, 1, 2]
        await outer.both()
        with pytest.raises(InvalidRequest):
            await outer.refuse()
        stream = outer.numbers(1_000_000)
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0.01)
        lines = runtime.metrics.render().splitlines()

    for line in (
        'dynamo_service_requests_total{service="Outer",endpoint="numbers",code="ok"} 1',
        'dynamo_service_requests_total{service="Outer",endpoint="numbers",code="cancelled"} 1',
        'dynamo_service_requests_total{service="Outer",endpoint="refuse",code="invalid_request"} 1',
        'dynamo_service_requests_total{service="Inner",endpoint="left",code="ok"} 1',
        'dynamo_service_request_duration_seconds_count{service="Outer",endpoint="both"} 1',
        'dynamo_service_inflight_requests{service="Outer"} 0',
    ):
        assert line in lines, line

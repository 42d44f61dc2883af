"""Services that call each other, inside one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from dynamo.core.errors import ConfigError, InvalidRequest, Unsupported
from dynamo.sdk import depends, dynamo_endpoint, on_start, on_stop, request_id, service
from dynamo.testing import local


class Question(msgspec.Struct):
    text: str
    times: int = 1


class Answer(msgspec.Struct):
    text: str
    length: int


class EchoConfig(msgspec.Struct):
    mark: str = "!"
    limit: int = 3


@service(dynamo={"namespace": "production"})
class Echo:
    config: EchoConfig

    def __init__(self) -> None:
        self.events: list[str] = ["created"]
        self.produced = 0

    @on_start
    async def warm(self) -> None:
        self.events.append("started")

    @on_stop
    def leave(self) -> None:
        self.events.append("stopped")

    @dynamo_endpoint()
    async def plain(self, request: Any) -> Any:
        return {"got": request, "id": request_id()}

    @dynamo_endpoint("typed/say")
    async def say(self, request: Question) -> Answer:
        text = request.text * request.times + self.config.mark
        return Answer(text, len(text))

    @dynamo_endpoint()
    async def count(self, request: dict[str, int]) -> AsyncIterator[int]:
        for number in range(request["to"]):
            self.produced += 1
            yield number

    @dynamo_endpoint()
    async def ping(self) -> str:
        return "pong"

    @dynamo_endpoint()
    async def fail(self, request: Any) -> Any:
        raise InvalidRequest("not this", param="x")


@service(dynamo={"namespace": "production"})
class Caller:
    echo = depends(Echo)

    @dynamo_endpoint()
    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await self.echo.say(Question(**request))
        return {"text": answer.text, "mine": request_id(), "its": (await self.echo.plain(1))["id"]}

    @dynamo_endpoint()
    async def sum(self, request: dict[str, Any]) -> int:
        return sum([number async for number in self.echo.count(request)])

    @dynamo_endpoint()
    async def relay_failure(self) -> Any:
        return await self.echo.fail({})


async def test_a_service_calls_another_once_and_in_a_stream() -> None:
    async with local(Caller) as graph:
        answer = await graph[Caller].ask({"text": "ab", "times": 2})

        assert answer["text"] == "abab!"
        assert answer["mine"] == answer["its"] != ""
        assert await graph[Caller].sum({"to": 1000}) == 499_500


async def test_endpoints_take_plain_values_or_no_request() -> None:
    async with local(Echo) as graph:
        assert (await graph[Echo].plain({"a": [1, None]}))["got"] == {"a": [1, None]}
        assert await graph[Echo].ping() == "pong"
        assert await graph[Echo].say(Question("x")) == Answer("x!", 2)


async def test_errors_keep_their_type_and_wrong_requests_are_refused() -> None:
    async with local(Caller) as graph:
        with pytest.raises(InvalidRequest, match="not this"):
            await graph[Caller].relay_failure()
        with pytest.raises(InvalidRequest, match=r"Echo.say: .*text"):
            await graph[Echo].say({"text": 1})  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match="did you mean 'plain'"):
            await graph[Echo].plan({})  # type: ignore[attr-defined]


async def test_a_service_gets_its_configuration_and_runs_its_hooks() -> None:
    async with local(Caller, config={"Echo": {"mark": "?", "limit": "7"}}) as graph:
        (echo,) = graph.instances(Echo)
        assert echo.config == EchoConfig("?", 7)
        assert echo.events == ["created", "started"]
    assert echo.events == ["created", "started", "stopped"]


async def test_replicas_share_the_calls() -> None:
    async with local(Caller, replicas=2) as graph:
        for _ in range(4):
            await graph[Echo].plain(None)
            await graph[Caller].sum({"to": 1})
        assert [echo.produced for echo in graph.instances(Echo)] == [2, 2]


async def test_a_slow_reader_blocks_the_producer() -> None:
    async with local(Echo) as graph:
        (echo,) = graph.instances(Echo)
        stream = graph[Echo].count({"to": 1_000_000})
        assert await anext(stream) == 0
        for _ in range(100):
            await asyncio.sleep(0)
        produced = echo.produced
        for _ in range(100):
            await asyncio.sleep(0)
        assert echo.produced == produced < 70_000
        await stream.aclose()


async def test_a_fake_replaces_a_service() -> None:
    class FakeEcho:
        async def say(self, request: Question) -> Answer:
            return Answer("fake", 4)

        async def plain(self, request: Any) -> Any:
            return {"id": "f"}

        async def count(self, request: Any) -> AsyncIterator[int]:
            yield 5

    async with local(Caller, fakes={Echo: FakeEcho()}) as graph:
        assert (await graph[Caller].ask({"text": "x"}))["text"] == "fake"
        assert await graph[Caller].sum({}) == 5
        with pytest.raises(Unsupported, match="FakeEcho has no 'ping'"):
            await graph[Echo].ping()


async def test_endpoints_can_be_called_as_plain_methods() -> None:
    echo = Echo()
    assert await echo.plain(3) == {"got": 3, "id": ""}
    with pytest.raises(ConfigError, match="not connected"):
        _ = Caller().echo


class Order(BaseModel):
    item: str
    count: int = 1


@service()
class Orders:
    @dynamo_endpoint()
    async def place(self, request: Order) -> Order:
        return Order(item=request.item, count=request.count + 1)


async def test_pydantic_models_cross_the_wire() -> None:
    async with local(Orders) as graph:
        assert await graph[Orders].place(Order(item="tea")) == Order(item="tea", count=2)
        with pytest.raises(InvalidRequest, match="count"):
            await graph[Orders].place({"item": "tea", "count": "many"})

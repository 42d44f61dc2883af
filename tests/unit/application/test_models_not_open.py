"""Models that are not open: how they are listed, and opened for a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.application import app
from dynamo.application.exchange import Exchange
from dynamo.application.generation import replies


async def get(connect: Any, site: Any, path: str, method: str = "GET", body: Any = None) -> Any:
    async with connect(site.port) as connection:
        connection.ask(method, path, body)
        return await connection.answer(bodiless=method == "HEAD")


async def test_models_and_adapters_that_are_not_open_yet_are_listed(
    site: Any, connect: Any
) -> None:
    loading = {"value": "loading", "reason": "its supervisor starts a worker"}
    site.gateway.set_desired({"first": ("one",), "words": ()}, {"sql": "first"})
    site.gateway.describe = lambda: {"first": {"status": loading}}
    listed = (await get(connect, site, "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == ["words", "first", "one", "sql"]
    assert [model.get("status") for model in listed] == [None, loading, loading, loading]
    assert [model.get("parent", "") for model in listed] == ["", "", "", "first"]
    assert (await get(connect, site, "/v1/models/one")).json == listed[2]
    assert (await get(connect, site, "/v1/models/none")).status == 404


async def test_a_model_on_demand_is_listed_and_opened_for_a_request(
    site: Any, connect: Any
) -> None:
    waits: list[tuple[str, float]] = []

    @asynccontextmanager
    async def load(model: str, timeout_s: float | None) -> AsyncIterator[None]:
        waits.append((model, timeout_s or 0.0))
        if model == "late":
            site.add("late")
        site.gateway.set_unloaded({"broken": False} if model == "late" else {})
        yield

    site.gateway.set_desired({"words": ("spoken",), "late": ("soon",), "broken": ()})
    site.gateway.describe = lambda: {"late": {"status": {"value": "unloaded"}}}
    site.gateway.set_unloaded({"late": False, "broken": False})
    site.gateway.load = load
    listed = (await get(connect, site, "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == ["words", "spoken", "late", "soon", "broken"]
    soon = (await get(connect, site, "/v1/models/soon")).json
    assert (soon["root"], soon["status"]) == ("late", {"value": "unloaded"})
    assert waits == [], "nothing is loaded for a look"
    chat = {"model": "soon", "messages": [{"role": "user", "content": "x"}]}
    answer = await get(connect, site, "/v1/chat/completions", "POST", chat)
    assert (answer.status, answer.json["model"]) == (200, "soon")
    ((model, timeout_s),) = waits
    assert (model, timeout_s) == ("late", pytest.approx(300, abs=1))
    assert site.application.generation.concurrency.running == 0
    answer = await get(connect, site, "/v1/completions", "POST", {"model": "broken", "prompt": "x"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_gets_its_head_while_its_model_is_loaded_for_long(
    site: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    silent = asyncio.Event()

    def keep_waiting(exchange: Exchange, _: float) -> None:
        replies.keep_waiting(exchange, replies.KEEP_ALIVE_S)
        silent.set()

    @asynccontextmanager
    async def load(model: str, _: float | None) -> AsyncIterator[None]:
        await silent.wait()
        site.add(model)
        site.gateway.set_unloaded({})
        yield

    monkeypatch.setattr(app, "keep_waiting", keep_waiting)
    site.gateway.set_desired({"words": (), "late": ()})
    site.gateway.set_unloaded({"late": False})
    site.gateway.load = load
    messages = [{"role": "user", "content": "x"}]
    prompt = {"input": "x"} if "responses" in path else {"messages": messages, "max_tokens": 9}
    body = {"model": "late", **prompt, "stream": True}
    answer = await get(connect, site, path, "POST", body)
    assert answer.status == 200
    comment, whole = answer.body.split(b"\n", 1)
    assert comment.startswith(b": ")
    again = await get(connect, site, path, "POST", body)
    assert whole.count(b"data: ") == again.body.count(b"data: ") > 1

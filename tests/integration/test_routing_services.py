"""Routing by what workers hold, with its frontends and routers in one process on memory planes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime import DistributedRuntime
from dynamo.scheduling.router.policies import remote
from dynamo.scheduling.router.policies.remote_messages import CHOOSE_ENDPOINT
from dynamo.services.frontend import FrontendService
from dynamo.services.router import RouterService
from dynamo.services.worker import WorkerService

SERVICES = {"frontend": FrontendService, "router": RouterService, "worker": WorkerService}
WORDS = "the quick brown fox jumps over a lazy dog while workers serve tokens of many models "


class House:
    """Runtimes that share memory planes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.opened: list[DistributedRuntime] = []

    async def open(self, role: str, **router: Any) -> DistributedRuntime:
        settings = replace(self.settings, router=replace(self.settings.router, **router))
        runtime = await DistributedRuntime.create(settings, role=role)
        self.opened.append(runtime)
        service: Any = SERVICES[role]()
        await service.attach(runtime)
        runtime.service = service  # type: ignore[attr-defined]
        if role == "frontend":
            while not runtime.health.healthy:
                await asyncio.sleep(0.005)
        return runtime


Open = Callable[..., Awaitable[DistributedRuntime]]


@pytest.fixture
async def house(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[House]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    base = Settings()
    one = House(
        replace(
            base,
            runtime=replace(
                base.runtime,
                discovery=f"memory:{tmp_path}",
                requests="memory:",
                events=f"memory:{tmp_path}",
            ),
            server=replace(base.server, http_port=0),
            engine=replace(base.engine, kind="mock", speedup_ratio=1000.0),
            model=replace(base.model, path=str(tiny_model), names=("tiny",)),
            router=replace(base.router, mode="kv", port=0),
        )
    )
    yield one
    for runtime in one.opened:
        await runtime.shutdown(0)


async def ask(
    url: str, path: str, body: Any = None, name: str = ""
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of one request on a connection of its own."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"x-request-id: {name}\r\n" if name else ""
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read(-1)
    finally:
        writer.close()
    first, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = first.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    told = json.loads(content) if "json" in headers.get("content-type", "") else content.decode()
    return int(status.split()[1]), headers, told


def chat(text: str = WORDS * 4, tokens: int = 3, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "max_tokens": tokens, "messages": messages, **more}


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


async def test_a_request_is_explained_by_whichever_frontend_is_asked(house: House) -> None:
    for _ in range(2):
        await house.open("worker")
    one, other = await house.open("frontend"), await house.open("frontend")
    status, headers, answer = await ask(
        one.public_address, "/v1/chat/completions", chat(), name="mine"
    )
    assert status == 200
    status, _, told = await ask(other.public_address, "/router/explain/mine")
    (decision,) = told["decisions"]
    assert status == 200
    assert decision["worker"] == headers["x-dynamo-worker"]
    assert decision["router"] == one.name
    assert len(decision["costs"]) == decision["candidates"] == 2
    assert set(decision["costs"][0]["terms"]) >= {"queue", "prefill"}
    outcome = decision["outcome"]
    assert outcome["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert outcome["output_tokens"] == 3

    _, headers, answer = await ask(other.public_address, "/v1/chat/completions", chat(), "again")
    assert headers["x-dynamo-worker"] == decision["worker"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    _, _, report = await ask(one.public_address, "/router/report?seconds=60")
    assert report["raw_data_summary"]["decisions"] == 2
    assert report["aggregated_metrics"]["cache_hit"]["reachable"] > 0.3
    _, _, latest = await ask(one.public_address, "/router/explain")
    assert len(latest["decisions"]) == 2
    status, headers, page = await ask(one.public_address, "/router/view")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "Router view" in page
    _, _, metrics = await ask(one.public_address, "/metrics")
    assert 'dynamo_router_alert_ratio{alert="routing_loss"} 0' in metrics

    status, _, error = await ask(one.public_address, "/router/explain/nobody")
    assert (status, error["error"]["code"]) == (404, "not_found")
    status, _, error = await ask(one.public_address, "/router/report?seconds=x")
    assert (status, error["error"]["param"]) == (400, "seconds")


async def test_a_mode_that_looks_at_nothing_says_so(house: House) -> None:
    await house.open("worker")
    frontend = await house.open("frontend", mode="round_robin")
    status, _, error = await ask(frontend.public_address, "/router/explain/x")
    assert (status, error["error"]["hint"]) == (404, "start with --router-mode kv")


@pytest.mark.parametrize("role", ["frontend", "router"])
async def test_a_selector_that_is_not_there_is_told_at_the_start(house: House, role: str) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        await house.open(role, selector="nobody")


async def test_the_adaptive_mode_shows_capacities(house: House) -> None:
    for _ in range(2):
        await house.open("worker")
    frontend = await house.open("frontend", mode="adaptive")
    for _ in range(3):
        assert (await ask(frontend.public_address, "/v1/chat/completions", chat(), "a"))[0] == 200
    _, _, told = await ask(frontend.public_address, "/router/explain/a")
    (decision,) = told["decisions"]
    assert decision["mode"] == "adaptive"
    assert set(decision["costs"][0]["terms"]) == {"base", "available", "effective"}


async def test_a_router_of_its_own_decides_and_is_done_without(house: House) -> None:
    for _ in range(2):
        await house.open("worker")
    router = await house.open("router", replicas=1)
    frontend = await house.open("frontend", replicas=1)
    await until(lambda: router.health.healthy)
    url = frontend.public_address
    before = (await ask(url, "/health"))[2]
    assert (before["routing"], before["routers"]["tiny"]) == (
        {},
        {router.instance_id: "not asked yet"},
    )
    status, headers, _ = await ask(url, "/v1/chat/completions", chat(), "first")
    assert status == 200
    _, _, health = await ask(url, "/health")
    assert health["routers"] == {"tiny": {router.instance_id: "answers"}}
    assert health["routing"] == {"tiny": {headers["x-dynamo-worker"]: "exact"}}
    _, _, told = await ask(router.public_address, "/router/explain/first")
    (decision,) = told["decisions"]
    assert (decision["router"], decision["mode"]) == (router.name, "predicted")
    assert decision["worker"] == headers["x-dynamo-worker"]
    assert len(decision["costs"]) == 2
    assert decision["outcome"]["output_tokens"] == 3
    assert (await ask(router.public_address, "/health"))[2]["workers"] == {"tiny": 2}
    model = router.service._models["tiny"]  # type: ignore[attr-defined]
    assert model.peer_requests.reserved_count == 0
    await until(lambda: not any(worker.active for worker in model.policy.worker_states.workers))

    await router.shutdown(0)
    house.opened.remove(router)
    status, _, _ = await ask(url, "/v1/chat/completions", chat(), "alone")
    _, _, told = await ask(url, "/router/explain/alone")
    assert (status, told["decisions"][0]["mode"]) == (200, "least_loaded")
    _, _, health = await ask(url, "/health")
    assert (health["routing"], health["routers"]) == ({}, {})

    long = asyncio.ensure_future(
        ask(url, "/v1/chat/completions", chat(tokens=2000, ignore_eos=True), "long")
    )
    late = await house.open("router", replicas=1)
    await until(lambda: late.health.healthy)
    model = late.service._models["tiny"]  # type: ignore[attr-defined]
    workers = model.policy.worker_states.workers
    await until(lambda: sum(len(worker.active) for worker in workers) == 1)
    long.cancel()
    await until(lambda: not any(worker.active for worker in workers))
    await ask(url, "/v1/chat/completions", chat(), "back")
    _, _, told = await ask(url, "/router/explain/back")
    assert told["decisions"][0]["router"] == late.name


async def test_a_router_of_its_own_chooses_no_worker_that_frontends_refuse(house: House) -> None:
    await house.open("worker")
    router = await house.open("router", replicas=1)
    frontend = await house.open("frontend", replicas=1)
    house.settings = replace(house.settings, engine=replace(house.settings.engine, block_size=32))
    refused = (await house.open("worker")).instance_id
    for runtime in (frontend, router):
        while True:
            _, _, told = await ask(runtime.public_address, "/health")
            if told["refused_workers"]:
                break
        assert told["refused_workers"] == {refused: "tiny: block tokens 32 instead of 16"}
        assert told["workers"] == {"tiny": 1}
    for number in range(4):
        body = chat(f"{number} {WORDS * 4}")
        assert (await ask(frontend.public_address, "/v1/chat/completions", body))[0] == 200
    _, _, metrics = await ask(router.public_address, "/metrics")
    assert "dynamo_router_decisions_total 4" in metrics


async def test_a_frozen_router_costs_a_moment_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ACCEPT_TIMEOUT_S", 0.02)
    asked = []

    async def frozen(payload: bytes, out: ResponseWriter) -> None:
        asked.append(payload)
        await asyncio.Event().wait()

    await house.open("worker")
    runtime = await DistributedRuntime.create(house.settings, role="router")
    house.opened.append(runtime)
    await runtime.namespace().component("Router").endpoint(CHOOSE_ENDPOINT).serve(frozen)
    frontend = await house.open("frontend", replicas=1)
    for _ in range(3):
        assert (await ask(frontend.public_address, "/v1/chat/completions", chat()))[0] == 200
    assert len(asked) == 1
    _, _, metrics = await ask(frontend.public_address, "/metrics")
    assert "dynamo_router_unasked_total 3" in metrics
    _, _, health = await ask(frontend.public_address, "/health")
    assert health["routers"] == {"tiny": {runtime.instance_id: "away"}}


async def test_a_new_router_gets_one_question_until_it_has_answered(house: House) -> None:
    await house.open("worker")
    router = await house.open("router", replicas=1)
    frontend = await house.open("frontend", replicas=1)
    await until(lambda: router.health.healthy)
    url = frontend.public_address
    assert (await ask(url, "/v1/chat/completions", chat()))[0] == 200
    asked = []
    started = asyncio.Event()

    async def slow(payload: bytes, out: ResponseWriter) -> None:
        asked.append(payload)
        await started.wait()

    runtime = await DistributedRuntime.create(house.settings, role="router")
    house.opened.append(runtime)
    await runtime.namespace().component("Router").endpoint(CHOOSE_ENDPOINT).serve(slow)
    tasks = [
        asyncio.ensure_future(ask(url, "/v1/chat/completions", chat(f"{number}")))
        for number in range(12)
    ]
    answers = await asyncio.gather(*tasks)
    started.set()
    assert [status for status, _, _ in answers] == [200] * 12
    assert len(asked) == 1


async def test_past_the_bound_a_client_is_told_when_to_come_again(house: House) -> None:
    house.settings = replace(
        house.settings,
        engine=replace(house.settings.engine, speedup_ratio=1.0, max_num_batched_tokens=64),
    )
    await house.open("worker")
    frontend = await house.open("frontend", queue_threshold=0.5, queue_bound=2)
    url = frontend.public_address
    asked = [
        asyncio.ensure_future(ask(url, "/v1/chat/completions", chat(f"{number} {WORDS * 8}", 1)))
        for number in range(12)
    ]
    answers = await asyncio.gather(*asked)
    refused = [(headers, told) for status, headers, told in answers if status == 503]
    assert refused
    assert all(told["error"]["code"] == "overloaded" for _, told in refused)
    assert all(int(headers["retry-after"]) >= 1 for headers, _ in refused)
    assert sum(status == 200 for status, _, _ in answers) == 12 - len(refused) >= 3

"""Routing services in one process on memory planes: explanations, separate routers, refusals."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from tests.support.fake_openai_server import served

from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime import DistributedRuntime
from dynamo.scheduling.router.policies import remote
from dynamo.scheduling.router.policies.remote_messages import CHOOSE_ENDPOINT
from dynamo.services.frontend import FrontendService
from dynamo.services.observing import observer as observing
from dynamo.services.observing import publisher
from dynamo.services.observing.observer import ObserverService
from dynamo.services.router import RouterService
from dynamo.services.worker import WorkerService

SERVICES = {
    "frontend": FrontendService,
    "router": RouterService,
    "worker": WorkerService,
    "observer": ObserverService,
}
WORDS = "the quick brown fox jumps over a lazy dog while workers serve tokens of many models "


class Cluster:
    """Runtimes of services that share memory planes."""

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
async def cluster(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(publisher, "INTERVAL_S", 0.02)
    base = Settings()
    services = Cluster(
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
    yield services
    for runtime in services.opened:
        await runtime.shutdown(0)


async def ask(
    url: str, path: str, body: Any = None, name: str = ""
) -> tuple[int, dict[str, str], Any]:
    """Send a request on a new connection; return status, headers and the decoded body."""
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
    decoded = json.loads(content) if "json" in headers.get("content-type", "") else content.decode()
    return int(status.split()[1]), headers, decoded


def chat(text: str = WORDS * 4, tokens: int = 3, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "max_tokens": tokens, "messages": messages, **more}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def explain(observer: DistributedRuntime, name: str) -> Any:
    """Return the only decision for a request, once its story has come."""
    while True:
        status, _, body = await ask(observer.public_address, f"/router/explain/{name}")
        if status == 200:
            (decision,) = body["decisions"]
            return decision


async def test_the_observer_explains_the_requests_of_all_frontends(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.open("worker")
    observer = await cluster.open("observer")
    first, second = await cluster.open("frontend"), await cluster.open("frontend")
    status, headers, answer = await ask(
        first.public_address, "/v1/chat/completions", chat(), name="mine"
    )
    assert status == 200
    decision = await explain(observer, "mine")
    assert decision["worker"] == headers["x-dynamo-worker"]
    assert decision["router"] == first.instance_id
    assert len(decision["costs"]) == decision["candidates"] == 2
    assert set(decision["costs"][0]["terms"]) >= {"queue", "prefill"}
    outcome = decision["outcome"]
    assert outcome["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert outcome["output_tokens"] == 3

    _, headers, answer = await ask(second.public_address, "/v1/chat/completions", chat(), "again")
    assert headers["x-dynamo-worker"] == decision["worker"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    assert (await explain(observer, "again"))["router"] == second.instance_id
    status, headers, _ = await ask(first.public_address, "/router/report?seconds=60")
    assert status == 307
    assert headers["location"] == f"{observer.public_address}/router/report?seconds=60"
    _, _, report = await ask(observer.public_address, "/router/report?seconds=60")
    assert report["raw_data_summary"]["decisions"] == 2
    assert report["aggregated_metrics"]["cache_hit"]["reachable"] > 0.3
    _, _, latest = await ask(observer.public_address, "/router/explain")
    assert len(latest["decisions"]) == 2
    _, _, metrics = await ask(observer.public_address, "/metrics")
    assert 'dynamo_router_alert_ratio{alert="routing_loss"} 0' in metrics

    status, _, error = await ask(observer.public_address, "/router/explain/unknown")
    assert (status, error["error"]["code"]) == (404, "not_found")
    status, _, error = await ask(observer.public_address, "/router/report?seconds=x")
    assert (status, error["error"]["param"]) == (400, "seconds")


async def test_two_observers_have_all_stories_and_one_exports_traces(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing, "BOOKS_INTERVAL_S", 0.02)
    async with served() as collector:
        collector.answers["/v1/traces"] = (200, "", b"")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        await cluster.open("worker")
        observers = [await cluster.open("observer") for _ in range(2)]
        frontend = await cluster.open("frontend")
        services: list[Any] = [each.service for each in observers]  # type: ignore[attr-defined]
        while all(service._is_first for service in services):
            await asyncio.sleep(0.01)
        assert (await ask(frontend.public_address, "/v1/chat/completions", chat(), "mine"))[
            0
        ] == 200
        for each in observers:
            _, _, shown = await ask(each.public_address, "/requests?id=mine")
            while not shown["requests"]:
                _, _, shown = await ask(each.public_address, "/requests?id=mine")
        exported = Counter[str]()
        while exported.total() < 1:
            for each in observers:
                _, _, text = await ask(each.public_address, "/metrics")
                name = "dynamo_traces_exported_total "
                exported[each.instance_id] = int(text.partition(f"\n{name}")[2].split()[0])
        assert sorted(exported.values()) == [0, 1]
        assert collector.requests == ["/v1/traces"]


async def test_requests_notice_no_observer(cluster: Cluster) -> None:
    await cluster.open("worker")
    frontend = await cluster.open("frontend", mode="round_robin")
    assert (await ask(frontend.public_address, "/v1/chat/completions", chat()))[0] == 200
    status, _, error = await ask(frontend.public_address, "/router/report")
    assert (status, "--no-observer" in error["error"]["hint"]) == (404, True)


@pytest.mark.parametrize("mode", ["round_robin", "adaptive"])
async def test_every_mode_has_a_timeline(cluster: Cluster, mode: str) -> None:
    worker = await cluster.open("worker")
    frontend = await cluster.open("frontend", mode=mode)
    observer = await cluster.open("observer")
    url, timeline = frontend.public_address, {}
    request = asyncio.ensure_future(
        ask(url, "/v1/chat/completions", chat(tokens=100_000, ignore_eos=True))
    )
    while not timeline.get("at"):
        _, _, timeline = await ask(observer.public_address, "/router/timeline")
    name = worker.instance_id
    assert list(timeline["workers"]) == [name]
    _, _, part = await ask(
        observer.public_address, f"/router/timeline?columns=running,sent&worker={name}"
    )
    assert set(part["workers"][name]) == {"view", "running", "sent"}
    _, _, none = await ask(observer.public_address, "/router/timeline?worker=another")
    assert none["workers"] == {}
    request.cancel()


@pytest.mark.parametrize("role", ["frontend", "router"])
async def test_an_unknown_selector_fails_at_the_start(cluster: Cluster, role: str) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        await cluster.open(role, selector="unknown")


async def test_the_adaptive_mode_explains_capacities(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.open("worker")
    observer = await cluster.open("observer")
    frontend = await cluster.open("frontend", mode="adaptive")
    for _ in range(3):
        assert (await ask(frontend.public_address, "/v1/chat/completions", chat(), "a"))[0] == 200
    decision = await explain(observer, "a")
    assert decision["mode"] == "adaptive"
    assert set(decision["costs"][0]["terms"]) == {"base", "available", "effective"}


async def test_a_separate_router_decides_and_is_replaceable(cluster: Cluster) -> None:
    engine = replace(cluster.settings.engine, speedup_ratio=1.0)  # "long" outlives a busy moment
    cluster.settings = replace(cluster.settings, engine=engine)
    for _ in range(2):
        await cluster.open("worker")
    observer = await cluster.open("observer")
    router = await cluster.open("router", replicas=1)
    frontend = await cluster.open("frontend", replicas=1)
    await until(lambda: router.health.healthy)
    url = frontend.public_address
    before = (await ask(url, "/health"))[2]
    assert before["routing"] == {}
    assert before["routers"]["tiny"] == {router.instance_id: "not asked yet"}
    status, headers, _ = await ask(url, "/v1/chat/completions", chat(), "first")
    assert status == 200
    _, _, health = await ask(url, "/health")
    assert health["routers"] == {"tiny": {router.instance_id: "answers"}}
    assert health["routing"] == {"tiny": {headers["x-dynamo-worker"]: "exact"}}
    await explain(observer, "first")
    await until(lambda: len(observer.service._observer._choices) == 1)  # type: ignore[attr-defined]
    decision = await explain(observer, "first")
    assert (decision["router"], decision["mode"]) == (router.instance_id, "predicted")
    assert decision["worker"] == headers["x-dynamo-worker"]
    assert len(decision["costs"]) == 2
    assert decision["outcome"]["output_tokens"] == 3
    assert (await ask(router.public_address, "/health"))[2]["workers"] == {"tiny": 2}
    model = router.service._models["tiny"]  # type: ignore[attr-defined]
    assert not model.ledger.requests
    await until(lambda: not any(worker.active for worker in model.ledger.workers.workers))

    await router.shutdown(0)
    cluster.opened.remove(router)
    status, _, _ = await ask(url, "/v1/chat/completions", chat(), "alone")
    assert (status, (await explain(observer, "alone"))["mode"]) == (200, "least_loaded")
    _, _, health = await ask(url, "/health")
    assert (health["routing"], health["routers"]) == ({}, {})

    long_request = asyncio.ensure_future(
        ask(url, "/v1/chat/completions", chat(tokens=2000, ignore_eos=True), "long")
    )
    new_router = await cluster.open("router", replicas=1)
    await until(lambda: new_router.health.healthy)
    model = new_router.service._models["tiny"]  # type: ignore[attr-defined]
    workers = model.ledger.workers.workers
    await until(lambda: sum(len(worker.active) for worker in workers) == 1)
    long_request.cancel()
    await until(lambda: not any(worker.active for worker in workers))
    await ask(url, "/v1/chat/completions", chat(), "back")
    await until(lambda: len(observer.service._observer._choices) == 2)  # type: ignore[attr-defined]
    assert (await explain(observer, "back"))["router"] == new_router.instance_id


async def test_a_separate_router_excludes_incompatible_workers(cluster: Cluster) -> None:
    await cluster.open("worker")
    router = await cluster.open("router", replicas=1)
    frontend = await cluster.open("frontend", replicas=1)
    cluster.settings = replace(
        cluster.settings, engine=replace(cluster.settings.engine, block_size=32)
    )
    incompatible = (await cluster.open("worker")).instance_id
    for runtime in (frontend, router):
        while True:
            _, _, body = await ask(runtime.public_address, "/health")
            if body["refused_workers"]:
                break
        assert body["refused_workers"] == {incompatible: "tiny: block tokens 32 instead of 16"}
        assert body["workers"] == {"tiny": 1}
    for number in range(4):
        request = chat(f"{number} {WORDS * 4}")
        assert (await ask(frontend.public_address, "/v1/chat/completions", request))[0] == 200
    _, _, metrics = await ask(router.public_address, "/metrics")
    assert 'dynamo_router_decisions_total{model="tiny"} 4' in metrics


async def test_a_frozen_router_delays_only_one_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ACCEPT_TIMEOUT_S", 0.02)
    queries = []

    async def frozen(payload: bytes, out: ResponseWriter) -> None:
        queries.append(payload)
        await asyncio.Event().wait()

    await cluster.open("worker")
    runtime = await DistributedRuntime.create(cluster.settings, role="router")
    cluster.opened.append(runtime)
    await runtime.namespace().component("Router").endpoint(CHOOSE_ENDPOINT).serve(frozen)
    frontend = await cluster.open("frontend", replicas=1)
    for _ in range(3):
        assert (await ask(frontend.public_address, "/v1/chat/completions", chat()))[0] == 200
    assert len(queries) == 1
    _, _, metrics = await ask(frontend.public_address, "/metrics")
    assert 'dynamo_router_unasked_total{model="tiny"} 3' in metrics
    _, _, health = await ask(frontend.public_address, "/health")
    assert health["routers"] == {"tiny": {runtime.instance_id: "away"}}


async def test_a_new_router_gets_one_query_until_its_first_answer(cluster: Cluster) -> None:
    await cluster.open("worker")
    router = await cluster.open("router", replicas=1)
    frontend = await cluster.open("frontend", replicas=1)
    await until(lambda: router.health.healthy)
    url = frontend.public_address
    assert (await ask(url, "/v1/chat/completions", chat()))[0] == 200
    queries = []
    started = asyncio.Event()

    async def slow(payload: bytes, out: ResponseWriter) -> None:
        queries.append(payload)
        await started.wait()

    runtime = await DistributedRuntime.create(cluster.settings, role="router")
    cluster.opened.append(runtime)
    await runtime.namespace().component("Router").endpoint(CHOOSE_ENDPOINT).serve(slow)
    tasks = [
        asyncio.ensure_future(ask(url, "/v1/chat/completions", chat(f"{number}")))
        for number in range(12)
    ]
    answers = await asyncio.gather(*tasks)
    started.set()
    assert [status for status, _, _ in answers] == [200] * 12
    assert len(queries) == 1


async def test_requests_beyond_the_queue_bound_get_retry_after(cluster: Cluster) -> None:
    cluster.settings = replace(
        cluster.settings,
        engine=replace(cluster.settings.engine, speedup_ratio=1.0, max_num_batched_tokens=64),
    )
    await cluster.open("worker")
    frontend = await cluster.open("frontend", queue_threshold=0.5, queue_bound=2)
    url = frontend.public_address
    requests = [
        asyncio.ensure_future(ask(url, "/v1/chat/completions", chat(f"{number} {WORDS * 8}", 1)))
        for number in range(12)
    ]
    answers = await asyncio.gather(*requests)
    refused = [(headers, body) for status, headers, body in answers if status == 503]
    assert refused
    assert all(body["error"]["code"] == "overloaded" for _, body in refused)
    assert all(int(headers["retry-after"]) >= 1 for headers, _ in refused)
    assert sum(status == 200 for status, _, _ in answers) == 12 - len(refused) >= 3

"""Frontend and worker services in one process, on memory planes and one HTTP port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from dynamo.communication.http.client import HttpClient
from dynamo.core.settings import Settings
from dynamo.runtime import DistributedRuntime
from dynamo.services.frontend import FrontendService
from dynamo.services.worker import WorkerService

Open = Callable[[str], Awaitable[DistributedRuntime]]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a fox"}], "max_tokens": 5}


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    base = Settings()
    planes = replace(
        base.runtime, discovery=f"memory:{tmp_path}", requests="memory:", events="memory:"
    )
    return replace(
        base,
        runtime=replace(planes, drain_s=5.0),
        server=replace(base.server, http_port=0),
        engine=replace(base.engine, kind="mock", speedup_ratio=1000.0),
        model=replace(base.model, path=str(tiny_model), names=("tiny",)),
    )


@pytest.fixture
async def open_service(settings: Settings) -> AsyncIterator[Open]:
    opened: list[DistributedRuntime] = []

    async def attach(role: str) -> DistributedRuntime:
        runtime = await DistributedRuntime.create(settings, role=role)
        opened.append(runtime)
        await {"frontend": FrontendService, "worker": WorkerService}[role]().attach(runtime)
        return runtime

    yield attach
    for runtime in opened:
        await runtime.shutdown(0)


async def ask(url: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request on a new connection; return status and JSON."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read(-1)
    writer.close()
    first, _, content = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(content)


async def until_status(url: str, expected: int) -> Any:
    while (answer := await ask(url, "/health"))[0] != expected:
        await asyncio.sleep(0.005)
    return answer[1]


async def test_a_frontend_serves_after_the_first_worker(open_service: Open) -> None:
    frontend = await open_service("frontend")
    url = frontend.public_address
    status, health = await ask(url, "/health")
    assert (status, list(health["reasons"])) == (503, ["models"])
    assert "worker" in health["reasons"]["models"]
    assert not frontend.health.healthy
    status, error = await ask(url, "/v1/chat/completions", CHAT)
    assert (status, error["error"]["code"]) == (503, "model_not_ready")
    await open_service("worker")
    health = await until_status(url, 200)
    assert health["workers"] == {"tiny": 1}
    assert frontend.health.healthy
    status, answer = await ask(url, "/v1/chat/completions", CHAT)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 5


async def test_a_model_without_workers_is_unhealthy_and_recovers(open_service: Open) -> None:
    frontend, worker = await open_service("frontend"), await open_service("worker")
    url = frontend.public_address
    await until_status(url, 200)
    await worker.shutdown(0)
    health = await until_status(url, 503)
    assert health["reasons"] == {"tiny": "no worker of this model is reachable"}
    assert health["workers"] == {"tiny": 0}
    status, error = await ask(url, "/v1/chat/completions", CHAT)
    assert (status, error["error"]["code"]) == (503, "no_workers")
    await open_service("worker")
    await until_status(url, 200)
    assert (await ask(url, "/v1/chat/completions", CHAT))[0] == 200


async def test_the_tokenizer_comes_from_a_worker(
    open_service: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dynamo.services.model_store.store.find_file", lambda ref: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    frontend, _ = await open_service("frontend"), await open_service("worker")
    await until_status(frontend.public_address, 200)
    folders = list((tmp_path / "cache" / "dynamo" / "files").iterdir())
    assert len(folders) == 1
    assert [path.name for path in folders[0].iterdir()] == ["tokenizer.json"]


async def test_metrics_count_the_workers(open_service: Open) -> None:
    frontend, _ = await open_service("frontend"), await open_service("worker")
    await until_status(frontend.public_address, 200)
    with closing(HttpClient(frontend.public_address, {}, None)) as client:
        answer = await client.send("GET", "/metrics")
    assert b'dynamo_frontend_workers{model="tiny"} 1' in answer.body


async def test_shutdown_waits_for_a_stream(open_service: Open, settings: Settings) -> None:
    frontend, _ = await open_service("frontend"), await open_service("worker")
    url = frontend.public_address
    await until_status(url, 200)
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    data = json.dumps(CHAT | {"stream": True, "max_tokens": 300, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    first = await reader.readuntil(b"data: ")
    await frontend.shutdown(30)
    rest = await reader.read(-1)
    writer.close()
    assert first.startswith(b"HTTP/1.1 200")
    assert rest.rstrip().endswith(b"data: [DONE]\n\n\r\n0")

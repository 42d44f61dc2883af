"""The runtime between real processes: `file:` discovery, `tcp:` planes, kills and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.errors import WorkerFailed
from dynamo.core.settings import Settings
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.deployment import Deployment, deployment_of

SERVER = """
import asyncio, sys
from msgspec.structs import replace
from dynamo.core.settings import Settings
from dynamo.runtime.processes.process import run_process

async def count(request):
    for number in range(request["to"]):
        yield number
        await asyncio.sleep(request.get("every_s", 0))

async def main(runtime):
    await runtime.endpoint("dynamo.Counter.count").serve_items(count)

settings = Settings()
runtime = replace(settings.runtime, deployment="test", drain_s=10.0)
sys.exit(run_process(main, replace(settings, runtime=runtime), "worker", "counter"))
"""

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    settings = Settings()
    return replace(settings, runtime=replace(settings.runtime, deployment="test"))


@pytest.fixture
def deployment(settings: Settings) -> Deployment:
    return deployment_of(settings)


@pytest.fixture
def start(settings: Settings) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", SERVER]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[Client]:
    async with await DistributedRuntime.create(settings) as runtime:
        yield await runtime.endpoint("dynamo.Counter.count").client()


async def until(condition: Callable[[], Any]) -> Any:
    while not (value := condition()):
        await asyncio.sleep(0.01)
    return value


async def test_calls_spread_over_two_processes(start: Start, client: Client) -> None:
    start(), start()
    await client.wait_for_instances(2)
    for _ in range(4):
        async with client.generate({"to": 3}) as stream:
            assert [item async for item in stream] == [0, 1, 2]


async def test_a_killed_process_is_withheld_and_then_removed(start: Start, client: Client) -> None:
    process = start()
    await client.wait_for_instances()
    (instance,) = client.instances
    async with client.generate({"to": 1000, "every_s": 0.01}) as stream:
        assert await anext(stream) == 0
        process.kill()
        with pytest.raises(WorkerFailed):
            async for _ in stream:
                pass
    assert not client.instances
    await until(lambda: instance not in client.view._known)
    start()
    await client.wait_for_instances()
    assert instance not in client.instances


async def test_sigterm_waits_for_calls_in_flight(
    start: Start, client: Client, deployment: Deployment
) -> None:
    process = start()
    await client.wait_for_instances()
    async with client.generate({"to": 60, "every_s": 0.01}) as stream:
        assert await anext(stream) == 0
        process.terminate()
        await until(
            lambda: [record.state for record in deployment.live_processes()] == ["draining"]
        )
        assert [item async for item in stream] == list(range(1, 60))
    assert await asyncio.to_thread(process.wait) == 0
    assert not client.instances
    assert deployment.live_processes() == []


async def test_a_second_signal_ends_the_process_at_once(
    start: Start, client: Client, deployment: Deployment
) -> None:
    process = start()
    await client.wait_for_instances()
    async with client.generate({"to": 10_000, "every_s": 0.01}) as stream:
        await anext(stream)
        process.terminate()
        await until(
            lambda: [record.state for record in deployment.live_processes()] == ["draining"]
        )
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait) == 1


async def test_the_record_and_the_status_port(start: Start, deployment: Deployment) -> None:
    process = start()
    await until(lambda: [record.state for record in deployment.live_processes()] == ["ready"])
    (record,) = deployment.live_processes()
    assert (record.role, record.name, record.pid) == ("worker", "counter", process.pid)
    assert record.address.startswith("tcp://127.0.0.1:")

    def read(path: str) -> str:
        with urllib.request.urlopen(record.status_url + path, timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    health = json.loads(await asyncio.to_thread(read, "/health"))
    assert health["status"] == "healthy"
    assert health["endpoints"] == {"dynamo.Counter.count": "healthy"}
    assert json.loads(await asyncio.to_thread(read, "/live")) == {"status": "live"}
    assert "process_cpu_seconds_total" in await asyncio.to_thread(read, "/metrics")
    folder = deployment.folder.stat()
    assert folder.st_mode & 0o777 == 0o700


def test_an_error_that_no_restart_can_fix_ends_the_deployment(
    tiny_model: Path, runtime_environ: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "dynamo", "run", "out=mock", str(tiny_model)]
    ended = subprocess.run(
        [*command, "--http-port", "0", "--request-plane", "bogus:"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | runtime_environ,
    )
    assert ended.returncode == 2
    assert "unknown request backend 'bogus'" in ended.stderr
    assert "Traceback" not in ended.stderr

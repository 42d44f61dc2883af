"""The load of a pod, by the status ports of its processes."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.communication.http import HttpLimits, HttpServer, Request, Response
from dynamo.core.clock import SystemClock
from dynamo.services.operator import pod_load

SUPERVISOR = "# TYPE dynamo_supervisor_processes gauge\ndynamo_supervisor_processes 1\n"
WORKER = 'dynamo_worker_running_requests{model="m"} 3\ndynamo_worker_running_requests 1\n'


async def test_requests_of_all_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, ports = [], []
    for text in (SUPERVISOR, WORKER, WORKER):

        def answer(request: Request, response: Response, text: str = text) -> Any:
            del request

            async def send() -> None:
                response.send(200, (("content-type", "text/plain"),), text.encode())

            return send()

        server = HttpServer(answer, HttpLimits(), SystemClock())
        ports.append(await server.start("127.0.0.1", 0))
        servers.append(server)
    pod = {"status": {"podIP": "127.0.0.1"}}
    monkeypatch.setattr(pod_load, "PORTS", ports)
    assert await pod_load.read_pod_load(pod) == 8
    monkeypatch.setattr(pod_load, "PORTS", ports[:1])
    assert await pod_load.read_pod_load(pod) is None
    for server in servers:
        await server.stop(0.0)
    assert await pod_load.read_pod_load(pod) is None
    assert await pod_load.read_pod_load({"status": {}}) is None

"""Separate router and frontend processes: decisions, kills, `dynamo explain`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.conftest import until

EXAMPLES = Path(__file__).parents[2] / "examples"
MOCK = ("--engine.kind", "mock", "--speedup-ratio", "20")
TEXT = "the quick brown fox jumps over a lazy dog while workers serve tokens of many models " * 3


def body(number: int, tokens: int = 4) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{TEXT} {number}"}]
    return {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, "messages": messages}


def of_role(deployment: Any, role: str) -> list[dict[str, Any]]:
    return [p for p in deployment.processes() if p["role"] == role]


def inflight(deployment: Any) -> int:
    """The number of requests in flight in the frontends."""
    lines = deployment.get("/metrics")[1].splitlines()
    values = [line for line in lines if line.startswith("dynamo_frontend_inflight_requests ")]
    return int(values[0].split()[1]) if values else 0


def dynamo(deployment: Any, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo", *map(str, arguments), "--url", deployment.url]
    return subprocess.run(command, capture_output=True, text=True, env=deployment.environ)


def test_a_graph_survives_the_death_of_each_router(
    start: Any, tiny_model: Path, tmp_path: Path
) -> None:
    serve = start(
        *("graphs.agg_router:Frontend", "-f", "configs/agg_router.yaml", *MOCK),
        *("--model-path", tiny_model, "--model-name", "tiny"),
        *("--Router.port=0", "--Router.workers=2", "--observer"),
        command="serve",
        folder=EXAMPLES / "llm",
    )
    routers = of_role(serve, "router")
    assert len(routers) == 2
    statuses = []
    for number in range(30):
        if number == 10:
            os.kill(routers[0]["pid"], signal.SIGKILL)
        if number == 20:
            os.kill(routers[1]["pid"], signal.SIGKILL)
        statuses.append(serve.post("/v1/chat/completions", body(number))[0])
    assert statuses == [200] * 30

    end = time.monotonic() + 30
    while sum(p["state"] == "ready" for p in of_role(serve, "router")) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)

    def explain_next() -> tuple[str, str]:
        """Ask, and explain it. The observer misses what a router decides just after its start."""
        status, answer = serve.post("/v1/chat/completions", body(99))
        assert status == 200
        request_id = answer["id"].removeprefix("chatcmpl-")
        time.sleep(1.5)  # stories are sent once a second
        return request_id, dynamo(serve, "explain", request_id).stdout

    request_id, explained = until(
        lambda: ", by Router-" in (decision := explain_next())[1] and decision
    )
    assert "BLOCKS HELD" in explained
    assert dynamo(serve, "explain", request_id, "--json").stdout.startswith("[{")
    assert dynamo(serve, "explain", "unknown").returncode == 1

    report = dynamo(serve, "router", "report")
    assert "requests     3" in report.stdout, report.stderr
    view = dynamo(serve, "router", "view", "--json")
    assert len(json.loads(view.stdout)["workers"]) == 2, view.stderr
    assert serve.stop(signal.SIGTERM) == 0


def test_the_death_of_a_frontend_does_not_affect_clients_of_others(
    start: Any, tiny_model: Path
) -> None:
    run = start(
        *("out=mock", tiny_model, "--model-name", "tiny", "--workers", "2"),
        *("--http-workers", "3", "--router-mode", "kv", "--speedup-ratio", "1"),
    )
    while len([p for p in of_role(run, "frontend") if p["state"] == "ready"]) < 3:
        time.sleep(0.05)
    statuses: list[int] = []

    def ask(number: int) -> None:
        try:
            statuses.append(run.post("/v1/chat/completions", body(number, tokens=150))[0])
        except (OSError, json.JSONDecodeError):
            statuses.append(0)

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for client in clients:
        client.start()
    while inflight(run) < len(clients):
        time.sleep(0.02)
    os.kill(of_role(run, "frontend")[0]["pid"], signal.SIGKILL)
    for client in clients:
        client.join()
    assert statuses.count(200) >= len(clients) / 3
    assert set(statuses) <= {200, 0}
    log = run.log.read_text()
    assert "Traceback" not in log
    assert run.post("/v1/chat/completions", body(1))[0] == 200

"""Two "hosts" on this machine, each with a state folder of its own, that meet over real servers:
frontends on one, workers on the other, as separate commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment, until

from dynamo.testing.servers import EtcdProcess, NatsProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "llm"
BODY = {"model": "default", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with EtcdProcess() as server:
        yield server


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsProcess]:
    with NatsProcess() as server:
        yield server


Host = Callable[..., Deployment]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """`host(name, command, *words, **environment)` starts a command there; it is stopped after
    the test."""
    running: list[Deployment] = []

    def begin(name: str, command: str, *words: object, **environ: str) -> Deployment:
        home = tmp_path / name
        home.mkdir(mode=0o700, exist_ok=True)
        told = [str(word) for word in words]
        one = Deployment(told, home, {"XDG_RUNTIME_DIR": str(home), **environ}, command, EXAMPLE)
        running.append(one)
        return one

    yield begin
    for one in reversed(running):
        one.stop()


def health(frontend: Deployment) -> dict[str, Any]:
    status, text = frontend.get("/health")
    return json.loads(text) if status else {}


def away(frontend: Deployment) -> set[str]:
    return set(health(frontend)["planes"].get("away", ()))


def workers(frontend: Deployment) -> int:
    return sum(health(frontend).get("workers", {}).values())


def ask(frontend: Deployment, times: int = 1) -> set[int]:
    return {frontend.post("/v1/chat/completions", BODY)[0] for _ in range(times)}


def test_frontend_and_workers_meet_over_etcd_and_nats_and_outlive_both(
    etcd: EtcdProcess, nats: NatsProcess, tiny_model: Path, host: Host
) -> None:
    servers = {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_NATS_URL": nats.url,
        "DYNAMO_RUNTIME__NAMESPACE": "outlives",
    }
    far = host("b", "run", "in=none", "out=mock", tiny_model, "--workers", "2", **servers)
    front = host("a", "run", "--workers", "0", **servers)
    front.wait_ready()
    until(lambda: workers(front) == 2)
    planes = health(front)["planes"]
    assert (planes["discovery"], planes["events"]) == (etcd.url, nats.url)
    assert ask(front, 4) == {200}

    words = ["call", "Processor.chat/answer", json.dumps(BODY)]
    command = [sys.executable, "-m", "dynamo", *words]
    called = subprocess.run(command, capture_output=True, text=True, env=front.environ)
    assert json.loads(called.stdout)["finish_reason"] == "length", called.stderr

    etcd.kill()
    until(lambda: away(front) == {"discovery"})
    assert ask(front, 4) == {200}
    nats.kill()
    until(lambda: away(front) == {"discovery", "requests", "events"})
    assert ask(front, 4) == {200}
    assert workers(front) == 2
    assert front.get("/health")[0] == 200

    etcd.delete_data()
    etcd.start()
    nats.start()
    until(lambda: not away(front), 5)
    assert ask(front, 4) == {200}
    until(lambda: listed(etcd, "/outlives/workers/worker/generate/") == 2, 5)
    assert workers(front) == 2
    assert far.process.poll() is None


def test_graphs_parts_meet_over_tcp_with_a_secret(
    etcd: EtcdProcess, tiny_model: Path, host: Host
) -> None:
    servers = {
        "DYNAMO_DISCOVERY__ETCD__ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_RUNTIME__PLANE_HOST": "0.0.0.0",
        "DYNAMO_RUNTIME__PUBLIC_HOST": "127.0.0.1",
        "DYNAMO_RUNTIME__NAMESPACE": "secret",
    }
    ours = servers | {"DYNAMO_SECURITY__SECRET": "a secret of this deployment"}
    graph = ["-f", "configs/agg.yaml", "--only", "--engine.kind", "mock"]
    model = ["--model-path", tiny_model, "--deployment", "workers"]
    host("b", "serve", "graphs.agg:AggregatedWorker", *graph, *model, **ours)
    front = host("a", "serve", "graphs.agg:Frontend", *graph, "--deployment", "front", **ours)
    front.wait_ready()
    assert ask(front, 2) == {200}

    theirs = servers | {"DYNAMO_SECURITY__SECRET": "a secret of somebody else"}
    stranger = host("c", "serve", "graphs.agg:Frontend", *graph, "--deployment", "c", **theirs)
    until(lambda: stranger.get("/health")[0] not in {0, 200})
    assert ask(front, 2) == {200}


def test_a_dead_hosts_workers_are_left_at_once_and_forgotten_in_time(
    etcd: EtcdProcess, nats: NatsProcess, tiny_model: Path, host: Host
) -> None:
    servers = {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_NATS_URL": nats.url,
        "DYNAMO_RUNTIME__NAMESPACE": "dies",
        "DYNAMO_RUNTIME__LEASE_TTL": "2",
    }
    one = host("b", "run", "in=none", "out=mock", tiny_model, "--deployment", "b", **servers)
    host("c", "run", "in=none", "out=mock", tiny_model, "--deployment", "c", **servers)
    front = host("a", "run", "--workers", "0", **servers)
    front.wait_ready()
    until(lambda: workers(front) == 2)
    one.process.send_signal(signal.SIGKILL)
    assert ask(front, 6) == {200}
    until(lambda: workers(front) == 1)
    until(lambda: listed(etcd, "/dies/workers/worker/generate/") == 1, 10)
    assert ask(front, 2) == {200}


def test_who_died_while_etcd_was_away_is_gone_when_it_is_back(
    etcd: EtcdProcess, tiny_model: Path, host: Host
) -> None:
    found = {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_RUNTIME__NAMESPACE": "buried",
    }
    whole = host("a", "run", "out=mock", tiny_model, "--workers", "2", **found)
    whole.wait_ready()
    before = {one["pid"] for one in whole.processes() if one["role"] == "worker"}
    etcd.kill()
    until(lambda: away(whole) == {"discovery"})
    os.kill(min(before), signal.SIGKILL)
    until(lambda: len({one["pid"] for one in whole.processes()} & before) == 1)
    assert ask(whole, 4) == {200}
    etcd.start()
    until(lambda: workers(whole) == 2, 10)
    until(lambda: listed(etcd, "/buried/workers/worker/generate/") == 2, 5)
    assert ask(whole, 4) == {200}


def test_etcd_absent_at_the_start_is_said_and_waited_for(tiny_model: Path, host: Host) -> None:
    server = EtcdProcess()
    found = {"DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{server.port}"}
    whole = host("a", "run", "out=mock", tiny_model, **found)
    until(lambda: whole.get("/live")[0] == 200)
    assert away(whole) == {"discovery"}
    with server:
        whole.wait_ready()
        assert ask(whole) == {200}


def listed(etcd: EtcdProcess, prefix: str) -> int:
    """How many records there are below `prefix`."""
    command = [str(Path(sys.executable).with_name("etcdctl")), "get", "--prefix", prefix]
    command += ["--keys-only", "--endpoints", f"127.0.0.1:{etcd.port}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return len(done.stdout.split())

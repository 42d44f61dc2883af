"""Simulated hosts on this machine, each with its own state folder, that share real servers.

Frontends and workers are separate commands on different hosts.
"""

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
from tests.support.servers import EtcdProcess, NatsProcess

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
    """`host(name, command, *arguments, **environ)` starts a command on a simulated host until the
    end of the test."""
    running: list[Deployment] = []

    def start(name: str, command: str, *arguments: object, **environ: str) -> Deployment:
        home = tmp_path / name
        home.mkdir(mode=0o700, exist_ok=True)
        texts = [str(argument) for argument in arguments]
        environ = {"XDG_RUNTIME_DIR": str(home), **environ}
        running.append(Deployment(texts, home, environ, command, EXAMPLE))
        return running[-1]

    yield start
    for deployment in reversed(running):
        deployment.stop()


def health(frontend: Deployment) -> dict[str, Any]:
    status, text = frontend.get("/health")
    return json.loads(text) if status else {}


def unreachable_planes(frontend: Deployment) -> set[str]:
    return set(health(frontend)["planes"].get("away", ()))


def workers(frontend: Deployment) -> int:
    return sum(health(frontend).get("workers", {}).values())


def ask(frontend: Deployment, times: int = 1) -> set[int]:
    return {frontend.post("/v1/chat/completions", BODY)[0] for _ in range(times)}


def test_frontend_and_workers_use_etcd_and_nats_and_outlive_both(
    etcd: EtcdProcess, nats: NatsProcess, tiny_model: Path, host: Host
) -> None:
    servers = {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_NATS_URL": nats.url,
        "DYNAMO_RUNTIME__NAMESPACE": "outlives",
    }
    backend = host("b", "run", "in=none", "out=mock", tiny_model, "--workers", "2", **servers)
    front = host("a", "run", "--workers", "0", **servers)
    front.wait_ready()
    until(lambda: workers(front) == 2)
    planes = health(front)["planes"]
    assert (planes["discovery"], planes["events"]) == (etcd.url, nats.url)
    assert ask(front, 4) == {200}

    arguments = ["call", "Processor.chat/answer", json.dumps(BODY)]
    command = [sys.executable, "-m", "dynamo", *arguments]
    called = subprocess.run(command, capture_output=True, text=True, env=front.environ)
    assert json.loads(called.stdout)["finish_reason"] == "length", called.stderr

    etcd.kill()
    until(lambda: unreachable_planes(front) == {"discovery"})
    assert ask(front, 4) == {200}
    nats.kill()
    until(lambda: unreachable_planes(front) == {"discovery", "requests", "events"})
    assert ask(front, 4) == {200}
    assert workers(front) == 2
    assert front.get("/health")[0] == 200

    etcd.delete_data()
    etcd.start()
    nats.start()
    until(lambda: not unreachable_planes(front), 5)
    assert ask(front, 4) == {200}
    until(lambda: count_records(etcd, "/outlives/workers/worker/generate/") == 2, 5)
    assert workers(front) == 2
    assert backend.process.poll() is None


def test_parts_of_a_graph_connect_over_tcp_with_a_secret(
    etcd: EtcdProcess, tiny_model: Path, host: Host
) -> None:
    servers = {
        "DYNAMO_DISCOVERY__ETCD__ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_RUNTIME__PLANE_HOST": "0.0.0.0",
        "DYNAMO_RUNTIME__PUBLIC_HOST": "127.0.0.1",
        "DYNAMO_RUNTIME__NAMESPACE": "secret",
    }
    with_secret = servers | {"DYNAMO_SECURITY__SECRET": "a secret of this deployment"}
    graph = ["-f", "configs/agg.yaml", "--only", "--engine.kind", "mock"]
    model = ["--model-path", tiny_model, "--deployment", "workers"]
    host("b", "serve", "graphs.agg:AggregatedWorker", *graph, *model, **with_secret)
    front = host(
        "a", "serve", "graphs.agg:Frontend", *graph, "--deployment", "front", **with_secret
    )
    front.wait_ready()
    assert ask(front, 2) == {200}

    with_other_secret = servers | {"DYNAMO_SECURITY__SECRET": "the secret of another deployment"}
    stranger = host(
        "c", "serve", "graphs.agg:Frontend", *graph, "--deployment", "c", **with_other_secret
    )
    until(lambda: stranger.get("/health")[0] not in {0, 200})
    assert ask(front, 2) == {200}


def test_workers_of_a_dead_host_get_no_requests_and_their_records_expire(
    etcd: EtcdProcess, nats: NatsProcess, tiny_model: Path, host: Host
) -> None:
    servers = {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_NATS_URL": nats.url,
        "DYNAMO_RUNTIME__NAMESPACE": "dies",
        "DYNAMO_RUNTIME__LEASE_TTL": "2",
    }
    killed = host("b", "run", "in=none", "out=mock", tiny_model, "--deployment", "b", **servers)
    host("c", "run", "in=none", "out=mock", tiny_model, "--deployment", "c", **servers)
    front = host("a", "run", "--workers", "0", **servers)
    front.wait_ready()
    until(lambda: workers(front) == 2)
    killed.process.send_signal(signal.SIGKILL)
    assert ask(front, 6) == {200}
    until(lambda: workers(front) == 1)
    until(lambda: count_records(etcd, "/dies/workers/worker/generate/") == 1, 10)
    assert ask(front, 2) == {200}


def test_records_of_workers_that_died_without_etcd_are_deleted_later(
    etcd: EtcdProcess, tiny_model: Path, host: Host
) -> None:
    environ = {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_RUNTIME__NAMESPACE": "dead-records",
    }
    deployment = host("a", "run", "out=mock", tiny_model, "--workers", "2", **environ)
    deployment.wait_ready()
    until(lambda: workers(deployment) == 2)
    before = {p["pid"] for p in deployment.processes() if p["role"] == "worker"}
    etcd.kill()
    until(lambda: unreachable_planes(deployment) == {"discovery"})
    os.kill(min(before), signal.SIGKILL)
    until(lambda: len({p["pid"] for p in deployment.processes()} & before) == 1)
    assert ask(deployment, 4) == {200}
    etcd.start()
    until(lambda: workers(deployment) == 2, 10)
    until(lambda: count_records(etcd, "/dead-records/workers/worker/generate/") == 2, 5)
    assert ask(deployment, 4) == {200}


def test_a_deployment_waits_for_etcd_at_the_start(tiny_model: Path, host: Host) -> None:
    server = EtcdProcess()
    environ = {"DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{server.port}"}
    deployment = host("a", "run", "out=mock", tiny_model, **environ)
    until(lambda: deployment.get("/live")[0] == 200)
    assert unreachable_planes(deployment) == {"discovery"}
    with server:
        deployment.wait_ready()
        assert ask(deployment) == {200}


def count_records(etcd: EtcdProcess, prefix: str) -> int:
    """Count the records below `prefix`."""
    command = [str(Path(sys.executable).with_name("etcdctl")), "get", "--prefix", prefix]
    command += ["--keys-only", "--endpoints", f"127.0.0.1:{etcd.port}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return len(output.stdout.split())


def test_doctor_names_a_dead_server_a_wrong_secret_and_a_missing_library(
    etcd: EtcdProcess, nats: NatsProcess, tiny_model: Path, host: Host, tmp_path: Path
) -> None:
    servers = {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
        "DYNAMO_NATS_URL": nats.url,
        "DYNAMO_RUNTIME__NAMESPACE": "doctor",
        "DYNAMO_SECURITY__SECRET": "0123456789abcdef",
    }
    backend = host("b", "run", "in=none", "out=mock", tiny_model, **servers)
    front = host("a", "run", "--workers", "0", **servers)
    front.wait_ready()
    until(lambda: workers(front) == 1)
    assert backend.log.exists()

    def doctor(*python: str, **environ: str) -> tuple[int, str]:
        command = [sys.executable, *python, "doctor", "--json", "--http-port", "0"]
        variables = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "c"), **servers, **environ}
        ran = subprocess.run(command, env=variables, capture_output=True, text=True)
        (finding,) = [row for row in json.loads(ran.stdout) if row["check"] == "servers"]
        return ran.returncode, f"{finding['found']} {finding['hint']}"

    module = ("-P", "-m", "dynamo")
    code, text = doctor(*module)
    assert (code, text) == (0, "servers answer; 2 processes accept calls ")
    code, text = doctor(*module, DYNAMO_SECURITY__SECRET="another-secret-of-16")
    assert code == 1
    assert "2 of 2 processes refuse calls" in text
    code, text = doctor(*module, DYNAMO_ETCD_ENDPOINTS="http://127.0.0.1:1")
    assert (code, "etcd at 127.0.0.1:1" in text) == (1, True)
    blocked = "import sys; sys.modules['nats'] = None; from dynamo.cli import main; sys.exit(main(sys.argv[1:]))"
    code, text = doctor("-c", blocked)
    assert (code, "nats" in text) == (1, True)

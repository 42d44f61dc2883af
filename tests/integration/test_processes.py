"""A deployment from its user's view: start, kill processes, stop."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment, free_port, until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a lazy dog"}], "max_tokens": 8}
FAST = ("--speedup-ratio", "1000", "--model-name", "tiny")


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(deployment: Deployment, role: str = "") -> list[int]:
    return [
        process["pid"] for process in deployment.processes() if not role or process["role"] == role
    ]


@contextmanager
def kept_clients(port: int) -> Iterator[list[int]]:
    """Send requests one after the other on each of some connections, and collect their statuses, 0
    for a broken connection."""
    statuses, ended = list[int](), threading.Event()

    def ask() -> None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not ended.is_set():
            try:
                client.request("GET", "/v1/models")
                answer = client.getresponse()
                answer.read()
                statuses.append(answer.status)
            except (OSError, http.client.HTTPException):
                statuses.append(0)
        client.close()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_ps_lists_every_process_and_its_state(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 2, *FAST)
    listed = until(
        lambda: (
            (p := deployment.processes())
            and all(x["state"] == "ready" for x in p if x["role"] != "supervisor")
            and p
        )
    )
    assert sorted(p["role"] for p in listed) == ["frontend", "supervisor", "worker", "worker"]
    assert {p["engine"] for p in listed if p["role"] == "worker"} == {"mock"}
    assert all(p["instance"].startswith(p["name"] + "-") for p in listed)
    for process in listed:
        assert set(process) >= {
            "deployment",
            "role",
            "name",
            "instance",
            "pid",
            "address",
            "status_url",
            "state",
            "restarts",
        }
        assert alive(process["pid"])


def chosen_worker(deployment: Deployment) -> str:
    """Return the worker that answered a request, as the answer's header names it."""
    headers = {"content-type": "application/json"}
    url = f"{deployment.url}/v1/chat/completions"
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(CHAT).encode(), headers)
    ) as answer:
        return str(answer.headers["x-dynamo-worker"])


def test_a_killed_worker_is_restarted_and_later_requests_succeed(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 2, *FAST)
    chosen = chosen_worker(deployment)
    (victim,) = [p["pid"] for p in deployment.processes() if p["instance"] == chosen]
    log = deployment.log.read_text()
    assert any("worker serves" in line and chosen in line for line in log.splitlines())
    os.kill(victim, signal.SIGKILL)
    until(lambda: victim not in pids(deployment, "worker"))
    for _ in range(20):
        assert deployment.post("/v1/chat/completions", CHAT)[0] == 200
    until(lambda: len(pids(deployment, "worker")) == 2)
    log = deployment.log.read_text()
    for message in ("process died", "connection broke"):  # of the supervisor and the frontend
        assert any(message in line and f"instance={chosen}" in line for line in log.splitlines())


def test_processes_that_wait_for_absent_servers_say_so_and_stop_cleanly(
    start: Callable[..., Deployment], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("DYNAMO_ETCD_ENDPOINTS", f"http://{etcd}")
    monkeypatch.setenv("DYNAMO_NATS_URL", f"nats://127.0.0.1:{free_port()}")
    deployment = start("out=mock", tiny_model, *FAST, ready=False)

    def awaiting() -> list[str]:
        return [f"{p['name']} {p['reason']}" for p in deployment.processes() if etcd in p["reason"]]

    until(lambda: [line.split()[0] for line in sorted(awaiting())] == ["frontend", "worker"])
    assert deployment.stop() == 0
    log = deployment.log.read_text()
    assert "Traceback" not in log
    for name in ("supervisor", "worker", "frontend"):
        waiting = [line for line in log.splitlines() if f"{name} dynamo.comm" in line]
        assert any(f"waiting for etcd, which cannot be reached server={etcd}" in x for x in waiting)


def test_workers_join_and_leave_under_load(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 3, *FAST)
    done = threading.Event()
    statuses: list[int] = []

    def load() -> None:
        while not done.is_set():
            statuses.append(deployment.post("/v1/chat/completions", CHAT)[0])

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for victim in pids(deployment, "worker")[:2]:
        os.kill(victim, signal.SIGTERM)  # drains, then is restarted
        until(lambda victim=victim: victim not in pids(deployment, "worker"))
    until(lambda: len(pids(deployment, "worker")) == 3)
    done.set()
    for thread in threads:
        thread.join()
    assert len(statuses) > 20
    assert set(statuses) == {200}


def test_scale_restart_and_drain_print_what_the_deployment_did(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 1, *FAST)

    def control(*words: str) -> tuple[int, str]:
        line = [sys.executable, "-m", "dynamo", *words, "--deployment", str(deployment.port)]
        done = subprocess.run(line, capture_output=True, text=True, env=deployment.environ)
        return done.returncode, done.stdout + done.stderr

    assert control("scale", "worker=2") == (0, "worker-1 serves\n")
    before = set(pids(deployment, "worker"))
    (instance,) = [p["instance"] for p in deployment.processes() if p["name"] == "worker-1"]
    assert control("restart", instance) == (0, "worker-1 was replaced\n")
    assert len(before & set(pids(deployment, "worker"))) == 1
    assert control("drain", "worker-1") == (0, "worker-1 has left\n")
    assert len(pids(deployment, "worker")) == 1
    with kept_clients(deployment.port) as statuses:
        for _ in range(2):
            assert control("restart", "frontend") == (0, "frontend was replaced\n")
    assert set(statuses) == {200}
    code, output = control("scale", "worker=")
    assert (code, output.splitlines()[0]) == (2, "error: 'worker=' is not KIND=COUNT")


def test_ctrl_c_stops_all_and_leaves_no_process(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 2, *FAST)
    all_pids = pids(deployment)
    assert len(all_pids) == 4
    assert deployment.stop(signal.SIGINT) == 0
    assert not [pid for pid in all_pids if alive(pid)]
    assert "Traceback" not in deployment.log.read_text()


def test_children_die_with_a_killed_supervisor(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 2, *FAST)
    all_pids = pids(deployment)
    deployment.process.kill()
    deployment.process.wait()
    until(lambda: not [pid for pid in all_pids if alive(pid)], 5)
    assert deployment.processes() == []


def test_a_port_in_use_names_its_owner(start: Callable[..., Deployment], tiny_model: Path) -> None:
    deployment = start("out=mock", tiny_model, *FAST)
    command = [
        sys.executable,
        "-m",
        "dynamo",
        "run",
        "out=mock",
        str(tiny_model),
        "--http-port",
        str(deployment.port),
    ]
    second = subprocess.run(
        command, capture_output=True, text=True, timeout=30, env=deployment.environ
    )
    assert second.returncode == 1
    assert str(deployment.port) in second.stderr
    owners = {str(pid) for pid in pids(deployment)}
    assert any(pid in second.stderr for pid in owners)
    assert "Traceback" not in second.stderr


def test_live_and_not_ready_before_the_first_worker(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 0, *FAST, ready=False)
    until(lambda: deployment.get("/live")[0] == 200)
    status, body = deployment.get("/health")
    assert status == 503
    assert "this deployment starts no workers (engine.workers = 0)" in body
    assert "this deployment starts no workers" in deployment.log.read_text()
    status, answer = deployment.post("/v1/chat/completions", CHAT)
    assert status == 503
    assert answer["error"]["code"] in {"model_not_ready", "no_workers"}


def test_several_frontends_share_the_port_and_their_metrics(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--workers", 2, "--http-workers", 2, *FAST)
    until(
        lambda: (
            len(
                [
                    p
                    for p in deployment.processes()
                    if p["role"] == "frontend" and p["state"] == "ready"
                ]
            )
            == 2
        )
    )
    for _ in range(30):
        assert deployment.post("/v1/chat/completions", CHAT)[0] == 200
    metrics = deployment.get("/metrics")[1]
    total = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("dynamo_frontend_requests_total") and "200" in line
    )
    assert total == 30


def test_stop_command_stops_a_deployment(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, *FAST)
    command = [sys.executable, "-m", "dynamo", "stop", str(deployment.port)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=30, env=deployment.environ
    )
    assert ended.returncode == 0, ended.stderr
    assert deployment.process.wait(10) == 0


def test_every_router_mode_answers(start: Callable[..., Deployment], tiny_model: Path) -> None:
    for mode in ("round-robin", "random", "least_loaded", "power-of-two", "weighted"):
        deployment = start("out=mock", tiny_model, "--workers", 2, "--router-mode", mode, *FAST)
        assert deployment.post("/v1/chat/completions", CHAT)[0] == 200, mode
        deployment.stop()


def test_every_process_has_a_status_port(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    import urllib.request

    deployment = start("out=mock", tiny_model, *FAST)
    # A frontend serves with a worker that has announced its model and is not yet "ready" itself.
    until(lambda: "starting" not in {process["state"] for process in deployment.processes()})
    pages = {process["role"]: process["status_url"] for process in deployment.processes()}
    assert pages["worker"]
    for role, url in pages.items():
        for path in ("/health", "/live", "/metrics") if url else ():
            with urllib.request.urlopen(url + path, timeout=5) as answer:
                body = answer.read().decode()
                assert answer.status == 200, (role, path)
                assert body
                if path == "/health":
                    json.loads(body)


def test_a_standby_worker_takes_the_place_of_a_killed_one(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, "--standby", 1, *FAST)

    def named(name: str, state: str) -> dict[str, Any] | None:
        listed = deployment.processes()
        return next((p for p in listed if (p["name"], p["state"]) == (name, state)), None)

    standby = until(lambda: named("worker-standby-1", "standby"))
    chosen = chosen_worker(deployment)
    (worker,) = [p for p in deployment.processes() if p["instance"] == chosen]
    assert worker["name"] == "worker"
    os.kill(worker["pid"], signal.SIGKILL)
    assert chosen_worker(deployment) == standby["instance"]
    serving = until(lambda: named("worker", "ready"))
    assert (serving["pid"], serving["restarts"]) == (standby["pid"], 1)
    assert until(lambda: named("worker-standby-1", "standby"))["pid"] != standby["pid"]


def test_a_sleeping_worker_is_woken_by_a_request_and_restarted_when_it_dies(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, *FAST)

    def order(*arguments: str) -> str:
        line = [
            sys.executable,
            "-m",
            "dynamo",
            *arguments,
            "--deployment",
            f"http-{deployment.port}",
        ]
        done = subprocess.run(line, capture_output=True, env=deployment.environ, text=True)
        return done.stdout + done.stderr

    def answer() -> Any:
        status, body = deployment.post("/v1/chat/completions", CHAT)
        assert status == 200
        return body["choices"]

    def state() -> str:
        (worker,) = [p for p in deployment.processes() if p["role"] == "worker"]
        return str(worker["state"])

    before = answer()
    assert "worker sleeps at level 2" in order("sleep", "tiny", "--level", "2")
    assert state() == "sleeping"
    assert "worker sleeps already, at level 2; wake it first" in order("sleep", "worker")
    assert "worker sleeps already, at level 2\n" in order("sleep", "worker", "--level", "2")
    assert deployment.get("/health")[0] == 200
    (model,) = json.loads(deployment.get("/v1/models")[1])["data"]
    assert model["status"]["value"] == "sleeping"
    assert answer() == before
    assert state() == "ready"
    assert "worker is awake" in order("wake", "worker")
    assert "did you mean 'worker'?" in order("wake", "wroker")

    order("sleep", "worker")
    (pid,) = pids(deployment, "worker")
    os.kill(pid, signal.SIGKILL)
    assert answer() == before

"""A deployment as its user meets it: start, kill parts of it, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Deployment, until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a lazy dog"}], "max_tokens": 8}
FAST = ("--speedup-ratio", "1000", "--model-name", "tiny")


def alive(pid: int) -> bool:
    """Is there such a process (zombies do not count)?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(one: Deployment, role: str = "") -> list[int]:
    return [p["pid"] for p in one.processes() if not role or p["role"] == role]


def test_ps_lists_every_process_and_its_state(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, "--workers", 2, *FAST)
    listed = until(
        lambda: (
            (p := one.processes())
            and all(x["state"] == "ready" for x in p if x["role"] != "supervisor")
            and p
        )
    )
    assert sorted(p["role"] for p in listed) == ["frontend", "supervisor", "worker", "worker"]
    for process in listed:
        assert set(process) >= {
            "deployment",
            "role",
            "name",
            "pid",
            "address",
            "status_url",
            "state",
        }
        assert alive(process["pid"])


def test_a_killed_worker_comes_back_and_nobody_gets_an_error_after(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, "--workers", 2, *FAST)
    victim = pids(one, "worker")[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: victim not in pids(one, "worker"))
    for _ in range(20):
        assert one.post("/v1/chat/completions", CHAT)[0] == 200
    until(lambda: len(pids(one, "worker")) == 2)


def test_workers_join_and_leave_under_load(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, "--workers", 3, *FAST)
    done = threading.Event()
    statuses: list[int] = []

    def load() -> None:
        while not done.is_set():
            statuses.append(one.post("/v1/chat/completions", CHAT)[0])

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for victim in pids(one, "worker")[:2]:
        os.kill(victim, signal.SIGTERM)  # leaves in good order: drains, then is replaced
        until(lambda victim=victim: victim not in pids(one, "worker"))
    until(lambda: len(pids(one, "worker")) == 3)
    done.set()
    for thread in threads:
        thread.join()
    assert len(statuses) > 20
    assert set(statuses) == {200}


def test_ctrl_c_stops_all_and_leaves_no_process(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, "--workers", 2, *FAST)
    everybody = pids(one)
    assert len(everybody) == 4
    assert one.stop(signal.SIGINT) == 0
    assert not [pid for pid in everybody if alive(pid)]
    assert "Traceback" not in one.log.read_text()


def test_children_die_with_a_killed_supervisor(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, "--workers", 2, *FAST)
    everybody = pids(one)
    one.process.kill()
    one.process.wait()
    until(lambda: not [pid for pid in everybody if alive(pid)], 5)
    assert one.processes() == []


def test_a_port_in_use_names_its_owner(start: Callable[..., Deployment], tiny_model: Path) -> None:
    one = start("out=mock", tiny_model, *FAST)
    command = [
        sys.executable,
        "-m",
        "dynamo",
        "run",
        "out=mock",
        str(tiny_model),
        "--http-port",
        str(one.port),
    ]
    again = subprocess.run(command, capture_output=True, text=True, timeout=30, env=one.environ)
    assert again.returncode == 1
    assert str(one.port) in again.stderr
    owners = {str(pid) for pid in pids(one)}
    assert any(pid in again.stderr for pid in owners)
    assert "Traceback" not in again.stderr


def test_live_and_not_ready_before_the_first_worker(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, "--workers", 0, *FAST, ready=False)
    until(lambda: one.get("/live")[0] == 200)
    status, body = one.get("/health")
    assert status == 503
    assert "this deployment starts no workers (engine.workers = 0)" in body
    assert "no workers are started here" in one.log.read_text()
    status, answer = one.post("/v1/chat/completions", CHAT)
    assert status == 503
    assert answer["error"]["code"] in {"model_not_ready", "no_workers"}


def test_several_frontends_share_the_port_and_their_metrics(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, "--workers", 2, "--http-workers", 2, *FAST)
    until(
        lambda: (
            len([p for p in one.processes() if p["role"] == "frontend" and p["state"] == "ready"])
            == 2
        )
    )
    for _ in range(30):
        assert one.post("/v1/chat/completions", CHAT)[0] == 200
    metrics = one.get("/metrics")[1]
    total = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("dynamo_frontend_requests_total") and "200" in line
    )
    assert total == 30


def test_stop_command_stops_a_deployment(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    one = start("out=mock", tiny_model, *FAST)
    command = [sys.executable, "-m", "dynamo", "stop", str(one.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, env=one.environ)
    assert ended.returncode == 0, ended.stderr
    assert one.process.wait(10) == 0


def test_every_router_mode_answers(start: Callable[..., Deployment], tiny_model: Path) -> None:
    for mode in ("round-robin", "random", "least_loaded", "power-of-two", "weighted"):
        one = start("out=mock", tiny_model, "--workers", 2, "--router-mode", mode, *FAST)
        assert one.post("/v1/chat/completions", CHAT)[0] == 200, mode
        one.stop()


def test_workers_status_pages(start: Callable[..., Deployment], tiny_model: Path) -> None:
    import urllib.request

    one = start("out=mock", tiny_model, *FAST)
    pages = {process["role"]: process["status_url"] for process in one.processes()}
    assert pages["worker"]
    for role, url in pages.items():
        for path in ("/health", "/live", "/metrics") if url else ():
            with urllib.request.urlopen(url + path, timeout=5) as answer:
                body = answer.read().decode()
                assert answer.status == 200, (role, path)
                assert body
                if path == "/health":
                    json.loads(body)

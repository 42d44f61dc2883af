"""Frontends and workers as the processes of pods, which find each other by an API server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import Deployment, until
from tests.support.kubernetes_server import KubernetesServer
from tests.support.servers import free_port

from dynamo.runtime.deployment import Deployment as ProcessFolder
from dynamo.runtime.processes.process_record import REFRESH_INTERVAL_S

BODY = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
SCRIPTS = Path(sys.executable).parent
Pod = Callable[..., Deployment]


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        yield server


@pytest.fixture
def pod(kubernetes: KubernetesServer, tmp_path: Path) -> Iterator[Pod]:
    """`pod(name, *arguments, ready=True)` runs `dynamo run` as the process of a pod."""
    running: list[Deployment] = []

    def start(name: str, *arguments: object, ready: bool = True) -> Deployment:
        home = tmp_path / name
        home.mkdir(mode=0o700)
        environ = {"XDG_RUNTIME_DIR": str(home), **kubernetes.start_pod(name, ready=ready)}
        running.append(Deployment([str(argument) for argument in arguments], home, environ))
        return running[-1]

    yield start
    for deployment in reversed(running):
        deployment.stop()


def mock(model: Path, *flags: str) -> tuple[object, ...]:
    return ("in=none", "out=mock", model, "--model-name", "tiny", *flags)


def ready(deployment: Deployment, port: int = 0) -> int:
    """Return the status of /ready, at the HTTP port or at another one; 0: nothing answers."""
    return get_status(f"http://127.0.0.1:{port or deployment.port}/ready")


def get_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_a_frontend_finds_workers_of_other_pods(pod: Pod, tiny_model: Path) -> None:
    workers = [pod(f"worker-{number}", *mock(tiny_model)) for number in range(2)]
    frontend = pod("frontend", "--workers", "0")
    frontend.wait_ready()
    until(lambda: frontend.post("/v1/chat/completions", BODY)[0] == 200)
    assert all(worker.process.poll() is None for worker in workers)


def test_a_frontend_is_ready_once_each_role_has_answered_and_until_it_stops(
    pod: Pod, kubernetes: KubernetesServer, tiny_model: Path
) -> None:
    frontend = pod("frontend", "--workers", "0", "--server.leave_s", "2")
    port = free_port()
    at = ("--runtime.status_port", str(port), "--workers", "0")
    decode = pod("decode", *mock(tiny_model, *at, "--decode-workers", "1"), ready=False)
    until(lambda: ready(decode, port) == 200)
    until(lambda: ready(frontend) == 503)
    kubernetes.run(kubernetes.pods.set_ready, "decode", ready=True)
    until(lambda: "no prefill worker" in frontend.get("/ready")[1])
    prefill = pod("prefill", *mock(tiny_model, "--workers", "0", "--prefill-workers", "1"))
    until(lambda: ready(frontend) == 200)
    assert frontend.post("/v1/chat/completions", BODY)[0] == 200

    prefill.stop()
    decode.process.send_signal(signal.SIGTERM)
    until(lambda: ready(decode, port) in {0, 503})
    decode.stop()
    assert ready(frontend) == 200, "an outage of workers is answered in words"
    assert frontend.post("/v1/chat/completions", BODY)[0] == 503

    frontend.process.send_signal(signal.SIGTERM)
    until(lambda: ready(frontend) == 503)
    assert get_status(f"{frontend.url}/live") == 200, "new connections are accepted meanwhile"
    assert frontend.process.wait(30) == 0
    assert get_status(f"{frontend.url}/live") == 0


def test_a_worker_that_its_pod_restarts_is_waited_for(
    pod: Pod, kubernetes: KubernetesServer, tiny_model: Path, tmp_path: Path
) -> None:
    pod("worker", *mock(tiny_model))
    frontend = pod("frontend", "--workers", "0")
    frontend.wait_ready()
    until(lambda: frontend.post("/v1/chat/completions", BODY)[0] == 200)
    folders = (tmp_path / "worker" / "dynamo").glob("*/")
    processes = [p for f in folders for p in ProcessFolder(f.name, f).live_processes()]
    (worker,) = (process for process in processes if process.role == "worker")
    os.kill(worker.pid, signal.SIGKILL)
    kubernetes.run(kubernetes.pods.set_ready, "worker", ready=False)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(frontend.post, "/v1/chat/completions", BODY)
        kubernetes.run(kubernetes.pods.set_ready, "worker", ready=True)
        assert answer.result()[0] == 200


@pytest.mark.slow
def test_pods_at_rest_ask_the_api_server_nothing(
    pod: Pod, kubernetes: KubernetesServer, tiny_model: Path
) -> None:
    pod("worker", *mock(tiny_model))
    frontend = pod("frontend", "--workers", "0")
    frontend.wait_ready()
    until(lambda: frontend.post("/v1/chat/completions", BODY)[0] == 200)
    time.sleep(5)
    requests = kubernetes.cluster.server.requests
    requests.clear()
    time.sleep(REFRESH_INTERVAL_S + 5)
    assert requests == []
    watches = kubernetes.cluster.server._watches
    assert len(watches) == 8, "two for each supervisor and each other process"


@pytest.mark.skipif(not (SCRIPTS / "kubectl").exists(), reason="needs kubectl")
def test_a_command_outside_of_the_cluster_calls_a_worker(
    pod: Pod, kubernetes: KubernetesServer, tiny_model: Path, tmp_path: Path
) -> None:
    worker = pod("worker", *mock(tiny_model))
    frontend = pod("frontend", "--workers", "0")
    frontend.wait_ready()
    until(lambda: frontend.post("/v1/chat/completions", BODY)[0] == 200)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": kubernetes.cluster.server.url}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    environ = os.environ | {
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "DYNAMO_RUNTIME__DISCOVERY": "kubernetes://lab/qwen",
    }
    body = json.dumps(BODY | {"model": "default"})
    command = [sys.executable, "-m", "dynamo", "call", "Processor.chat/answer", body]
    called = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert json.loads(called.stdout)["finish_reason"] == "length", called.stderr
    assert worker.process.poll() is None

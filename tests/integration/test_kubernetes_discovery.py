"""Frontends and workers as the processes of pods, which find each other by an API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import Deployment, until
from tests.support.kubernetes_server import KubernetesServer

BODY = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
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


def test_a_frontend_finds_workers_of_other_pods(pod: Pod, tiny_model: Path) -> None:
    mock = ("in=none", "out=mock", tiny_model, "--model-name", "tiny")
    workers = [pod(f"worker-{number}", *mock) for number in range(2)]
    frontend = pod("frontend", "--workers", "0")
    frontend.wait_ready()
    until(lambda: frontend.post("/v1/chat/completions", BODY)[0] == 200)
    assert all(worker.process.poll() is None for worker in workers)

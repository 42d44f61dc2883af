"""`python -m dynamo.frontend` and `python -m dynamo.mocker` as separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port, until
from tests.support.servers import EtcdProcess, NatsProcess

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Processes:
    """Processes that share an environment. All are killed at the end."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._folder = folder
        self._environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), **environ}
        self._port = free_port()
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `python -m dynamo.MODULE`."""
        command = [sys.executable, "-m", f"dynamo.{module}", *arguments]
        with (self._folder / f"{module}-{len(self._running)}.log").open("wb") as log:
            process = subprocess.Popen(command, env=self._environ, stdout=log, stderr=log)
        self._running.append(process)
        return process

    def start_frontend(self, *arguments: str) -> None:
        """Start a frontend, which `get` and `chat` ask."""
        self.start("frontend", "--http-port", str(self._port), *arguments)

    def send(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Return status and body of a request. Status 0: no answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", body and json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, {}

    def workers(self) -> int:
        """Return how many workers the frontend sees."""
        models = self.send("/health")[1].get("models", {})
        return sum(model["workers"] for model in models.values()) if models else 0

    def close(self) -> None:
        """Kill all processes. Blocks."""
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture(params=["file", "etcd"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    """Processes that find each other by a folder, or by etcd and NATS."""
    with ExitStack() as stack:
        environ = {}
        if request.param == "etcd":
            etcd = stack.enter_context(EtcdProcess())
            nats = stack.enter_context(NatsProcess())
            environ = {
                "ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
                "NATS_SERVER": f"nats://127.0.0.1:{nats.port}",
                "DYN_REQUEST_PLANE": "nats",
            }
        processes = Processes(tmp_path, {**environ, "DYN_DISCOVERY_BACKEND": request.param})
        stack.callback(processes.close)
        yield processes


def test_workers_of_other_processes_answer_until_the_last_is_killed(
    processes: Processes, tiny_model: Path
) -> None:
    flags = ("--model-path", str(tiny_model), "--model-name", "tiny", "--speedup-ratio", "0")
    processes.start_frontend("--router-mode", "kv")
    first = processes.start("mocker", *flags)
    second = processes.start("mocker", *flags)
    until(lambda: processes.workers() == 2, timeout_s=60)
    assert processes.send("/v1/chat/completions", CHAT)[0] == 200

    first.kill()
    for _ in range(4):
        status, answer = processes.send("/v1/chat/completions", CHAT)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 3
    until(lambda: processes.workers() == 1, timeout_s=60)
    assert second.poll() is None

"""Start the measured servers: our deployment and Dynamo 1.6.1.

The peer needs a separate environment::

    python3 -m venv PEER && PEER/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    PEER/bin/pip install msgspec pyyaml aiohttp prometheus-client pyzmq 'kubernetes<33' redis zstandard \
        uvloop httptools pydantic tqdm typing-extensions packaging transformers numpy
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running deployment: its URL, and the pids of its frontend and worker processes."""

    def __init__(
        self,
        url: str,
        frontend: list[int],
        workers: list[int],
        children: list[subprocess.Popen[bytes]],
    ) -> None:
        self.url, self.frontend, self.workers, self.children = url, frontend, workers, children

    def stop(self) -> None:
        """Stop all processes and wait."""
        for child in self.children:
            child.send_signal(signal.SIGTERM)
        for child in self.children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def answers(
    url: str, model: str, children: list[subprocess.Popen[bytes]], timeout_s: float = 90
) -> None:
    """Wait until the server answers a request."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    ask = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if any(child.poll() is not None for child in children):
            sys.exit("a server process ended at once")
        try:
            with urllib.request.urlopen(ask, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.25)
    sys.exit(f"{url} does not answer")


def start_ours(
    model_dir: str,
    workers: int,
    speedup: float,
    router: str,
    *more: str,
    engine: str = "mock",
    timeout_s: float = 90,
    environ: Mapping[str, str] = {},
) -> Server:
    """Start `dynamo run` with mock workers. Every process that is not a worker counts
    as frontend."""
    port = free_port()
    command = [sys.executable, "-m", "dynamo", "run", f"out={engine}"] + (
        [model_dir] if model_dir else []
    )
    command += [
        "--workers",
        str(workers),
        "--router-mode",
        router,
        "--http-port",
        str(port),
        "--model-name",
        "smol",
        *more,
    ]
    if engine == "mock":
        command += ["--speedup-ratio", str(speedup)]
    env = os.environ | environ
    child = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    answers(url, "smol", [child], timeout_s)
    by_role = processes(url)
    serving = [pid for role in by_role if role.endswith("worker") for pid in by_role[role]]
    others = [pid for role in by_role if not role.endswith("worker") for pid in by_role[role]]
    return Server(url, others, serving, [child])


def processes(url: str) -> dict[str, list[int]]:
    """Return the pids of one of our deployments by role."""
    listed = json.loads(
        subprocess.run(
            [sys.executable, "-m", "dynamo", "ps", "--json"], capture_output=True, check=True
        ).stdout
    )
    by_role: dict[str, list[int]] = {}
    for process in listed:
        if process["deployment"] == f"http-{url.rpartition(':')[2]}":
            by_role.setdefault(process["role"], []).append(process["pid"])
    return by_role


def start_peer(model_dir: str, python: str, workers: int, speedup: float, router: str) -> Server:
    """Start Dynamo 1.6.1: frontend and mocker without etcd or NATS."""
    port = free_port()
    home = Path(tempfile.mkdtemp(prefix="peer-"))
    env = os.environ | {
        "HOME": str(home), "HF_HUB_OFFLINE": "1", "DYN_FILE_KV": str(home / "kv"), "DYN_LOG": "error",
        "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_SYSTEM_HOST": "127.0.0.1",
    }  # fmt: skip
    mode = router.replace("_", "-")
    front = [
        python,
        "-m",
        "dynamo.frontend",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(port),
        "--router-mode",
        mode,
        "--discovery-backend",
        "file",
    ]
    mock = [
        python,
        "-m",
        "dynamo.mocker",
        "--model-path",
        model_dir,
        "--model-name",
        "smol",
        "--num-workers",
        str(workers),
        "--discovery-backend",
        "file",
        "--speedup-ratio",
        str(speedup),
    ]
    children = [
        subprocess.Popen(c, env=env, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for c in (front, mock)
    ]
    url = f"http://127.0.0.1:{port}"
    answers(url, "smol", children)
    return Server(url, [children[0].pid], [children[1].pid], children)

"""Odd surroundings: closed descriptors, few open files, hostile folders and variables, secrets."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.attacks.client import chat, exchange, request_bytes
from tests.faults.cluster import Cluster

DYNAMO = Path(sys.executable).parent / "dynamo"
OWN_SCRIPT = ("bash", "-c", f'shift 4; exec {shlex.quote(str(DYNAMO))} "$@"', "bash")
"""Runs `dynamo` as users do, instead of `python -P -m dynamo`."""
HOSTILE = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONOPTIMIZE": "2",
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent/home",
}


def supervisor(cluster: Cluster) -> subprocess.Popen[bytes]:
    process = cluster._process
    assert process is not None
    return process


@pytest.mark.attack(
    "a start with closed descriptors 0, 1 and 2",
    "it serves; no socket gets these numbers",
)
def test_closed_descriptors(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    shell = ("bash", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "bash")
    with Cluster(tiny_model, tmp_path, workers=1, prefix=shell) as cluster:
        assert chat(cluster.port).status == 200
        process = supervisor(cluster)
        pids = [process.pid, *(r.pid for r in cluster.processes("worker"))]
        for pid in pids:
            files = [Path(f"/proc/{pid}/fd/{number}").readlink() for number in range(3)]
            assert not [file for file in files if str(file).startswith("socket")], files
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    outcome("serves, stops with status 0; /dev/null in their place")


@pytest.mark.attack(
    "40 open files at most (`ulimit -n 40`)",
    "a start refuses, and says which limit is needed",
)
def test_few_open_files(tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]) -> None:
    command = [sys.executable, "-P", "-m", "dynamo", "run", "out=mock", str(tiny_model)]
    ended = subprocess.run(
        ["bash", "-c", 'ulimit -n 40; exec "$@"', "bash", *command, "--http-port", "0"],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 2
    assert "may open 40 files and sockets, and 2 processes need" in ended.stderr
    assert "ulimit -Hn 4096" in ended.stderr
    assert "Traceback" not in ended.stderr
    outcome("refused with the limit that is needed")


@pytest.mark.attack(
    "a working folder with json.py, numpy.py and asyncio.py, locale C, no home; then kill -9 of the "
    "supervisor",
    "it serves; no child outlives its supervisor",
)
def test_hostile_surroundings(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    for name in ("json", "numpy", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    environ = {**HOSTILE, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Cluster(tiny_model, tmp_path, workers=1, prefix=OWN_SCRIPT, environ=environ) as cluster:
        assert chat(cluster.port).status == 200
        children = [r.pid for role in ("frontend", "worker") for r in cluster.processes(role)]
        assert len(children) == 2
        supervisor(cluster).kill()
        supervisor(cluster).wait()
        cluster.wait_blocking(lambda: not any(map(is_running, children)), 10)
    outcome("serves; both children end with their supervisor")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.attack(
    "a second start on the same port", "it ends with an error that names the first; that one serves"
)
def test_a_second_start_on_the_port(
    deployment: Cluster, tiny_model: Path, outcome: Callable[[str], None]
) -> None:
    command = [sys.executable, "-P", "-m", "dynamo", "run", "out=mock", str(tiny_model)]
    ended = subprocess.run(
        [*command, "--http-port", str(deployment.port)],
        env=deployment.environ,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 1
    assert f"deployment http-{deployment.port}" in ended.stderr
    assert f"dynamo stop http-{deployment.port}" in ended.stderr
    assert chat(deployment.port).status == 200
    outcome("status 1, names the deployment and how to stop it")


@pytest.mark.attack(
    "a search for the secrets in the log at level debug, all pages, command lines and readable files",
    "none of them is there",
)
def test_secrets_are_not_shown(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    key, secret = tmp_path / "key", tmp_path / "secret"
    for file, text in ((key, "sk-rosebud"), (secret, "rosebud-between-processes")):
        file.touch(0o600)
        file.write_text(text)
    environ = {
        "DYNAMO_SERVER__API_KEYS_FILE": str(key),
        "DYNAMO_SECURITY__SECRET_FILE": str(secret),
        "DYNAMO_RUNTIME__EVENTS": "tcp://rosebud:rosebud@127.0.0.1:0",
        "DYNAMO_LOG": "debug",
    }
    flags = ("--log-requests",)
    with Cluster(tiny_model, tmp_path, workers=1, environ=environ, flags=flags) as cluster:
        headers = ("Authorization: Bearer sk-rosebud",)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
        for sent, status in (((), 401), ((f"{headers[0]}-2",), 401), (headers, 200)):
            data = request_bytes(body, "/v1/completions", headers=sent)
            assert exchange(cluster.port, data).status == status
        shown = [cluster.log]
        for path in (
            "/health",
            "/metrics",
            "/v1/models",
            "/router",
            "/router/timeline",
            "/openapi.json",
        ):
            data = request_bytes(path=path, method="GET", headers=headers)
            shown.append(exchange(cluster.port, data).body.decode())
        roles = ("supervisor", "frontend", "worker")
        records = [record for role in roles for record in cluster.processes(role)]
        assert len(records) == 3
        for record in records:
            shown.append(Path(f"/proc/{record.pid}/cmdline").read_text())
            for page in ("health", "metrics"):
                with urllib.request.urlopen(f"{record.status_url}/{page}", timeout=5) as answer:
                    shown.append(answer.read().decode())
        readable = [
            path
            for path in (tmp_path / "dynamo").rglob("*")
            if path.is_file() and path.stat().st_mode & 0o077
        ]
        shown += [path.read_text(errors="replace") for path in readable]
    assert [text for text in shown if "rosebud" in text] == []
    outcome(f"none in {len(shown)} texts")

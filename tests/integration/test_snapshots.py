"""Snapshots: saved, restored as workers of a new deployment, by CRIU and by a driver of tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment, until
from tests.support import parked_snapshot
from tests.support.native_model import write_native_model

from dynamo.core.errors import ConfigError
from dynamo.operations.snapshot.criu import Criu

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux forks workers")

CHAT = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 6}
START = Callable[..., Deployment]


def criu_problem() -> str:
    try:
        Criu().check()
    except ConfigError as error:
        return error.message
    return ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the native engine with random weights."""
    return write_native_model(tmp_path_factory.mktemp("models") / "tiny")


def dynamo(*arguments: object, **environ: str) -> tuple[int, str]:
    line = [sys.executable, "-m", "dynamo", *map(str, arguments)]
    variables = {**os.environ, **environ}
    done = subprocess.run(line, capture_output=True, env=variables, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def answer(deployment: Deployment, **fields: Any) -> str:
    status, body = deployment.post("/v1/chat/completions", {**CHAT, **fields})
    assert status == 200
    return str(body["choices"][0]["message"]["content"])


def workers(deployment: Deployment) -> list[dict[str, Any]]:
    return [process for process in deployment.processes() if process["role"] == "worker"]


def check_workers(deployment: Deployment, expected: str) -> None:
    """Workers answer as others do, each with its own identity, and so does a restarted one."""
    assert "a snapshot is restored" in deployment.log.read_text()
    first = until(lambda: len(workers(deployment)) == 2 and workers(deployment))
    assert len({worker["instance"] for worker in first}) == 2
    assert answer(deployment, temperature=0) == expected
    assert len({answer(deployment, temperature=2) for _ in range(6)}) > 1
    os.kill(first[0]["pid"], signal.SIGKILL)
    again = until(
        lambda: [w for w in workers(deployment) if w["restarts"] and w["state"] == "ready"]
    )
    assert again[0]["instance"] not in {worker["instance"] for worker in first}
    assert answer(deployment, temperature=0) == expected
    log = deployment.log.read_text()
    assert "of the snapshot are of other files" not in log
    assert "the snapshot is not restored" not in log


@pytest.fixture
def expected(start: START, model: Path) -> str:
    """The answer of a worker that loaded the file."""
    deployment = start("out=native", model, "--threads", 1)
    text = answer(deployment, temperature=0)
    deployment.stop()
    return text


def test_workers_start_from_a_process_that_was_kept(
    start: START, model: Path, tmp_path: Path, expected: str
) -> None:
    program = (parked_snapshot.__file__,)
    folder = tmp_path / "snapshot"
    words = folder, model, "--workers", 2
    deployment = start(*words, command="snapshot", program=program)
    assert (folder.stat().st_mode & 0o777) == 0o700
    check_workers(deployment, expected)


@pytest.mark.skipif(bool(problem := criu_problem()), reason=problem)
def test_workers_start_from_a_snapshot_of_criu(
    start: START, model: Path, tmp_path: Path, expected: str, runtime_environ: dict[str, str]
) -> None:
    folder = tmp_path / "snapshot"
    secret = {"DYNAMO_SERVER__API_KEYS": "a-secret-of-the-environment"}
    code, output = dynamo("snapshot", "save", folder, "out=native", model, **secret)
    assert code == 0, output
    assert not any(b"a-secret-of" in file.read_bytes() for file in folder.iterdir())
    deployment = start("load", folder, "--workers", 2, command="snapshot")
    check_workers(deployment, expected)
    deployment.stop()
    restored = [int(file.stem[5:]) for file in folder.glob("core-*.img")]
    assert not any(Path(f"/proc/{pid}").exists() for pid in restored)
    deployment = start("load", folder, "--workers", 2, command="snapshot")
    check_workers(deployment, expected)
    beside = start("load", folder, command="snapshot")
    assert "another process has its process id" in beside.log.read_text()
    assert answer(beside, temperature=0) == expected

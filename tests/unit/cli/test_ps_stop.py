from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo.cli import main, ps, stop
from dynamo.core.errors import ConfigError, NotFound
from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.pids import start_ticks

Start = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(deployment, role)`: a process that only waits, entered as part of a deployment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    running: list[subprocess.Popen[bytes]] = []

    def begin(deployment: str, role: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["sleep", "60"])
        running.append(child)
        place = Deployment(deployment, tmp_path / "dynamo" / deployment)
        place.create_folder()
        place.write_record(
            ProcessRecord(
                deployment=deployment,
                role=role,
                name=role,
                pid=child.pid,
                address="http://127.0.0.1:8123" if role == "frontend" else "",
                status_url="http://127.0.0.1:1",
                state="ready",
                instance=f"{role}-{child.pid}",
                start_ticks=start_ticks(child.pid),
            )
        )
        return child

    yield begin
    for child in running:
        child.kill()
        child.wait()


def test_ps_lists_live_processes_only(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    live = start("http-8123", "frontend")
    dead = start("http-8123", "worker")
    dead.kill()
    dead.wait()

    assert main(["ps", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["deployment"] == "http-8123"]
    assert [row["pid"] for row in rows] == [live.pid]
    assert tuple(rows[0]) == ps.COLUMNS

    assert main(["ps"]) == 0
    assert "http://127.0.0.1:8123" in capsys.readouterr().out


def test_stop_ends_a_deployment_and_waits(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    processes = [start("chosen", "frontend"), start("chosen", "worker")]
    other = start("http-9", "worker")

    assert main(["stop", "8123"]) == 0

    assert capsys.readouterr().out == "stopped chosen\n"
    assert all(one.wait(1) != 0 for one in processes)
    assert other.poll() is None


def test_stop_gives_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(stop, "_send_signal", lambda process, number: None)
    place = Deployment("stubborn", tmp_path / "dynamo" / "stubborn")
    place.create_folder()
    place.write_record(
        ProcessRecord(
            deployment="stubborn",
            role="supervisor",
            name="supervisor",
            pid=os.getpid(),
            instance="me",
            start_ticks=start_ticks(os.getpid()),
        )
    )

    assert main(["stop", "stubborn", "--timeout", "0.01"]) == 1
    assert "still runs after 0.01 s" in capsys.readouterr().err


def test_which_deployment_is_meant() -> None:
    one, two = (Deployment(name, Path("/nowhere")) for name in ("http-1", "two"))

    assert stop.select_deployments([one], None) == [one]
    assert stop.select_deployments([one, two], "1") == [one]
    assert stop.select_deployments([one, two], "two") == [two]
    with pytest.raises(ConfigError, match="several") as caught:
        stop.select_deployments([one, two], None)
    assert caught.value.hint == f"--deployment names one of: {one.id}, {two.id}"
    with pytest.raises(NotFound, match="no deployment is called 'x'"):
        stop.select_deployments([one, two], "x")
    with pytest.raises(NotFound, match="no deployment runs"):
        stop.select_deployments([], None)


def test_where_several_run_each_command_says_how_to_name_one(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start("http-8123", "frontend")
    start("other", "worker")
    assert main(["stop"]) == 2
    told = capsys.readouterr().err
    assert "hint: name one of: " in told
    assert "other; or --all" in told
    assert main(["scale", "worker=2"]) == 2
    assert "--deployment names one of: http-8123" in capsys.readouterr().err
    assert main(["call", "Greeter.gret"]) == 1
    assert "deployments that run serves dynamo.Greeter.gret" in capsys.readouterr().err

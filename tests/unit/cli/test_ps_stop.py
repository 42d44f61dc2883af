from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.conftest import until

from dynamo.cli import main, ps, stop
from dynamo.cli.benchmark.bench_flags import parse_bench_config
from dynamo.cli.benchmark.bench_flags import parser as bench_parser
from dynamo.core.errors import ConfigError, NotFound
from dynamo.core.host.pids import is_stopped, start_ticks
from dynamo.runtime import deployment
from dynamo.runtime.deployment import STATE_ROOT_VARIABLE, Deployment, ProcessRecord
from dynamo.services.deployment.accelerators import cards_of_others

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return `start(deployment, role, root="dynamo")`, which starts a process that only waits, and
    registers it under a state root. Roots outside `tmp_path` may hold deployments of others."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    candidates = deployment._candidate_roots
    monkeypatch.setattr(
        deployment,
        "_candidate_roots",
        lambda environ: [root for root in candidates(environ) if tmp_path in root.parents],
    )
    running: list[subprocess.Popen[bytes]] = []

    def start_process(name: str, role: str, root: str = "dynamo") -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["sleep", "60"])
        running.append(child)
        folder = Deployment(name, tmp_path / root / name)
        folder.create_folder()
        folder.write_record(
            ProcessRecord(
                deployment=name,
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

    yield start_process
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
    assert tuple(rows[0]) == ps.KEYS

    assert main(["ps"]) == 0
    assert "http://127.0.0.1:8123" in capsys.readouterr().out


def test_a_stopped_process_is_not_ready(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    frozen, other = start("http-8123", "worker"), start("http-8123", "frontend")
    frozen.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(frozen.pid))

    assert main(["ps", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    states = {row["pid"]: row["state"] for row in rows}
    assert (states[frozen.pid], states[other.pid]) == ("hung", "ready")


def test_the_table_has_instances_and_addresses_without_incarnations() -> None:
    record = ProcessRecord(
        deployment="d",
        role="worker",
        name="worker-2",
        pid=1,
        namespace="dynamo",
        address="tcp://127.0.0.1:5/0123456789abcdef",
        instance="worker-2-3f9a1c42d0",
    )
    titles, row = ps.format_processes_table([record]).splitlines()
    cells = dict(zip(titles.split(), row.split(), strict=False))
    assert cells["INSTANCE"] == "worker-2-3f9a1c42d0"
    assert cells["ADDRESS"] == "tcp://127.0.0.1:5"


def test_deployments_of_one_name_in_two_state_roots_are_separate(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(STATE_ROOT_VARIABLE, str(tmp_path / "first"))
    own, other = start("same", "worker", "first"), start("same", "worker", "dynamo")
    folder = str(tmp_path / "dynamo" / "same")

    assert main(["ps", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = {row["pid"]: row["deployment"] for row in rows}
    assert (names[own.pid], names[other.pid]) == ("same", folder)
    assert main(["stop", "same"]) == 0
    assert own.wait(1) != 0
    assert other.poll() is None
    monkeypatch.setenv(STATE_ROOT_VARIABLE, str(tmp_path / "third"))
    third = start("same", "worker", "third")
    assert main(["stop", folder]) == 0
    assert capsys.readouterr().out == f"stopped same\nstopped {folder}\n"
    assert third.poll() is None


def test_ps_says_why_a_process_does_not_serve() -> None:
    record = ProcessRecord(deployment="d", role="frontend", name="frontend", pid=1)
    healthy = ps.format_processes_table([record]).splitlines()
    assert len(healthy) == 2
    unhealthy = replace(record, reason="tiny: no worker of this model is reachable")
    assert ps.format_processes_table([unhealthy]).splitlines() == [
        *healthy,
        "",
        "frontend: tiny: no worker of this model is reachable",
    ]


def test_stop_ends_a_deployment_and_waits(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    processes = [start("chosen", "frontend"), start("chosen", "worker")]
    other = start("http-9", "worker")

    assert main(["stop", "8123"]) == 0

    assert capsys.readouterr().out == "stopped chosen\n"
    assert all(process.wait(1) != 0 for process in processes)
    assert other.poll() is None


def test_stop_fails_after_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(stop, "_send_signal", lambda process, number: None)
    deployment = Deployment("stubborn", tmp_path / "dynamo" / "stubborn")
    deployment.create_folder()
    deployment.write_record(
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


def test_a_deployment_is_selected_by_name_or_port() -> None:
    first, second = (Deployment(name, Path("/nowhere")) for name in ("http-1", "two"))

    assert stop.select_deployments([first], None) == [first]
    assert stop.select_deployments([first, second], "1") == [first]
    assert stop.select_deployments([first, second], "two") == [second]
    with pytest.raises(ConfigError, match="several") as caught:
        stop.select_deployments([first, second], None)
    assert caught.value.hint == f"--deployment names one of: {first.id}, {second.id}"
    with pytest.raises(NotFound, match="no deployment 'x'"):
        stop.select_deployments([first, second], "x")
    with pytest.raises(NotFound, match="no deployment is running"):
        stop.select_deployments([], None)


def test_a_call_does_not_make_the_folder_of_a_discovery_plane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    assert main(["call", "Greeter.greet", "--discovery", f"file:{wrong}"]) == 1
    assert f"there is no folder {wrong}" in capsys.readouterr().err
    assert not wrong.exists()


def test_with_several_deployments_the_hint_lists_their_names(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start("http-8123", "frontend")
    start("other", "worker")
    assert main(["stop"]) == 2
    err = capsys.readouterr().err
    assert "hint: name one of: " in err
    assert "other; or --all" in err
    assert main(["scale", "worker=2"]) == 2
    assert "--deployment names one of: http-8123" in capsys.readouterr().err
    assert main(["call", "Greeter.gret"]) == 1
    assert "running deployments serves dynamo.Greeter.gret" in capsys.readouterr().err


def test_clients_find_the_running_deployment(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("chat", "bench", "explain"):
        assert main([command]) == 1
        assert "no deployment is running" in capsys.readouterr().err
    start("http-8123", "worker")
    with pytest.raises(NotFound, match="no HTTP port"):
        stop.find_server_url(None)
    start("http-8123", "frontend")
    assert parse_bench_config(bench_parser().parse([])).target.url == "http://127.0.0.1:8123"
    start("other", "frontend")
    with pytest.raises(ConfigError, match="several"):
        stop.find_server_url(None)
    assert stop.find_server_url("other") == "http://127.0.0.1:8123"


def test_ps_shows_the_cards_that_a_supervisor_gave_its_workers(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start("http-8123", "worker")
    supervisor = start("http-8123", "supervisor")
    folder = Deployment("http-8123", tmp_path / "dynamo" / "http-8123")
    (record,) = (each for each in folder.live_processes() if each.pid == supervisor.pid)
    folder.write_record(replace(record, cards_by_name={"worker": ("2", "GPU-4c")}))

    assert main(["ps", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["role"]: row["cards"] for row in rows} == {"supervisor": "", "worker": "2,GPU-4c"}
    assert cards_of_others() == {"2": "worker of http-8123", "GPU-4c": "worker of http-8123"}


def test_ps_shows_what_workers_share_once(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start("http-8123", "worker")
    supervisor = start("http-8123", "supervisor")
    folder = Deployment("http-8123", tmp_path / "dynamo" / "http-8123")
    (record,) = (each for each in folder.live_processes() if each.pid == supervisor.pid)
    folder.write_record(replace(record, shared_bytes=538_000_000))

    assert main(["ps"]) == 0
    assert capsys.readouterr().out.count("538 MB") == 1
    assert main(["ps", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["role"]: row["shared_bytes"] for row in rows} == {
        "supervisor": 538_000_000,
        "worker": 0,
    }

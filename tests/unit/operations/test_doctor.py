from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from dynamo.cli import main
from dynamo.core.settings import Settings
from dynamo.operations import doctor
from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.pids import start_ticks


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_check_finds_something() -> None:
    findings = list(doctor.run_checks(Settings()))

    assert len(findings) == len(doctor.CHECKS)
    assert {one.check: one.verdict for one in findings}["python"] == "ok"
    assert all(one.hint for one in findings if one.verdict == "warn")


def test_a_check_that_fails_by_itself_is_called_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def state_folder(_: Settings) -> doctor.Finding:
        raise PermissionError(errno.EACCES, "Permission denied", "/there")

    monkeypatch.setattr(doctor, "CHECKS", (state_folder,))
    (found,) = doctor.run_checks(Settings())
    assert (found.check, found.found) == ("state folder", "/there: Permission denied")


def test_a_port_in_use_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert main(["doctor", "--json", "--http-port", str(taken)]) == 1

    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert findings["port"]["verdict"] == "fail"
    assert str(taken) in findings["port"]["found"]


def test_what_to_do_stands_below_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--http-port", "0"])

    lines = capsys.readouterr().out.splitlines()
    model = next(at for at, line in enumerate(lines) if line.startswith("warn  model"))
    assert "-> fetched on first use" in lines[model + 1]


def test_a_deployment_that_is_not_looked_at_is_named(tmp_path: Path) -> None:
    assert doctor.routing(Settings()).found.endswith("no frontend of http-8000 runs")
    other = Deployment("other", tmp_path / "dynamo" / "other")
    other.create_folder()
    pid = os.getpid()
    about = {"role": "frontend", "name": "frontend", "instance": "i", "pid": pid}
    other.write_record(ProcessRecord(deployment="other", start_ticks=start_ticks(pid), **about))  # type: ignore[arg-type]
    hint = doctor.routing(Settings()).hint
    assert hint.startswith("--deployment looks at another:")
    assert "other" in hint.partition(":")[2]

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from dynamo.cli import main
from dynamo.core.host.pids import start_ticks
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import (
    EngineSettings,
    ModelSettings,
    RuntimeSettings,
    ServerSettings,
)
from dynamo.inference.engines.packages import ENGINE_PACKAGES, EngineStatus
from dynamo.operations.doctor import checks as doctor
from dynamo.runtime.deployment import Deployment, ProcessRecord


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_check_returns_a_finding() -> None:
    findings = list(doctor.run_checks(Settings()))

    assert len(findings) == len(doctor.CHECKS) + len(ENGINE_PACKAGES)
    assert {finding.check: finding.verdict for finding in findings}["python"] == "ok"
    assert all(finding.hint for finding in findings if finding.verdict == "warn")


def test_an_error_inside_a_check_keeps_the_name_of_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def state_folder(_: Settings) -> doctor.Finding:
        raise PermissionError(errno.EACCES, "Permission denied", "/there")

    monkeypatch.setattr(doctor, "CHECKS", (state_folder,))
    finding = next(doctor.run_checks(Settings()))
    assert (finding.check, finding.message) == ("state folder", "/there: Permission denied")


@pytest.mark.parametrize(
    ("kind", "status", "verdict", "text"),
    [
        ("native", EngineStatus("vllm", "0.32.0"), "ok", "vLLM 0.32.0 is usable"),
        ("native", EngineStatus("vllm", "", "missing", "x", is_installed=False), "ok", "missing"),
        ("vllm", EngineStatus("vllm", "", "missing", "x", is_installed=False), "fail", "missing"),
        ("native", EngineStatus("vllm", "0.1", "too old", "x"), "warn", "too old"),
    ],
)
def test_an_engine_must_be_usable_if_it_is_chosen_or_installed(
    kind: str,
    status: EngineStatus,
    verdict: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynamo.inference.engines.packages.engine_status", lambda name: status)
    settings = Settings(engine=EngineSettings(kind=kind))

    finding = next(doctor.engines(settings))

    assert (finding.check, finding.verdict) == ("engine vllm", verdict)
    assert text in finding.message
    assert finding.hint == (status.command if verdict != "ok" else "")


def test_a_port_in_use_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["doctor", "--json", "--http-port", str(port)]) == 1

    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["port"]["verdict"] == "fail"
    assert str(port) in findings["port"]["found"]


@pytest.mark.parametrize(("named", "verdict"), [("", "ok"), ("mine", "ok"), ("other", "fail")])
def test_the_port_of_the_running_deployment_is_no_failure(
    tmp_path: Path, named: str, verdict: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        deployment = Deployment("mine", tmp_path / "dynamo" / "mine")
        deployment.write_record(
            ProcessRecord(
                deployment="mine",
                role="frontend",
                name="frontend",
                pid=os.getpid(),
                address=f"http://127.0.0.1:{port}",
                start_ticks=start_ticks(os.getpid()),
            )
        )
        settings = Settings(
            server=ServerSettings(http_port=port), runtime=RuntimeSettings(deployment=named)
        )
        port_finding = {finding.check: finding for finding in doctor.run_checks(settings)}["port"]
    assert port_finding.verdict == verdict
    assert "deployment mine" in port_finding.message
    assert ("stop" in port_finding.hint) == (verdict == "fail")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DYNAMO_ETCD_ENDPOINTS": "http://127.0.0.1:1"}, "set the same security.secret"),
        (
            {
                "DYNAMO_SECURITY__SECRET": "0123456789abcdef",
                "DYNAMO_RUNTIME__PLANE_HOST": "0.0.0.0",
            },
            "set security.tls_ca",
        ),
    ],
)
def test_unprotected_planes_are_a_warning(
    environ: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    main(["doctor", "--json", "--http-port", "0"])
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["planes"]["verdict"] == "warn"
    assert expected in findings["planes"]["hint"]


def test_a_model_that_run_cannot_find_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor.model,))
    settings = Settings(model=ModelSettings(path=str(tmp_path / "no.gguf")))
    finding = next(doctor.run_checks(settings))
    assert finding.verdict == "fail"
    assert "GGUF" in finding.hint


def test_hints_are_printed_below_their_findings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--http-port", "0"])

    lines = capsys.readouterr().out.splitlines()
    model = next(index for index, line in enumerate(lines) if line.startswith("warn  model"))
    assert "-> downloaded on first use" in lines[model + 1]


def test_the_hint_names_other_running_deployments(tmp_path: Path) -> None:
    assert doctor.routing(Settings()).message.endswith("no frontend of http-8000 runs")
    other = Deployment("other", tmp_path / "dynamo" / "other")
    other.create_folder()
    pid = os.getpid()
    fields = {"role": "frontend", "name": "frontend", "instance": "i", "pid": pid}
    other.write_record(ProcessRecord(deployment="other", start_ticks=start_ticks(pid), **fields))  # type: ignore[arg-type]
    hint = doctor.routing(Settings()).hint
    assert hint.startswith("--deployment checks another:")
    assert "other" in hint.partition(":")[2]

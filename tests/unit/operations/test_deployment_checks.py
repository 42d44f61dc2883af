"""Doctor finds the faults of a running deployment."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.support.http_threads import serving

from dynamo.cli.ps import format_age
from dynamo.operations.doctor.checks import Finding
from dynamo.operations.doctor.deployment import check_readings
from dynamo.operations.running import STATUS_TIMEOUT_S, ProcessReading, read_processes
from dynamo.runtime.deployment import ProcessRecord

HEALTH = {"version": "1.0", "config": "a1", "reasons": {}, "planes": {"events": "nats://h"}}
WORKER_METRICS = "dynamo_worker_running_requests 3\ndynamo_worker_waiting_requests 2\n"


def worker(name: str = "worker-1", state: str = "ready", **fields: Any) -> ProcessReading:
    """Return the reading of a worker that differs from a healthy one by these facts."""
    record = ProcessRecord(deployment="d", role="worker", name=name, pid=7, state=state)  # type: ignore[arg-type]
    error, metrics = fields.pop("error", ""), fields.pop("metrics", WORKER_METRICS)
    return ProcessReading(record, HEALTH | fields, metrics, error)


def findings(*readings: ProcessReading) -> Mapping[str, Finding]:
    return {finding.check: finding for finding in check_readings(readings)}


def test_a_healthy_deployment_is_fine() -> None:
    checks = findings(worker(), worker("worker-2"))
    assert {finding.verdict for finding in checks.values()} == {"ok"}
    assert checks["processes"].message == "all 2 serve"


@pytest.mark.parametrize(
    ("other", "check", "verdict", "text"),
    [
        (worker("b", "hung"), "processes", "fail", "b is hung"),
        (worker("b", "restarting"), "processes", "fail", "b is restarting"),
        (worker("b", error="no answer"), "processes", "fail", "b: no answer"),
        (worker("b", reasons={"engine": "loading"}), "processes", "fail", "b: loading"),
        (worker("b", version="0.9"), "versions", "warn", "1.0: worker-1; 0.9: b"),
        (worker("b", config="b2"), "settings", "warn", "a1: worker-1; b2: b"),
        (worker("b", metrics=""), "metrics", "warn", "no metrics of their role: b"),
        (worker("b", limitations={"disk": "full"}), "workers", "warn", "b: disk: full"),
        (
            worker("b", unreachable_workers={"worker-3": "another secret"}),
            "workers",
            "fail",
            "no requests go to worker-3: another secret",
        ),
        (
            worker("b", planes={"away": {"events": "refused"}}),
            "connections",
            "fail",
            "events: refused (b)",
        ),
        (
            worker("b", alerts=[{"name": "X", "about": "y", "severity": "page", "advice": "Do."}]),
            "alerts",
            "fail",
            "X (y)",
        ),
    ],
)
def test_a_fault_is_named(other: ProcessReading, check: str, verdict: str, text: str) -> None:
    checks = findings(worker(), other)
    assert checks[check].verdict == verdict
    assert text in checks[check].message
    assert {name for name, each in checks.items() if each.verdict != "ok"} == {check}


def test_the_load_of_a_process_is_read_from_its_metrics() -> None:
    assert worker().load == (3, 2)
    assert worker(metrics="process_threads 1\n").load is None


def test_a_process_without_an_answer_has_the_reason() -> None:
    record = ProcessRecord(
        deployment="d", role="worker", name="w", pid=7, status_url="http://127.0.0.1:9"
    )
    (reading,) = read_processes([record])
    assert "http://127.0.0.1:9 does not answer" in reading.error


def test_many_processes_are_read_at_once() -> None:
    """A report waits for processes that stand still once, not once for each few of them."""
    count = 40
    everyone_asks = threading.Barrier(count)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            everyone_asks.wait(STATUS_TIMEOUT_S)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket.listen(count)
    url = f"http://127.0.0.1:{server.server_port}"
    records = [
        ProcessRecord(deployment="d", role="worker", name=f"w{n}", pid=7, status_url=url)
        for n in range(count)
    ]
    with serving(server):
        readings = read_processes(records, metrics=False)
    assert not [reading.error for reading in readings if reading.error]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, ""),
        (42.4, "42s"),
        (119.0, "119s"),
        (1020.0, "17m"),
        (18_100.0, "5h"),
        (260_000.0, "3d"),
    ],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert format_age(seconds) == text

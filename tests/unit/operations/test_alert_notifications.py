"""Notifications of alerts: one for a rule, to the log, a webhook and a command, with advice for the
settings in force."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.settings import Settings
from dynamo.operations.alerts.conditions import AlertCondition, AlertRule, Series
from dynamo.operations.alerts.evaluator import Firing
from dynamo.operations.alerts.notifications import AlertManager, AlertType

RULE = AlertRule(
    "WorkerLost",
    "ticket",
    (AlertCondition(Series("deaths"), 0),),
    "Requests wait.",
    "Raise {router.max_queue_wait}.",
    by=("name",),
    advice_where={"router.mode=kv": "In mode kv, more.", "router.mode=adaptive": "Not this."},
)


def lost(*names: str) -> list[Firing]:
    return [Firing(RULE, {"name": name}, 1.0) for name in names]


def settings_with(**alerts: Any) -> Settings:
    settings = Settings()
    router = replace(settings.router, mode="kv", max_queue_wait=7.0)
    return replace(settings, router=router, alerts=replace(settings.alerts, **alerts))


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """A server that keeps what is posted to `/good`, and fails at other paths."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200 if self.path == "/good" else 500)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


async def test_alerts_of_a_rule_are_one_notification_and_end_with_another(
    receiver: tuple[str, list[Any]],
) -> None:
    url, bodies = receiver
    manager = AlertManager(settings=settings_with(webhook=f"{url}/good"), source="http-8000")
    await manager.update(lost("worker-1", "worker-2"))
    await manager.update(lost("worker-1", "worker-2"))
    await manager.update(lost("worker-2"))
    await manager.update([])
    names = [[alert["labels"]["about"] for alert in body["alerts"]] for body in bodies]
    assert names == [["worker-1", "worker-2"], ["worker-1"], ["worker-2"]]
    assert [body["status"] for body in bodies] == ["firing", "resolved", "resolved"]
    assert bodies[0]["commonLabels"]["deployment"] == "http-8000"
    assert not manager.active


async def test_the_advice_knows_the_settings() -> None:
    manager = AlertManager(settings=settings_with())
    await manager.update(lost("worker-1"))
    advice = manager.active["WorkerLost", "worker-1"].advice
    assert advice == "Raise router.max_queue_wait = 7.0. In mode kv, more."


async def test_a_silenced_alert_is_active_and_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    manager = AlertManager(settings=settings_with(silenced=("WorkerLost",)))
    with caplog.at_level(logging.INFO):
        await manager.update(lost("worker-1"))
        await manager.update([])
    assert not caplog.records
    assert not manager.alerts


async def test_a_command_reads_the_notification(tmp_path: Path) -> None:
    target = tmp_path / "alert.json"
    program = "import sys, shutil; shutil.copyfileobj(sys.stdin, open(sys.argv[1], 'w'))"
    command = f'{sys.executable} -c "{program}" {target}'
    await AlertManager(settings=settings_with(command=command)).send_alert(
        AlertType.LOW_THROUGHPUT, "too few tokens"
    )
    body = json.loads(target.read_text())
    assert body["alerts"][0]["labels"]["alertname"] == "low_throughput"
    assert body["commonAnnotations"]["summary"] == "too few tokens"


@pytest.mark.parametrize(
    ("sink", "value"), [("command", "false"), ("command", "/no/such/program"), ("webhook", "/bad")]
)
async def test_a_sink_that_fails_is_counted_and_told(
    sink: str, value: str, receiver: tuple[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    value = receiver[0] + value if sink == "webhook" else value
    manager = AlertManager(settings=settings_with(**{sink: value}))
    await manager.update(lost("worker-1"))
    assert manager.failed_notifications == 1
    assert "an alert was not sent" in caplog.text
    assert manager.active

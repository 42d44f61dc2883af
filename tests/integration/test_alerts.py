"""A deployment tells of its faults: alerts with a notification, and a report beside hung and dead
processes, in which nothing is secret."""

from __future__ import annotations

import json
import os
import signal
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.cluster import Cluster

from dynamo.runtime.deployment import ProcessRecord

KEY, PROMPT, SECRET = "sk-planted-key-417", "the planted prompt", "planted-secret-733"
PASSWORD = "planted-password-58"


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("alerts")
    command = f"tee -a {folder / 'notifications'}"
    webhook = f"http://someone:{PASSWORD}@127.0.0.1:9/alerts"
    flags = (
        "--alerts.webhook",
        webhook,
        "--alerts.interval",
        "0.5",
        "--alerts.command",
        command,
        "--log-prompts",
    )
    with Cluster(
        tiny_model,
        folder,
        workers=2,
        flags=(*flags, "--log-requests", "--observer"),
        environ={"DYNAMO_SERVER__API_KEYS": KEY, "DYNAMO_SECURITY__SECRET": SECRET},
    ) as cluster:
        yield cluster


def ask(cluster: Cluster, key: str, limit_s: float = 20) -> int:
    """Send a chat with the prompt and a time limit, and return the status."""
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": PROMPT}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            "x-dynamo-timeout": str(limit_s),
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def active(cluster: Cluster) -> set[tuple[str, str]]:
    """Return the names of the active alerts, and what they are about."""
    (supervisor,) = cluster.processes("supervisor")
    alerts: list[dict[str, Any]] = cluster.health_body(supervisor)["alerts"]
    return {(alert["name"], alert["about"]) for alert in alerts}


def named(cluster: Cluster, name: str) -> ProcessRecord:
    return next(record for record in cluster.processes("worker") if record.name == name)


async def test_faults_are_alerts_and_a_report_tells_of_them(cluster: Cluster) -> None:
    assert ask(cluster, KEY) == 200
    assert ask(cluster, "sk-another-key") == 401
    assert ask(cluster, KEY, 0.01) == 504
    assert not active(cluster)

    os.kill(named(cluster, "worker-1").pid, signal.SIGKILL)
    await cluster.wait_for(lambda: ("WorkerLost", "worker-1") in active(cluster))
    await cluster.wait_for(cluster.all_ready)
    while "deadline_exceeded" not in await cluster.command("why", "--json", "--api-key", KEY):
        pass  # a frontend that stands still publishes no stories
    (frontend,) = cluster.processes("frontend")
    os.kill(frontend.pid, signal.SIGSTOP)
    os.kill(named(cluster, "worker-2").pid, signal.SIGSTOP)
    archive = cluster.folder / "report.tar.gz"
    await cluster.command("report", str(archive), "--http-port", str(cluster.port))
    os.kill(frontend.pid, signal.SIGCONT)
    await cluster.wait_for(lambda: ("WorkerHung", "worker-2") in active(cluster))
    notified = (cluster.folder / "notifications").read_text()
    assert '"alertname":"WorkerLost"' in notified

    assert archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive) as packed:
        files = {
            member.name.removeprefix("dynamo-report/"): stream.read().decode()
            for member in packed.getmembers()
            if (stream := packed.extractfile(member)) is not None
        }
    assert "frontend:" in files["missing.txt"]
    assert "most recent call first" in files["logs/worker-1.txt"]
    assert "process died name=worker-1" in files["logs/supervisor.txt"]
    assert json.loads(files["settings.json"])["server.api_keys"] == "***"
    assert "status=200" in files["logs/frontend.txt"]
    assert "State:\tT" in files["kernel/frontend.txt"]
    planted = (KEY, PROMPT, SECRET, PASSWORD)
    assert not [name for name, text in files.items() for word in planted if word in text]
    groups = json.loads(files["stories.json"])
    assert "deadline_exceeded" in {group["worst"]["end"] for group in groups}, files["missing.txt"]

"""Processes whose event loops do not answer: they are found, killed and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.client import chat
from tests.faults.cluster import Cluster

from dynamo.runtime.deployment import ProcessRecord


@pytest.fixture(scope="module")
def two_frontends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hung")
    with Cluster(tiny_model, folder, workers=2, frontends=2) as cluster:
        yield cluster


def health(cluster: Cluster) -> dict[str, Any]:
    """Return the supervisor's /health, whatever its status."""
    return cluster.health_body(cluster.processes("supervisor")[0])


@pytest.mark.attack(
    "one of two frontends and one of two workers are stopped (SIGSTOP)",
    "both are killed after 5 s and replaced; /health and `dynamo ps` say so; no later request hangs",
)
def test_stopped_processes_are_replaced(
    two_frontends: Cluster, outcome: Callable[[str], None]
) -> None:
    """New requests that would hang at the stopped frontend are answered after its death."""
    stopped = [two_frontends.processes(role)[0] for role in ("frontend", "worker")]
    pids = {record.pid for record in stopped}
    began = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    two_frontends.wait_blocking(lambda: pids == {r.pid for r in children(two_frontends, "hung")})
    two_frontends.wait_blocking(lambda: len(health(two_frontends)["reasons"]) == len(pids))
    reported_s = time.monotonic() - began
    reasons = health(two_frontends)["reasons"]
    assert sorted(reasons) == sorted(record.name for record in stopped)
    assert "does not answer" in str(reasons)
    two_frontends.wait_blocking(
        lambda: (
            not pids & {r.pid for r in children(two_frontends, "ready")}
            and len(children(two_frontends, "ready")) == 4
        )
    )
    replaced_s = time.monotonic() - began
    answers = [chat(two_frontends.port, timeout_s=5.0) for _ in range(16)]
    assert [answer.status for answer in answers] == [200] * 16
    assert 5.0 <= replaced_s < 15.0
    restarts = health(two_frontends)["restarts"]
    assert str(restarts).count("did not answer for 5 s") == 2
    assert sum(record.restarts for record in children(two_frontends, "ready")) == 2
    outcome(f"reported after {reported_s:.1f} s, replaced after {replaced_s:.1f} s")


def children(cluster: Cluster, state: str) -> list[ProcessRecord]:
    """Return the frontends and workers in a state."""
    records = [*cluster.processes("frontend"), *cluster.processes("worker")]
    return [record for record in records if record.state == state]


@pytest.mark.attack(
    "all processes are stopped for 6.5 s and continued, the supervisor first",
    "no process is killed: the supervisor counts only time in which it ran",
)
def test_a_stopped_deployment_continues_whole(
    two_frontends: Cluster, outcome: Callable[[str], None]
) -> None:
    """A suspended machine or container loses no process."""
    roles = ("supervisor", "frontend", "worker")
    pids = [record.pid for role in roles for record in two_frontends.processes(role)]
    for pid in reversed(pids):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6.5)
    os.kill(pids[0], signal.SIGCONT)
    time.sleep(0.5)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGCONT)
    two_frontends.wait_blocking(lambda: chat(two_frontends.port).status == 200)
    time.sleep(1.0)
    assert pids == [record.pid for role in roles for record in two_frontends.processes(role)]
    assert not any(r.state == "hung" for role in roles for r in two_frontends.processes(role))
    outcome(f"all {len(pids)} processes serve on")

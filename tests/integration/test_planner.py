"""A planner in a deployment: its orders, its restart, and what a user sees of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Deployment, until

FAST = ("--speedup-ratio", "1000", "--model-name", "tiny")
PLANNER = ("--planner", "--planner.policy", "static", "--planner.sizes", "worker=2")


def dynamo(deployment: Deployment, *words: str) -> str:
    """Return the output of a command."""
    line = [sys.executable, "-m", "dynamo", *words]
    return subprocess.run(
        line, capture_output=True, check=True, env=deployment.environ, text=True
    ).stdout


def workers(deployment: Deployment) -> int:
    return sum(
        each["role"] == "worker" and each["state"] == "ready" for each in deployment.processes()
    )


def planner(deployment: Deployment) -> dict[str, object]:
    """Return the ready planner process."""
    return until(
        lambda: next(
            (
                each
                for each in deployment.processes()
                if each["role"] == "planner" and each["state"] == "ready"
            ),
            None,
        )
    )


def explain(deployment: Deployment) -> str:
    return dynamo(deployment, "plan", f"http-{deployment.port}", "--explain")


def test_a_planner_scales_goes_on_after_its_death_and_respects_hands(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    deployment = start("out=mock", tiny_model, *FAST, *PLANNER)
    first = planner(deployment)
    until(lambda: workers(deployment) == 2)
    until(lambda: "was carried out" in explain(deployment))
    assert "worker 1 -> 2: the sizes are fixed" in explain(deployment)
    os.kill(int(str(first["pid"])), signal.SIGKILL)
    until(lambda: planner(deployment)["pid"] != first["pid"])
    dynamo(deployment, "scale", "worker=1", "--deployment", str(deployment.port))
    until(lambda: "somebody set 1" in explain(deployment))
    assert workers(deployment) == 1
    url = str(planner(deployment)["status_url"])
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert 'dynamo_planner_desired_workers{kind="worker"} 1' in metrics


def test_of_two_planners_the_older_one_acts(
    start: Callable[..., Deployment], tiny_model: Path, tmp_path: Path
) -> None:
    both = (*FAST, *PLANNER, "--discovery", f"file:{tmp_path / 'both'}")
    first = start("out=mock", tiny_model, *both)
    until(lambda: workers(first) == 2)
    second = start("out=mock", tiny_model, *both)
    until(lambda: "another planner acts; this one waits" in second.log.read_text())
    until(lambda: workers(second) == 1)
    first.stop()
    until(lambda: workers(second) == 2)

#!/usr/bin/env python3
"""Time of `dynamo report` while processes of a deployment stand still or are dead, and a search for
planted secrets in it.

    python benchmarks/fault_report.py [--workers 4]

Each scene starts a deployment with mock workers, API keys, a secret, a webhook with a password and a
log of prompts, and sends requests. `frozen` stops a frontend and kills a worker, `worse` also stops
a worker and the observer, `supervisor` also stops the supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from targets import Targets
from tests.conftest import write_tiny_model
from tests.faults.cluster import Cluster

LIMIT_S = 10.0
PLANTED = {
    "key": "sk-planted-key-417",
    "prompt": "theplantedprompt",
    "secret": "planted-secret-733",
    "password": "planted-password-58",
}
SCENES: dict[str, tuple[str, ...]] = {
    "healthy": (),
    "frozen": ("frontend",),
    "worse": ("frontend", "observer", "worker"),
    "supervisor": ("frontend", "observer", "worker", "supervisor"),
}
"""The roles of which a process stands still, by scene."""


def _ask(port: int, number: int) -> None:
    prompt = f"{PLANTED['prompt']} {number}"
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {PLANTED['key']}"},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        response.read()


async def _run_scene(model: Path, workers: int, stopped: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        webhook = f"http://someone:{PLANTED['password']}@127.0.0.1:9/alerts"
        flags = ("--log-prompts", "--log-requests", "--observer", "--alerts.webhook", webhook)
        environ = {
            "DYNAMO_SERVER__API_KEYS": PLANTED["key"],
            "DYNAMO_SECURITY__SECRET": PLANTED["secret"],
        }
        with Cluster(model, Path(folder), workers=workers, flags=flags, environ=environ) as cluster:
            for number in range(20):
                await asyncio.to_thread(_ask, cluster.port, number)
            await asyncio.sleep(1.5)  # stories are published once a second
            pids = [cluster.processes(role)[-1].pid for role in stopped]
            if stopped:
                os.kill(cluster.processes("worker")[0].pid, signal.SIGKILL)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            archive = cluster.folder / "report.tar.gz"
            began = time.monotonic()
            await cluster.command("report", str(archive))
            took_s = time.monotonic() - began
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            return {"seconds": round(took_s, 2), **_search(archive)}


def _search(archive: Path) -> dict[str, Any]:
    with tarfile.open(archive) as packed:
        texts = {
            member.name: stream.read().decode()
            for member in packed.getmembers()
            if (stream := packed.extractfile(member)) is not None
        }
    leaks = [f"{kind} in {name}" for name, text in texts.items() for kind in _planted_in(text)]
    missing = texts["dynamo-report/missing.txt"].splitlines()
    return {"files": len(texts), "missing": [line[:80] for line in missing], "planted": leaks}


def _planted_in(text: str) -> list[str]:
    return [kind for kind, word in PLANTED.items() if word in text]


def main() -> int:
    """Run the scenes and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    targets, result = Targets(), {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        for name, stopped in SCENES.items():
            scene = asyncio.run(_run_scene(model, args.workers, stopped))
            result[name] = scene
            targets.at_most(f"{name}: seconds", scene["seconds"], LIMIT_S)
            targets.at_most(f"{name}: planted words", len(scene["planted"]), 0)
    targets.print_report(result, f"dynamo report, {args.workers} workers")
    return targets.exit_code


if __name__ == "__main__":
    sys.exit(main())

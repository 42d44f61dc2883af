#!/usr/bin/env python3
"""Measure what the console costs a browser: bytes and time of its main thread.

    python benchmarks/console_page.py [WORKERS]

An observer in this process samples random loads of made-up workers once a second, and has done so for 15 minutes.
Headless Chromium, which must be installed, shows each page for 20 s after it has opened for 5 s. Bytes are those on
the wire. Targets with 512 workers: 400 KB to open, 40 KB/s after, 50 ms of the main thread an update.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.chromium import Chromium

from dynamo.application.app import RouterApplication
from dynamo.application.console.handler import CONSOLE_PATH, ConsoleHandler, DeploymentStream
from dynamo.application.observer import ObserverHandler
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.core.clock import SystemClock
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.values import Load
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.telemetry.metrics import Registry

BLOCKS, OPEN_S, WATCHED_S, SAMPLED_S = 60_000, 5, 20, 900


class LateClock(SystemClock):
    """A clock of which the Unix time is `late_s` behind."""

    late_s = 0

    def wall(self) -> float:  # type: ignore[override]
        """Return that time."""
        return time.time() - self.late_s


class MadeUpDeployment:
    """Workers that are not there. A `ConsoleSource`."""

    frontends: Sequence[str] = ()

    def __init__(self, workers: int) -> None:
        clock = LateClock()
        self.observer = DeploymentObserver(clock)
        self.names = [f"worker-{n + 1}-{random.getrandbits(40):010x}" for n in range(workers)]
        for clock.late_s in range(SAMPLED_S, -1, -1):
            self._sample()

    def _sample(self) -> None:
        self.observer.sample(
            {
                name: Load(
                    running=random.randrange(60),
                    waiting=random.randrange(5),
                    prefill_tokens=random.randrange(9_000),
                    active_blocks=random.randrange(BLOCKS),
                    cached_blocks=random.randrange(BLOCKS),
                    total_blocks=BLOCKS,
                )
                for name in self.names
            }
        )

    async def run(self, stream: DeploymentStream) -> None:
        """Sample, and update the viewers, until cancelled."""
        while True:
            self._sample()
            await stream.update()
            await asyncio.sleep(1)

    async def show_deployment(self) -> Mapping[str, Any]:
        """Return what the console shows of it."""
        activity = self.observer.show_activity(60)
        processes = {
            name: {
                "name": name.rpartition("-")[0],
                "role": "worker",
                "state": "ready",
                "model": "Llama-3.3-70B-Instruct",
                "engine": "vllm",
                "since": 1_700_000_000,
            }
            for name in self.names
        }
        return {
            "deployment": "made-up",
            "processes": processes,
            **activity,
            "workers": {name: [*each.values()] for name, each in activity["workers"].items()},
            "stories": 0,
            "alerts": (),
            "causes": (),
            "slo": {"reason": "none is promised"},
            "routing": await self.observer.report(300),
        }

    async def read_logs(self, process: str) -> Sequence[str]:  # noqa: ARG002 - of a protocol
        """Return no lines."""
        return ()

    async def list_settings(self) -> Any:
        """Return no settings."""
        return ()


async def main(workers: int) -> None:
    """Serve and measure."""
    deployment, server, clock = MadeUpDeployment(workers), ServerSettings(), SystemClock()
    console, observer = ConsoleHandler(deployment), deployment.observer
    application = RouterApplication(
        server,
        "127.0.0.1",
        {
            **ObserverHandler(observer).routes(),
            **console.routes(),
        },
        clock,
        Registry(),
        reasons=dict,
        facts=dict,
        page_path=CONSOLE_PATH,
        open_pages=console.pages(),
    )
    http = HttpServer(
        application.handle,
        HttpLimits.without_bodies(server),
        clock,
        on_error=application.on_error,
        check_headers=application.check_headers,
    )
    port = await http.start("127.0.0.1", 0)
    sampling = asyncio.ensure_future(deployment.run(console.stream))
    await asyncio.to_thread(measure, port, deployment.names[0])
    sampling.cancel()
    await http.stop(0)


def measure(port: int, name: str) -> None:
    """Print what each page costs. Blocks."""
    with tempfile.TemporaryDirectory() as folder, Chromium(Path(folder)) as browser:
        browser.resize(1180)
        browser.call("Performance.enable")
        for page in ("overview", "workers", "worker/" + name):
            browser.open("about:blank")
            first = browser.received
            browser.open(f"http://127.0.0.1:{port}{CONSOLE_PATH}#{page}")
            time.sleep(OPEN_S)
            before = task_seconds(browser)  # reads what has happened, too
            opened = browser.received
            time.sleep(WATCHED_S)
            browser.run("1")
            rate = (browser.received - opened) / WATCHED_S / 1e3
            share = (task_seconds(browser) - before) / WATCHED_S
            print(
                f"{page.partition('/')[0]}: {(opened - first) / 1e3:.0f} KB in {OPEN_S} s, then {rate:.0f} KB/s, ",
                end="",
            )
            print(f"{share * 1e3:.0f} ms of the main thread a second")


def task_seconds(browser: Chromium) -> float:
    """Return the CPU time of the main thread."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "ThreadTime"))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 512))

#!/usr/bin/env python3
"""Provoke alerts in real deployments with mock workers, and time how they begin and end.

    PYTHONPATH=. benchmarks/alerts_live.py [--scenes lost,hung] [--at-once 3]

Each scene has a deployment of its own, with default settings of alerts, that first serves requests
for a quarter of a minute. Then it injects a cause, waits for its alerts, ends the cause, and waits
until they are resolved. Seconds to fire count from the cause, seconds to resolve from its end. The
target is that each alert fires within 60 s of its cause. Windows of growth delay the end: 60 s for
most alerts, 300 s for WorkerFlapping and BudgetBurnsFast.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from targets import Targets
from tests.conftest import write_tiny_model
from tests.faults.cluster import Cluster
from tests.faults.stream_client import ask

GIVE_UP_S = 120.0
RESOLVE_LIMIT_S = 420.0
BEFORE_S = 15.0
POLL_S = 0.5
OPEN_FILES = 1024
DISK_BYTES = 8 << 20
SLOW_PROMPTS = "constant:25,20"
"""A prompt of 300 tokens takes 7.5 s, in which no answer of its worker goes on."""


class SceneCluster(Cluster):
    """A deployment that may start slowly, since the machine is shared."""

    def __init__(self, model: Path, folder: Path, **options: Any) -> None:
        super().__init__(model, folder, **options)
        self.model = model

    def wait_blocking(self, condition: Callable[[], object], timeout_s: float = 20) -> None:
        """Wait until the condition is true. Blocks."""
        super().wait_blocking(condition, timeout_s * 5)


@asynccontextmanager
async def lost(cluster: SceneCluster) -> AsyncIterator[None]:
    """A worker is killed."""
    cluster.kill("worker")
    yield


@asynccontextmanager
async def flapping(cluster: SceneCluster) -> AsyncIterator[None]:
    """A worker is killed each time that it serves, three times."""
    name = cluster.ready("worker")[0].name
    for _ in range(3):
        await _kill_when_ready(cluster, name)
    yield


async def _kill_when_ready(cluster: SceneCluster, name: str) -> None:
    while not (pids := [each.pid for each in cluster.ready("worker") if each.name == name]):
        await asyncio.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    while pids[0] in {each.pid for each in cluster.ready("worker")}:
        await asyncio.sleep(0.05)


@asynccontextmanager
async def hung(cluster: SceneCluster) -> AsyncIterator[None]:
    """A worker stands still until the watchdog kills it."""
    cluster.kill("worker", number=signal.SIGSTOP)
    yield


@asynccontextmanager
async def refused(cluster: SceneCluster) -> AsyncIterator[None]:
    """A worker with another block size serves the same model."""
    command = [*(sys.executable, "-P", "-m", "dynamo", "run", "in=none", "out=mock")]
    flags = ["--block-size", "32", "--model-name", "tiny", "--deployment", "other"]
    with (cluster.folder / "other.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, str(cluster.model), *flags, env=cluster.environ, stdout=log, stderr=log
        )
    yield
    process.terminate()
    await process.wait()


@asynccontextmanager
async def no_workers(cluster: SceneCluster) -> AsyncIterator[None]:
    """The only worker dies again and again while it starts."""

    async def keep_killing() -> None:
        while True:
            for record in cluster.processes("worker"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(keep_killing())
    yield
    task.cancel()


def _during(load: Callable[[SceneCluster], Any]) -> Callable[[SceneCluster], Any]:
    """Return a cause: the load, again and again."""

    @asynccontextmanager
    async def cause(cluster: SceneCluster) -> AsyncIterator[None]:
        async def run() -> None:
            while True:
                await load(cluster)

        task = asyncio.create_task(run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    return cause


async def flood(cluster: SceneCluster) -> None:
    """Many more requests than the worker has places, for longer than they may wait."""
    await asyncio.gather(*(ask(cluster.port, key, 50) for key in range(30)))


async def long_prompts(cluster: SceneCluster) -> None:
    """Answers to short prompts, and long prompts beside them."""
    key = time.monotonic_ns() % 1_000_000
    answers = [asyncio.create_task(ask(cluster.port, key + at, 100, words=2)) for at in range(8)]
    await asyncio.sleep(1.0)
    await asyncio.gather(*(ask(cluster.port, key + 50 + at, 2, words=60) for at in range(2)))
    await asyncio.gather(*answers)


async def cached_prompts(cluster: SceneCluster) -> None:
    """The same prompts again and again, of which the workers' memory holds a part."""
    for first in range(0, 36, 3):
        await asyncio.gather(*(ask(cluster.port, first + at, 1, words=250) for at in range(3)))


@asynccontextmanager
async def plane_away(cluster: SceneCluster) -> AsyncIterator[None]:
    """The NATS server is killed, and started again."""
    assert cluster.nats is not None
    await asyncio.to_thread(cluster.nats.kill)
    yield
    await asyncio.to_thread(cluster.nats.start)


async def lose_prefill_worker(cluster: SceneCluster) -> None:
    """The prefill worker is killed while it computes prompts."""
    key = time.monotonic_ns() % 1_000_000
    asks = [asyncio.create_task(ask(cluster.port, key + at, 4, words=100)) for at in range(6)]
    await asyncio.sleep(0.5)
    cluster.kill("prefill_worker")
    await asyncio.gather(*asks)
    while not cluster.all_ready():
        await asyncio.sleep(0.1)


@asynccontextmanager
async def store_away(cluster: SceneCluster) -> AsyncIterator[None]:
    """The object store of a tier is killed, and started again."""
    store = cluster.s3
    assert store is not None
    await asyncio.to_thread(store.kill)
    async with _during(cached_prompts)(cluster):
        yield
        await asyncio.to_thread(store.start)


async def stalls(cluster: SceneCluster) -> None:
    """A worker stands still for 0.2 s."""
    pid = cluster.kill("worker", number=signal.SIGSTOP)
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(0.3)


@asynccontextmanager
async def disk_full(cluster: SceneCluster) -> AsyncIterator[None]:
    """The disk of the state folder is filled, and a worker is killed."""
    path = cluster.folder / "dynamo" / "filler"
    with path.open("wb", buffering=0) as file:

        def fill() -> None:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

        fill()
        cluster.kill("worker")
        for _ in range(1500):  # takes what becomes free
            await asyncio.sleep(0.002)
            fill()
        yield
    path.unlink()


@asynccontextmanager
async def many_connections(cluster: SceneCluster) -> AsyncIterator[None]:
    """Clients keep almost as many idle connections as the frontend may have, and open others for
    those that it closes."""
    connections: list[socket.socket] = []

    async def keep_open() -> None:
        while True:
            for connection in connections[:]:
                with contextlib.suppress(BlockingIOError):
                    connection.recv(1)
                    connection.close()
                    connections.remove(connection)
            while len(connections) < OPEN_FILES - 70:
                connection = socket.create_connection(("127.0.0.1", cluster.port), 10)
                connection.setblocking(False)
                connections.append(connection)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(keep_open())
    yield
    task.cancel()
    for connection in connections:
        connection.close()


@asynccontextmanager
async def upgraded(cluster: SceneCluster) -> AsyncIterator[None]:
    """The package is replaced by a newer one, and the worker is started again."""
    path = Path(cluster.environ["PYTHONPATH"]) / "dynamo" / "__init__.py"
    text = path.read_text()
    path.write_text(text.replace('"0.1.0"', '"0.2.0"'))
    await cluster.command("restart", "worker")
    yield
    path.write_text(text)
    await cluster.command("restart", "worker")


class Scene(NamedTuple):
    """A cause, the alerts that it provokes, and the arguments of its deployment."""

    cause: Callable[[SceneCluster], AbstractAsyncContextManager[None]]
    alerts: Sequence[str]
    options: Mapping[str, Any] = {}


KV = ("--router-mode", "kv")
SCENES: dict[str, Scene] = {
    "flapping": Scene(flapping, ("WorkerFlapping",)),
    "flood": Scene(
        _during(flood),
        ("CapacityShort", "BudgetBurnsFast"),
        {"workers": 1, "flags": ("--max-num-seqs", "2", "--max-queue-wait", "1")},
    ),
    "lost": Scene(lost, ("WorkerLost",)),
    "hung": Scene(hung, ("WorkerHung",)),
    "refused": Scene(refused, ("WorkerUnreachable",), {"flags": KV, "planes": "servers"}),
    "no workers": Scene(no_workers, ("NoWorkers",), {"workers": 1}),
    "long prompts": Scene(
        _during(long_prompts),
        ("FirstTokenLate", "TokensStall"),
        {"workers": 1, "timing": SLOW_PROMPTS},
    ),
    "cache": Scene(
        _during(cached_prompts), ("CacheThrashing",), {"flags": (*KV, "--num-blocks", "130")}
    ),
    "plane": Scene(plane_away, ("PlaneAway",), {"planes": "servers"}),
    "transfer": Scene(
        _during(lose_prefill_worker),
        ("TransferFailing",),
        {
            "workers": 0,
            "prefill": 1,
            "decode": 1,
            "flags": (*KV, "--disagg", "always", "--max-num-batched-tokens", "256"),
            "timing": "constant:0.5,20",
        },
    ),
    "tier": Scene(
        store_away,
        ("TierFailing",),
        {
            "s3": True,
            "flags": (*KV, "--num-blocks", "130", "--kv-remote-url", "s3://kv-blocks/a"),
            "timing": "constant:0.2,20",
        },
    ),
    "stalls": Scene(_during(stalls), ("LoopStalls",), {"workers": 1}),
    "disk": Scene(disk_full, ("DiskFull",)),
    "files": Scene(
        many_connections,
        ("FilesNearLimit",),
        {"prefix": ("bash", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "bash")},
    ),
    "versions": Scene(upgraded, ("VersionsDiffer",), {"workers": 1}),
}


def _active(cluster: SceneCluster) -> set[str]:
    """Return the names of the active alerts."""
    with contextlib.suppress(OSError, ValueError):
        (supervisor,) = cluster.processes("supervisor")
        return {alert["name"] for alert in cluster.health_body(supervisor)["alerts"]}
    return set()


async def _measure(cluster: SceneCluster, scene: Scene) -> dict[str, Any]:
    """Run a scene, and return the seconds by alert."""
    fired: dict[str, float] = {}
    resolved: dict[str, float] = {}
    others: set[str] = set()

    async def follow(times: dict[str, float], *, active: bool, limit_s: float) -> None:
        began = time.monotonic()
        while len(times) < len(scene.alerts) and time.monotonic() - began < limit_s:
            names = await asyncio.to_thread(_active, cluster)
            others.update(names)
            for name in scene.alerts:
                if (name in names) is active and name not in times:
                    times[name] = round(time.monotonic() - began, 1)
            await asyncio.sleep(POLL_S)

    await asyncio.gather(*(ask(cluster.port, key, 4) for key in range(4)))
    await asyncio.sleep(BEFORE_S)
    firing = asyncio.create_task(follow(fired, active=True, limit_s=GIVE_UP_S))
    async with scene.cause(cluster):
        await firing
    await follow(resolved, active=False, limit_s=RESOLVE_LIMIT_S)
    return {
        **{name: (fired.get(name), resolved.get(name)) for name in scene.alerts},
        "also active": sorted(others - set(scene.alerts)),
    }


def _run(name: str, folder: Path, model: Path) -> dict[str, Any]:
    """Run a scene in a deployment of its own. Blocks."""
    scene, own = SCENES[name], folder / name.replace(" ", "-")
    own.mkdir()
    options = dict(scene.options)
    with ExitStack() as stack:
        if scene.cause is disk_full:
            disk = own / "dynamo"  # a small file system in memory, which root may mount
            disk.mkdir(mode=0o700)
            kind = ["-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs"]
            subprocess.run(["mount", *kind, disk], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", disk], check=True)
        if scene.cause is upgraded:
            source = Path(__file__).resolve().parents[1] / "src"
            subprocess.run(["cp", "-r", source, own / "src"], check=True)
            options["environ"] = {"PYTHONPATH": str(own / "src")}
        options["flags"] = (*options.get("flags", ()), "--observer")
        cluster = SceneCluster(model, own, **options)
        try:
            with cluster:
                result = asyncio.run(_measure(cluster, scene))
        except Exception as error:
            result = {"error": repr(error)[-300:]}
    print(name, result, flush=True)
    return result


def main() -> int:
    """Run the scenes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--at-once", type=int, default=3)
    args = parser.parse_args()
    names = args.scenes.split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as threads:
        model = write_tiny_model(Path(folder) / "tiny")
        results = threads.map(lambda name: _run(name, Path(folder), model), names)
        result = dict(zip(names, results, strict=True))
    targets = Targets()
    for name in names:
        for alert in SCENES[name].alerts:
            fire_s, resolve_s = result[name].get(alert, (None, None))
            targets.at_most(f"{alert} fires", GIVE_UP_S if fire_s is None else fire_s, 60, " s")
            late_s = RESOLVE_LIMIT_S + 1 if resolve_s is None else resolve_s
            targets.at_most(f"{alert} is resolved", late_s, RESOLVE_LIMIT_S, " s")
    targets.print_report(result, "alerts")
    return targets.exit_code


if __name__ == "__main__":
    sys.exit(main())

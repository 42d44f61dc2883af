"""The disk of the state folder is full, and processes die."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.attacks.client import chat
from tests.faults.cluster import Cluster

DISK_BYTES = 512 << 10


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system in memory at `folder`. Skips the test without the right to."""
    folder.mkdir(mode=0o700)
    options = f"size={DISK_BYTES},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Fill the disk, and take every block that becomes free until the end of the block."""
    full, stopping = threading.Event(), threading.Event()

    def fill() -> None:
        with (disk / "filler").open("wb", buffering=0) as file:
            while not stopping.is_set():
                try:
                    file.write(bytes(4096))
                except OSError:
                    full.set()
                    stopping.wait(0.002)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        full.wait()
        yield
    finally:
        stopping.set()
        thread.join()
        (disk / "filler").unlink()


@pytest.mark.attack(
    "the disk of the state folder is full; a worker and the frontend are killed",
    "both serve again within 5 s; `dynamo scale` names the folder and exits 1",
)
def test_processes_are_replaced_on_a_full_disk(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    """Both are replaced, and growth is refused until there is room again."""
    disk = tmp_path / "dynamo"
    with small_disk(disk), Cluster(tiny_model, tmp_path, workers=2) as cluster:
        with filled(disk):
            worker_s = _kill_and_wait(cluster, "worker", lambda: _ready(cluster, "worker") == 2)
            frontend_s = _kill_and_wait(cluster, "frontend", lambda: _answers(cluster))
            with pytest.raises(AssertionError, match="no space left") as refused:
                asyncio.run(cluster.command("scale", "worker=3"))
            assert str(disk) in str(refused.value)
            assert "no space left" in str(cluster.health_body(cluster.processes("supervisor")[0]))
        cluster.wait_blocking(
            lambda: "no space" not in str(cluster.health_body(cluster.processes("supervisor")[0]))
        )
        asyncio.run(cluster.command("scale", "worker=3"))
    assert worker_s < 10
    assert frontend_s < 10
    outcome(f"the worker serves after {worker_s:.1f} s, the frontend after {frontend_s:.1f} s")


def _kill_and_wait(cluster: Cluster, role: str, serves: Callable[[], bool]) -> float:
    pid = cluster.kill(role)
    began = time.monotonic()
    cluster.wait_blocking(lambda: all(record.pid != pid for record in cluster.ready(role)))
    cluster.wait_blocking(serves)
    return time.monotonic() - began


def _ready(cluster: Cluster, role: str) -> int:
    return len(cluster.ready(role))


def _answers(cluster: Cluster) -> bool:
    with suppress(OSError):
        return chat(cluster.port).status == 200
    return False

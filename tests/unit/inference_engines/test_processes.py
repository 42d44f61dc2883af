"""The processes of an engine end with their owner."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dynamo.core.errors import WorkerFailed
from dynamo.inference.engines import processes as module
from dynamo.inference.engines.processes import EngineProcesses

GRANDPARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
OWNER = f"""
import asyncio, subprocess, sys
from dynamo.inference.engines.processes import EngineProcesses

async def main():
    processes = EngineProcesses()
    await processes.open()
    with processes.starting():
        child = subprocess.Popen([sys.executable, "-c", {GRANDPARENT + "; sys.stdin.read()"!r}],
            start_new_session=True)
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def lives(process: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


async def test_no_process_outlives_an_owner_that_is_killed() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=pipe, stdin=pipe) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()) for _ in range(2)]
        assert all(map(lives, pids))
        owner.send_signal(signal.SIGKILL)
        while any(map(lives, pids)):
            await asyncio.sleep(0.01)


async def test_closing_kills_what_is_left_and_nothing_else() -> None:
    processes = EngineProcesses()
    await processes.open()
    with processes.starting():
        owned = subprocess.Popen(["sleep", "60"])
    with subprocess.Popen(["sleep", "60"]) as other:
        await processes.close()
        assert owned.wait() == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


async def test_closing_kills_what_a_start_still_starts() -> None:
    processes, started, proceed = EngineProcesses(), threading.Event(), threading.Event()
    owned: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        with processes.starting():
            started.set()
            proceed.wait()
            owned.append(subprocess.Popen(["sleep", "60"]))
            return owned[0].wait()

    await processes.open()
    call = asyncio.create_task(asyncio.to_thread(start))
    await asyncio.to_thread(started.wait)
    closing = asyncio.create_task(processes.close())
    await asyncio.sleep(0)
    proceed.set()
    assert await call == -signal.SIGKILL
    await closing
    with pytest.raises(WorkerFailed, match="was stopped"), processes.starting():
        pass


async def test_a_start_that_ends_after_closing_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.0)
    processes = EngineProcesses()
    await processes.open()
    with processes.starting():
        await processes.close()
        owned = subprocess.Popen(["sleep", "60"])
    assert owned.wait() == -signal.SIGKILL


@pytest.mark.parametrize("fails", [True, False])
async def test_processes_end_though_the_engine_does_not(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHUTDOWN_TIMEOUT_S", 0.01)
    processes = EngineProcesses()
    await processes.open()
    with processes.starting():
        owned = subprocess.Popen(["sleep", "60"])

    async def shut_down() -> None:
        if fails:
            raise RuntimeError("cannot")
        await asyncio.Event().wait()

    if fails:
        with pytest.raises(RuntimeError, match="cannot"):
            await processes.close_after(shut_down)
    else:
        await processes.close_after(shut_down)
    assert owned.wait() == -signal.SIGKILL

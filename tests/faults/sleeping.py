"""Faults of workers that sleep."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.faults.cluster import Cluster
from tests.faults.fault import Fault


async def sleepers_killed(cluster: Cluster) -> str:
    """Kill one worker while it falls asleep, another one asleep, and the third while it wakes."""

    async def inject() -> None:
        falling, asleep, waking = cluster.ready("worker")
        await cluster.command("sleep", asleep.name)
        await cluster.command("sleep", waking.name)
        os.kill(asleep.pid, signal.SIGKILL)
        wakes = asyncio.create_task(cluster.try_command("wake", waking.name))
        await cluster.wait_for(lambda: len(cluster.ready("worker")) >= 2)
        os.kill(waking.pid, signal.SIGKILL)
        await wakes
        await cluster.wait_for(lambda: len(cluster.ready("worker")) == 3)
        falls = asyncio.create_task(cluster.try_command("sleep", falling.name))
        await cluster.wait_for(lambda: "falls asleep" in cluster.log)
        os.kill(falling.pid, signal.SIGKILL)
        await falls

    summary = await cluster.assert_unaffected(inject, tokens=300, pause_s=3.0)
    await cluster.wait_for(lambda: len(cluster.ready("worker")) == 3)
    return summary


async def all_sleep(cluster: Cluster) -> str:
    """Let all workers sleep during streams: those move to the next one, the last ones end."""

    async def inject() -> None:
        await cluster.command("sleep", "tiny", "--level", "2")

    summary = await cluster.assert_unaffected(inject, pause_s=3.0)
    assert not cluster.ready("worker")
    answers = await cluster.ask_all(range(24), 20)
    assert all(answer.complete for answer in answers), answers
    assert len(cluster.ready("worker")) == 1
    first_s = max(answer.first_s for answer in answers)
    return f"{summary}; 24 of 24 new requests waited up to {first_s:.1f} s for the one woken"


SLEEPING = (
    Fault("workers are killed while they fall asleep, sleep and wake up", "streams continue on other workers; new workers are started", sleepers_killed),
    Fault("all workers sleep during streams", "streams end or move first; new requests wake one worker", all_sleep, quick=True),
)  # fmt: skip

"""Faults of prompts that a prefill worker computes for a decode worker.

The streams of a fault start one after another. When it is injected, some prompts are queued, some
are in a chunk or between two chunks, and some answers are written.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable

from tests.faults.cluster import Cluster, InjectFault
from tests.faults.fault import Fault
from tests.faults.stream_client import Answer, ask, body_of, read

ROLES = ("prefill_worker", "decode_worker")
FLAGS = ("--disagg", "always", "--router-mode", "kv", "--max-num-batched-tokens", "256")
TIMING = "constant:0.1,20"
"""A chunk takes 46 ms, and a prompt of `WORDS` about 9 chunks."""
WORDS = 300
STREAMS = 12
APART_S = 0.06
BUSY = (
    "running_requests",
    "waiting_requests",
    "active_blocks",
    "held_requests",
    "arriving_requests",
)
_next_key = itertools.count(1000)


def busy(cluster: Cluster, *roles: str) -> float:
    """Return how many requests and blocks the workers of these roles have."""
    total = 0.0
    for role in roles or ROLES:
        for record in cluster.ready(role):
            metrics = cluster.metrics(record)
            total += sum(metrics[f"dynamo_worker_{name}"] for name in BUSY)
    return total


async def wait_until_idle(cluster: Cluster, timeout_s: float = 2.0) -> float:
    """Wait until no worker has a request or a referenced block. Returns the waiting time."""
    return await cluster.wait_for(lambda: not busy(cluster), timeout_s)


async def run_staggered(
    cluster: Cluster, inject: InjectFault, *, tokens: int = 40, idle_s: float = 2.0
) -> list[Answer]:
    """Start streams with prompts that no worker has, and inject a fault in their midst. Asserts
    that each is complete and the same as without the fault, and that all blocks are free again."""
    keys = [next(_next_key) for _ in range(STREAMS)]

    async def start(key: int, delay_s: float) -> Answer:
        await asyncio.sleep(delay_s)
        return await ask(cluster.port, key, tokens, words=WORDS)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(start(key, at * APART_S)) for at, key in enumerate(keys)]
        await asyncio.sleep(STREAMS * APART_S)
        await inject()
    answers = [task.result() for task in tasks]
    for answer in answers:
        assert answer.complete, (answer, cluster.log[-3000:])
    await wait_until_idle(cluster, idle_s)
    asked_again = (ask(cluster.port, key, tokens, words=WORDS) for key in keys)
    for answer, again in zip(answers, await asyncio.gather(*asked_again), strict=True):
        assert again.complete, again
        assert answer.text == again.text, (answer.text, again.text)
    return answers


def describe(answers: list[Answer]) -> str:
    """Return the part of the outcome that all faults share."""
    longest = max(answer.longest_gap_s for answer in answers)
    first = max(answer.first_s for answer in answers)
    return (
        f"{len(answers)} of {len(answers)} complete and the same, first token after at most "
        f"{first:.1f} s, longest gap {longest * 1e3:.0f} ms"
    )


async def is_remote_again(cluster: Cluster) -> None:
    """Wait until a prefill worker computes a new prompt."""
    end = time.monotonic() + 10
    while not (await ask(cluster.port, next(_next_key), 2, words=WORDS)).prefill_worker:
        assert time.monotonic() < end, cluster.log[-3000:]


async def prefill_killed(cluster: Cluster) -> str:
    async def inject() -> None:
        cluster.kill("prefill_worker")

    summary = describe(await run_staggered(cluster, inject))
    await cluster.wait_for(cluster.all_ready)
    await is_remote_again(cluster)
    return summary


async def decode_killed(cluster: Cluster) -> str:
    async def inject() -> None:
        cluster.kill("decode_worker")

    summary = describe(await run_staggered(cluster, inject))
    await cluster.wait_for(cluster.all_ready)
    return summary


async def prefill_frozen(cluster: Cluster) -> str:
    """Stop a prefill worker for less than the 5 s after which its supervisor replaces it."""

    async def inject() -> None:
        pid = cluster.kill("prefill_worker", number=signal.SIGSTOP)
        try:
            await asyncio.sleep(2.5)
        finally:
            os.kill(pid, signal.SIGCONT)

    answers = await run_staggered(cluster, inject)
    assert max(answer.first_s for answer in answers) < 10, answers
    await is_remote_again(cluster)
    return describe(answers)


async def prefill_slow(cluster: Cluster) -> str:
    """Stop a prefill worker four fifths of the time."""
    pid = cluster.processes("prefill_worker")[0].pid

    async def inject() -> None:
        for _ in range(10):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.16)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.04)

    return describe(await run_staggered(cluster, inject))


async def decode_frozen(cluster: Cluster) -> str:
    """Stop a decode worker until its supervisor replaces it."""

    async def inject() -> None:
        cluster.kill("decode_worker", number=signal.SIGSTOP)

    summary = describe(await run_staggered(cluster, inject, idle_s=12))
    await cluster.wait_for(cluster.all_ready)
    return summary


async def _pins_after(cluster: Cluster, kill: Callable[[int], Awaitable[None]]) -> float:
    """Stop a decode worker while its prompts are computed, then call `kill` with its pid. Returns
    after how many seconds the prefill worker held no block for it."""
    await wait_until_idle(cluster)
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                answer = Answer(next(_next_key))
                body = body_of(answer.key, 4, WORDS)
                tasks.append(group.create_task(read(cluster.port, answer, body, 50.0)))
            await cluster.wait_for(lambda: busy(cluster, "prefill_worker"))
            pids = [record.pid for record in cluster.processes("decode_worker")]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1.0)
            assert busy(cluster, "prefill_worker"), "no prompt was held"
            began = time.monotonic()
            for pid in pids:
                await kill(pid)
            await cluster.wait_for(lambda: not busy(cluster, "prefill_worker"), 15)
            took = time.monotonic() - began
            for task in tasks:
                task.cancel()
    finally:
        await cluster.wait_for(cluster.all_ready)
    return took


async def pins(cluster: Cluster) -> str:
    """Kill decode workers whose prompts wait at the prefill worker; then leave them frozen."""

    async def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    killed_s = await _pins_after(cluster, kill)
    frozen_s = await _pins_after(cluster, lambda _: asyncio.sleep(0))
    assert killed_s < 1.0, killed_s
    assert frozen_s < 11.0, frozen_s
    return f"blocks free {killed_s:.2f} s after the kill, {frozen_s:.1f} s after the freeze"


async def clients_gone(cluster: Cluster) -> str:
    """Disconnect all clients, whose requests are at all stages."""
    times_s = []
    for _ in range(3):
        await wait_until_idle(cluster)
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                answer = Answer(next(_next_key))
                body = body_of(answer.key, 500, WORDS)
                tasks.append(group.create_task(read(cluster.port, answer, body, 50.0)))
                await asyncio.sleep(APART_S)
            assert busy(cluster, "prefill_worker")
            assert busy(cluster, "decode_worker")
            for task in tasks:
                task.cancel()
        times_s.append(await wait_until_idle(cluster))
    return f"all blocks of both are free after at most {max(times_s) * 1e3:.0f} ms"


async def roles_changed(cluster: Cluster) -> str:
    """Make a decode worker a prefill worker while it writes answers, and back."""
    record = cluster.ready("decode_worker")[0]
    new: list[Answer] = []

    async def inject() -> None:
        nonlocal record  # the one that answers most: new prompts may all go to one of them
        workers = cluster.ready("decode_worker")
        record = max(
            workers, key=lambda each: cluster.metrics(each)["dynamo_worker_running_requests"]
        )
        await cluster.command("roles", record.name, "prefill")
        new.extend(await cluster.ask_all(range(6), 20))

    answers = await run_staggered(cluster, inject, tokens=100)
    begun = sum(answer.worker == record.instance for answer in answers)
    assert begun, "no answer was begun by the worker"
    assert all(answer.complete for answer in answers), answers
    assert all(answer.complete and answer.worker != record.instance for answer in new), new
    await cluster.command("roles", record.name, "decode")
    await cluster.wait_for(lambda: len(cluster.ready("decode_worker")) == 2)
    return f"{describe(answers)}; the {begun} answers begun there are complete, 6 new ones went elsewhere"


_PAIRS = {
    "workers": 0,
    "prefill": 1,
    "decode": 2,
    "flags": FLAGS,
    "timing": TIMING,
}
DISAGGREGATED = (
    Fault("a prefill worker is killed, prompts at every stage", "decode workers compute the rest; the new prefill worker is used", prefill_killed, quick=True, **_PAIRS),
    Fault("a decode worker is killed, prompts at every stage", "its streams continue on the other one", decode_killed, quick=True, **_PAIRS),
    Fault("a prefill worker is frozen for 2.5 s", "decode workers compute the rest", prefill_frozen, **_PAIRS),
    Fault("a decode worker is frozen", "its streams continue on the other one", decode_frozen, **_PAIRS),
    Fault("a prefill worker is slow (stopped 4/5 of the time)", "every stream is complete", prefill_slow, **_PAIRS),
    Fault("decode workers die or freeze before they took the blocks", "the prefill worker frees them within 1 s, or 11 s", pins, **_PAIRS),
    Fault("clients of prompts at every stage disconnect", "the blocks of both workers are free", clients_gone, quick=True, **_PAIRS),
    Fault("the role of a decode worker changes while it writes answers", "its answers go on with their blocks at the other one, new ones too", roles_changed, quick=True, **_PAIRS),
)  # fmt: skip

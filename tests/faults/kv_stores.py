"""Faults of the disk and of the object store that hold KV blocks below the workers.

Prompts are asked for twice, so that their blocks are stored, and again while a fault is there. The
workers' own memory holds a few of them only.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.fault import Fault
from tests.faults.stream_client import Answer, ask

SHARED = ("--num-blocks", "40", "--router-mode", "kv")
DISK = (*SHARED, "--kv-disk-size", "2GB", "--kv-disk-path", "kv")
S3 = (*SHARED, "--kv-remote-url", "s3://kv-blocks/faults")
TIMING = "constant:0.2,20"
"""A prompt of `WORDS` takes about 100 ms, which its blocks save."""
WORDS = 80
PROMPTS = 6
TOKENS = 4
_next_key = itertools.count(5000)


async def ask_all(cluster: Cluster, keys: list[int]) -> list[Answer]:
    """Ask for all prompts at once. Asserts that the answers are complete."""
    async with asyncio.TaskGroup() as group:
        asks = [group.create_task(ask(cluster.port, key, TOKENS, words=WORDS)) for key in keys]
    answers = [task.result() for task in asks]
    for answer in answers:
        assert answer.complete, (answer, cluster.log[-3000:])
    return answers


async def run_with_fault(
    cluster: Cluster, inject: Callable[[], Awaitable[None]], *, first_s: float = 6.0
) -> str:
    """Store the blocks of new prompts, inject a fault and ask for them again, twice. Asserts that
    the texts are those of before, and returns a sentence for the table."""
    keys = [next(_next_key) for _ in range(PROMPTS)]
    expected = []
    for key in keys:
        first, second = [(await ask_all(cluster, [key]))[0].text for _ in range(2)]
        assert first == second
        expected.append(first)
    assert [answer.text for answer in await ask_all(cluster, keys)] == expected
    await asyncio.sleep(0.2)  # the stores are written in the background
    await inject()
    slowest_s = 0.0
    for _ in range(2):
        answers = await ask_all(cluster, keys)
        assert [answer.text for answer in answers] == expected
        slowest_s = max(slowest_s, *(answer.first_s for answer in answers))
    assert slowest_s < first_s, f"a first token after {slowest_s:.1f} s"
    count = 2 * len(keys)
    return f"{count} of {count} complete and the same, first token after at most {slowest_s:.1f} s"


def limitations(cluster: Cluster) -> str:
    """Return what the workers report that does not work."""
    return " ".join(
        str(cluster.health_body(record)["limitations"]) for record in cluster.ready("worker")
    )


def block_files(cluster: Cluster, name: str = "blocks") -> list[Path]:
    """Return the files of this name, one of each worker."""
    paths = sorted((cluster.folder / "kv").glob(f"*/{name}"))
    assert paths
    return paths


def flip_bits(path: Path, every: int) -> None:
    """Flip a bit in every `every`th byte that is not zero."""
    data = bytearray(path.read_bytes())
    for at in [at for at in range(len(data)) if data[at]][::every]:
        data[at] ^= 1 << at % 8
    path.write_bytes(data)


async def killed_and_warm(cluster: Cluster) -> str:
    async def inject() -> None:
        for record in cluster.processes("worker"):
            os.kill(record.pid, signal.SIGKILL)
        await cluster.wait_for(cluster.all_ready, 30)

    summary = await run_with_fault(cluster, inject)
    assert len(block_files(cluster)) == 2, "each worker has a part"
    return summary


async def torn_and_flipped(cluster: Cluster) -> str:
    """Cut the indexes in the middle of a record, flip bits in the blocks, kill the workers."""

    async def inject() -> None:
        for index in block_files(cluster, "index"):
            os.truncate(index, index.stat().st_size * 2 // 3 | 1)
        for path in block_files(cluster):
            flip_bits(path, 50)
        for record in cluster.processes("worker"):
            os.kill(record.pid, signal.SIGKILL)
        await cluster.wait_for(cluster.all_ready, 30)

    return await run_with_fault(cluster, inject)


async def disk_full(cluster: Cluster) -> str:
    """Forbid the workers to write to files, and allow it again."""
    pids = [record.pid for record in cluster.processes("worker")]

    async def inject() -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        key = next(_next_key)
        for _ in range(3):
            await ask_all(cluster, [key])

    try:
        summary = await run_with_fault(cluster, inject)
        assert "takes no KV blocks" in limitations(cluster)
    finally:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return f"{summary}; /health names the folder and the error"


async def disk_broken(cluster: Cluster) -> str:
    """Cut the files off, so that reads fail."""

    async def inject() -> None:
        for path in block_files(cluster):
            os.truncate(path, 0)

    return await run_with_fault(cluster, inject)


async def store_away(cluster: Cluster) -> str:
    server = cluster.s3
    assert server is not None

    async def inject() -> None:
        await asyncio.to_thread(server.kill)

    summary = await run_with_fault(cluster, inject)
    assert "does not answer" in limitations(cluster)
    return f"{summary}; /health says that it does not answer"


async def store_frozen(cluster: Cluster) -> str:
    server = cluster.s3
    assert server is not None

    async def inject() -> None:
        server.signal(signal.SIGSTOP)

    try:
        return await run_with_fault(cluster, inject, first_s=12.0)
    finally:
        server.signal(signal.SIGCONT)


KV_STORES = (
    Fault("workers with KV blocks on disk are killed", "the new ones load them", killed_and_warm, workers=2, flags=DISK, timing=TIMING),
    Fault("the index of KV blocks is torn, bits of blocks flip, the workers are killed", "damaged blocks are computed again", torn_and_flipped, quick=True, workers=2, flags=DISK, timing=TIMING),
    Fault("the disk for KV blocks is full", "workers serve on without storing, and say so", disk_full, quick=True, workers=2, flags=DISK, timing=TIMING),
    Fault("the disk for KV blocks cannot be read", "blocks are computed again", disk_broken, workers=2, flags=DISK, timing=TIMING),
    Fault("the object store is killed", "blocks are computed again, and /health says so", store_away, workers=2, flags=S3, timing=TIMING, s3=True),
    Fault("the object store is frozen (SIGSTOP)", "blocks are computed again after a limited time", store_frozen, workers=2, flags=S3, timing=TIMING, s3=True),
)  # fmt: skip

"""The table of faults. Each fault is a function of a cluster that asserts the expected result.

The function returns a sentence with its measurements.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.disaggregation import DISAGGREGATED
from tests.faults.fault import Fault
from tests.faults.kv_stores import KV_STORES
from tests.faults.pods import PODS
from tests.faults.sleeping import SLEEPING
from tests.faults.stream_client import Answer, KeptConnection, ask, body_of, read

from dynamo.communication.discovery import open_discovery
from dynamo.core.errors import PlaneUnavailable


def assert_complete(answers: Sequence[Answer]) -> None:
    """Assert that every answer is complete."""
    incomplete = [answer for answer in answers if not answer.complete]
    assert not incomplete, incomplete[:2]


async def killed(cluster: Cluster) -> str:
    async def inject() -> None:
        cluster.kill("worker")

    summary = await cluster.assert_unaffected(inject, pause_s=1.5)
    await cluster.wait_for(lambda: len(cluster.ready("worker")) == 3)
    return summary


async def all_killed(cluster: Cluster) -> str:
    async def inject() -> None:
        for record in cluster.processes("worker"):
            os.kill(record.pid, signal.SIGKILL)

    return await cluster.assert_unaffected(inject, streams=12, pause_s=15.0)


async def only_worker_killed(cluster: Cluster) -> str:
    """Send new requests during the restart of the only worker, and after it was drained."""
    new: list[Answer] = []

    async def inject() -> None:
        cluster.kill("worker")
        new.extend(await cluster.ask_all(range(16), 20))

    summary = await cluster.assert_unaffected(inject, streams=8, pause_s=15.0)
    assert_complete(new)
    waited_s = max(answer.first_s for answer in new)
    await cluster.command("scale", "worker=0")
    assert "none is registered" in (await ask(cluster.port, 0, timeout_s=5)).error
    return f"{summary}; 16 of 16 new requests waited up to {waited_s:.1f} s; 503 once it is drained"


async def frozen(cluster: Cluster) -> str:
    """Stop a worker for less than the 5 s after which its supervisor replaces it."""
    texts = await cluster.texts(range(24), 100)

    async def inject() -> None:
        pid = cluster.kill("worker", number=signal.SIGSTOP)
        try:
            new, _ = await asyncio.gather(cluster.ask_all(range(24), 20), asyncio.sleep(2.5))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert all(answer.complete and answer.seconds < 2.5 for answer in new), new

    answers = await cluster.ask_during(inject)
    for answer in answers:
        assert answer.complete, (answer, cluster.log[-2000:])
        assert answer.text == texts[answer.key]
    longest = max(answer.longest_gap_s for answer in answers)
    assert longest <= 2.1, longest
    readmitted_s = await cluster.wait_for(lambda: "answers again" in cluster.log)
    return f"longest gap {longest:.2f} s; readmitted {readmitted_s:.1f} s after SIGCONT"


async def slow(cluster: Cluster) -> str:
    """Stop a worker four fifths of the time."""
    pid = cluster.processes("worker")[0].pid

    async def inject() -> None:
        for _ in range(20):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.16)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.04)

    summary = await cluster.assert_unaffected(inject, pause_s=2.0)
    assert "does not answer" not in cluster.log
    assert "ejected" not in cluster.log
    return summary + ", no worker ejected"


async def overloaded(cluster: Cluster) -> str:
    """Send four times as many streams as the workers have slots."""
    answers = await cluster.ask_all(range(48), 60)
    bad = [answer for answer in answers if not answer.complete and not answer.retry_after]
    assert not bad, bad[:2]
    complete = sum(answer.complete for answer in answers)
    assert complete >= 12
    assert "does not answer" not in cluster.log
    assert "ejected" not in cluster.log
    others = ", the others refused with Retry-After" if complete < 48 else ""
    return f"{complete} of 48 complete{others}; no worker ejected"


async def drained(cluster: Cluster) -> str:
    async def inject() -> None:
        began = time.monotonic()
        await cluster.command("drain", "worker-1")
        assert time.monotonic() - began < 8.0

    summary = await cluster.assert_unaffected(inject, tokens=200, pause_s=1.5)
    assert len(cluster.processes("worker")) == 2
    await cluster.command("scale", "worker=3")
    return summary


async def rolled(cluster: Cluster) -> str:
    stop = asyncio.Event()
    texts = await cluster.texts(range(1, 12, 2), 100) | await cluster.texts(range(0, 12, 2), 5)
    done: list[Answer] = []

    async def loop(key: int) -> None:
        async with KeptConnection(cluster.port) as connection:
            while not stop.is_set():
                tokens = 100 if key % 2 else 5
                done.append(await ask(cluster.port, key, tokens, connection=connection))

    async with asyncio.TaskGroup() as group:
        for key in range(12):
            group.create_task(loop(key))
        await cluster.command("restart", "worker")
        for _ in range(3):
            await cluster.command("restart", "frontend")
        stop.set()
    bad = [answer for answer in done if not (answer.complete and answer.text == texts[answer.key])]
    assert not bad, bad[:2]
    return f"all processes replaced under load: {len(done)} of {len(done)} complete and the same"


async def frontend_killed(cluster: Cluster) -> str:
    pids = [record.pid for record in cluster.processes("frontend")]

    async def inject() -> None:
        os.kill(pids[0], signal.SIGKILL)

    answers = await cluster.ask_during(inject)
    broken = [answer for answer in answers if not answer.complete]
    assert all(answer.error.startswith("connection") for answer in broken), broken
    assert len(broken) < len(answers)
    after = await cluster.ask_all(range(12), 20)
    # A request may hit the closing socket.
    assert sum(answer.complete for answer in after) >= 11, after
    return (
        f"{len(broken)} streams of the killed frontend broken, "
        f"{len(answers) - len(broken)} others complete"
    )


async def hung_up(cluster: Cluster) -> str:
    """Disconnect clients during their streams and before the first token."""
    requests = ("running_requests", "waiting_requests")

    def count(*names: str) -> float:
        metrics = [cluster.metrics(record) for record in cluster.ready("worker")]
        return sum(values[f"dynamo_worker_{name}"] for values in metrics for name in names)

    answers = [Answer(key) for key in range(12)]
    begun, waiting = answers[:6], answers[6:]
    async with asyncio.TaskGroup() as group:

        def start_reading(answers: list[Answer], words: int) -> list[asyncio.Task[None]]:
            bodies = [(answer, body_of(answer.key, 2000, words)) for answer in answers]
            return [group.create_task(read(cluster.port, *arguments, 50.0)) for arguments in bodies]

        tasks = start_reading(begun, 8)
        for answer in begun:
            await answer.begun.wait()
        tasks += start_reading(waiting, 300)
        await cluster.wait_for(lambda: count(*requests) == 12)
        for task in tasks:
            task.cancel()
    assert all(answer.tokens for answer in begun)
    assert not any(answer.tokens for answer in waiting)
    took = await cluster.wait_for(lambda: not count(*requests, "active_blocks"))
    assert took < 2.0
    return f"all engines idle and all blocks free after {took:.1f} s"


async def reads_nothing(cluster: Cluster) -> str:
    """Leave 16 choices unread with a small receive buffer, so that they wait in the frontend."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", cluster.port))
        data = json.dumps(body_of(99, 1000, 8, n=16)).encode()
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            % (len(data), data)
        )
        summary = await cluster.assert_unaffected(lambda: asyncio.sleep(0), tokens=200, pause_s=1.0)
        client.setblocking(False)
        received_bytes = sum(map(len, received(client)))
    assert received_bytes < 128 << 10, f"the frontend sent {received_bytes} bytes"
    return summary


def received(sock: socket.socket) -> Iterator[bytes]:
    """Yield the bytes that the kernel has received."""
    with suppress(BlockingIOError):
        while data := sock.recv(1 << 16):
            yield data


async def poisoned(cluster: Cluster) -> str:
    """Kill every worker that runs this request."""
    asking = asyncio.get_running_loop().create_task(ask(cluster.port, 1, 20, words=40))
    deaths = 0
    try:
        while not asking.done() and deaths < 6:
            for record in cluster.ready("worker"):
                try:
                    running = cluster.metrics(record)["dynamo_worker_running_requests"]
                except OSError:
                    continue
                if running:
                    await asyncio.sleep(0.3)
                    os.kill(record.pid, signal.SIGKILL)
                    deaths += 1
                    await asyncio.sleep(0.2)
            await asyncio.sleep(0.05)
    finally:
        answer = await asking
    assert answer.status == 500, answer
    assert "poisoned_request" in answer.error, answer
    assert deaths == 3
    return "500 poisoned_request after the third death"


async def etcd_away(cluster: Cluster) -> str:
    etcd = cluster.etcd
    assert etcd is not None
    await asyncio.to_thread(etcd.kill)
    try:
        summary = await cluster.assert_unaffected(lambda: asyncio.sleep(8), pause_s=1.5)
        killed_pid = cluster.kill("worker")
        answers = await cluster.ask_all(range(24), 20)
        assert_complete(answers)
    finally:
        await asyncio.to_thread(etcd.start)
    began = time.monotonic()
    while killed_pid in (pids := await listed_workers(etcd.url)) or len(pids) != 3:
        assert time.monotonic() - began < 5.0, (killed_pid, pids)
        await asyncio.sleep(0.05)
    took = time.monotonic() - began
    answers = await cluster.ask_all(range(24), 20)
    assert_complete(answers)
    return f"{summary}; etcd lists exactly the live workers {took:.1f} s after its restart"


async def listed_workers(url: str) -> list[int]:
    """Return the pids of the workers that discovery lists."""
    plane = await open_discovery(url)
    try:
        records = await plane.get("/_processes/worker/")
    except PlaneUnavailable:
        return []
    finally:
        await plane.close()
    return [json.loads(record)["pid"] for record in records.values()]


async def nats_away(cluster: Cluster) -> str:
    nats = cluster.nats
    assert nats is not None

    async def inject() -> None:
        await asyncio.to_thread(nats.kill)
        answers = await cluster.ask_all(range(24), 20)
        assert_complete(answers)

    try:
        summary = await cluster.assert_unaffected(inject, tokens=200, pause_s=2.5)
    finally:
        await asyncio.to_thread(nats.start)
    answers = await cluster.ask_all(range(24), 20)
    assert_complete(answers)
    return summary


async def nats_hung(cluster: Cluster) -> str:
    """Stop NATS, so that it accepts bytes and answers nothing."""
    nats = cluster.nats
    assert nats is not None
    reported_s = 0.0

    async def inject() -> None:
        nonlocal reported_s
        nats.signal(signal.SIGSTOP)
        (frontend,) = cluster.ready("frontend")
        reported_s = await cluster.wait_for(lambda: "does not answer" in cluster.health(frontend))
        answers = await cluster.ask_all(range(24), 20)
        assert_complete(answers)

    try:
        summary = await cluster.assert_unaffected(inject, tokens=200, pause_s=2.0)
    finally:
        nats.signal(signal.SIGCONT)
    assert "worker does not answer" not in cluster.log
    assert reported_s < 2.0, reported_s
    answers = await cluster.ask_all(range(24), 20)
    assert_complete(answers)
    return f"{summary}; no worker ejected, /health reports it after {reported_s:.1f} s"


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


async def disk_full(cluster: Cluster) -> str:
    """Forbid all processes to make a file longer."""
    roles = ("supervisor", "frontend", "worker")
    pids = [record.pid for role in roles for record in cluster.processes(role)]
    pids += children_of(pids[0])  # also what forks the replacement
    no_limit = resource.RLIM_INFINITY

    async def inject() -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, no_limit))
        cluster.kill("worker")
        answers = await cluster.ask_all(range(24), 20)
        assert_complete(answers)

    try:
        summary = await cluster.assert_unaffected(inject, pause_s=1.5)
    finally:  # a replacement has inherited the limit from the supervisor
        for pid in {*pids, *children_of(pids[0])}:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (no_limit, no_limit))
    replaced_s = await cluster.wait_for(lambda: len(cluster.ready("worker")) == 3, 40)
    return f"{summary}; with disk space the killed worker is replaced in {replaced_s:.1f} s"


async def router_killed(cluster: Cluster) -> str:
    async def inject() -> None:
        for _ in range(3):
            cluster.kill("router")
            answers = await cluster.ask_all(range(24), 20)
            assert_complete(answers)
            await cluster.wait_for(lambda: cluster.ready("router"))

    return await cluster.assert_unaffected(inject, tokens=300, pause_s=1.0)


TABLE = (
    Fault("a worker is killed (SIGKILL)", "its streams continue on other workers after a pause; a new worker is started", killed, quick=True),
    Fault("a worker is frozen (SIGSTOP) for 2.5 s", "its streams continue on other workers within 2.1 s, new requests end within 2.5 s; after SIGCONT it serves again", frozen, quick=True),
    Fault("a worker is slow (stopped 4/5 of the time)", "no worker is ejected, every stream is complete", slow),
    Fault("four times as many streams as slots", "no worker is ejected; every stream is complete or refused at once", overloaded, flags=("--max-num-seqs", "4")),
    Fault("every worker is killed at once", "every stream waits for the new workers and continues", all_killed),
    Fault("the only worker is killed; then it is drained", "new requests wait for its restart; after the drain they get 503 at once", only_worker_killed, quick=True, workers=1),
    Fault("a worker is drained, another one is added", "its streams migrate at once", drained, quick=True),
    Fault("all workers and frontends are replaced under load", "no request fails", rolled),
    Fault("one of two frontends is killed", "only its clients' connections end", frontend_killed, frontends=2),
    Fault("clients disconnect before and after the first token", "the engines are idle and all KV blocks are free", hung_up, timing="constant:2,20"),
    Fault("a client reads nothing", "other clients are not affected", reads_nothing),
    Fault("a request that kills its worker", "500 poisoned_request after three deaths", poisoned, timing="constant:10,20"),
    Fault("etcd is down for 8 s, and a worker is killed meanwhile", "requests continue; etcd drops the dead worker after its restart", etcd_away, planes=("servers",)),
    Fault("NATS is killed and restarted", "requests continue over TCP", nats_away, planes=("servers",)),
    Fault("NATS is frozen (SIGSTOP) and resumed", "requests continue over TCP, no worker is ejected", nats_hung, planes=("servers",)),
    Fault("the disk is full and a worker is killed", "requests continue; with disk space a new worker is started", disk_full),
    Fault("a router process is killed three times", "frontends choose workers themselves meanwhile", router_killed, flags=("--router-replicas", "1")),
    *SLEEPING,
    *DISAGGREGATED,
    *KV_STORES,
    *PODS,
)  # fmt: skip

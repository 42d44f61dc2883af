"""Faults, and what is to come of them. Each is a function of a stage that raises where it does not,
and says what it measured."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from tests.faults.stage import PLANES, Stage
from tests.faults.streams import Answer, ask, body_of, read

from dynamo.communication.discovery import open_discovery
from dynamo.core.errors import PlaneUnavailable

Play = Callable[[Stage], Awaitable[str]]


@dataclass(frozen=True)
class Fault:
    """`quick`: among those of every test run. `servers`: needs etcd and NATS."""

    name: str
    expected: str
    play: Play
    quick: bool = False
    planes: tuple[str, ...] = PLANES
    workers: int = 3
    frontends: int = 1
    flags: tuple[str, ...] = ()
    timing: str = ""


async def killed(stage: Stage) -> str:
    async def inject() -> None:
        stage.kill("worker")

    said = await stage.unharmed(inject, pause_s=1.5)
    await stage.soon(lambda: len(stage.ready("worker")) == 3)
    return said


async def all_killed(stage: Stage) -> str:
    async def inject() -> None:
        for record in stage.processes("worker"):
            os.kill(record.pid, signal.SIGKILL)

    return await stage.unharmed(inject, streams=12, pause_s=15.0)


async def frozen(stage: Stage) -> str:
    texts = await stage.texts(range(24), 100)
    pid = 0

    async def inject() -> None:
        nonlocal pid
        pid = stage.kill("worker", number=signal.SIGSTOP)
        new = await stage.crowd(range(24), 20)
        assert all(answer.whole and answer.seconds < 2.5 for answer in new), new

    try:
        answers = await stage.during(inject)
    finally:
        os.kill(pid, signal.SIGCONT)
    for answer in answers:
        assert answer.whole, (answer, stage.log[-2000:])
        assert answer.text == texts[answer.key]
    longest = max(answer.longest_gap_s for answer in answers)
    assert longest <= 2.1, longest
    back = await stage.soon(lambda: "answers again" in stage.log)
    return f"longest gap {longest:.2f} s; after SIGCONT back in {back:.1f} s"


async def slow(stage: Stage) -> str:
    """Stopped four fifths of the time: slow, not dead."""
    pid = stage.processes("worker")[0].pid

    async def inject() -> None:
        for _ in range(20):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.16)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.04)

    said = await stage.unharmed(inject, pause_s=2.0)
    assert "does not answer" not in stage.log
    assert "ejected" not in stage.log
    return said + ", nobody ejected"


async def overloaded(stage: Stage) -> str:
    """Four times as many streams as there are places, for as long as they take."""
    answers = await stage.crowd(range(48), 60)
    bad = [one for one in answers if not one.whole and not one.retry_after]
    assert not bad, bad[:2]
    whole = sum(one.whole for one in answers)
    assert whole >= 12
    assert "does not answer" not in stage.log
    assert "ejected" not in stage.log
    others = ", the others told when to come again" if whole < 48 else ""
    return f"{whole} of 48 whole{others}; nobody ejected"


async def drained(stage: Stage) -> str:
    async def inject() -> None:
        began = time.monotonic()
        await stage.command("drain", "worker-1")
        assert time.monotonic() - began < 8.0

    said = await stage.unharmed(inject, tokens=200, pause_s=1.5)
    assert len(stage.processes("worker")) == 2
    await stage.command("scale", "worker=3")
    return said


async def rolled(stage: Stage) -> str:
    stop = asyncio.Event()
    texts = await stage.texts(range(12), 100)
    done: list[Answer] = []

    async def loop(key: int) -> None:
        while not stop.is_set():
            done.append(await ask(stage.port, key, 100))

    async with asyncio.TaskGroup() as group:
        for key in range(12):
            group.create_task(loop(key))
        await stage.command("restart", "worker")
        await stage.command("restart", "frontend")
        stop.set()
    bad = [one for one in done if not (one.whole and one.text == texts[one.key])]
    assert not bad, bad[:2]
    return f"every process replaced under load: {len(done)} of {len(done)} whole and the same"


async def frontend_killed(stage: Stage) -> str:
    pids = [record.pid for record in stage.processes("frontend")]

    async def inject() -> None:
        os.kill(pids[0], signal.SIGKILL)

    answers = await stage.during(inject)
    broken = [one for one in answers if not one.whole]
    assert all(one.error.startswith("connection") for one in broken), broken
    assert len(broken) < len(answers)
    after = await stage.crowd(range(12), 20)
    assert sum(one.whole for one in after) >= 11, after  # one may meet the closing socket
    return f"{len(broken)} streams of the killed one cut, {len(answers) - len(broken)} others whole"


async def hung_up(stage: Stage) -> str:
    """Clients that leave, mid-stream and before the first token."""
    requests = ("running_requests", "waiting_requests")

    def held(*names: str) -> float:
        found = [stage.metrics(record) for record in stage.ready("worker")]
        return sum(one[f"dynamo_worker_{name}"] for one in found for name in names)

    answers = [Answer(key) for key in range(12)]
    begun, waiting = answers[:6], answers[6:]
    async with asyncio.TaskGroup() as group:

        def ask_all(some: list[Answer], words: int) -> list[asyncio.Task[None]]:
            bodies = [(one, body_of(one.key, 2000, words)) for one in some]
            return [group.create_task(read(stage.port, *about, 50.0)) for about in bodies]

        tasks = ask_all(begun, 8)
        for one in begun:
            await one.begun.wait()
        tasks += ask_all(waiting, 300)
        await stage.soon(lambda: held(*requests) == 12)
        for task in tasks:
            task.cancel()
    assert all(one.tokens for one in begun)
    assert not any(one.tokens for one in waiting)
    took = await stage.soon(lambda: not held(*requests, "active_blocks"))
    assert took < 2.0
    return f"every engine free, every block back after {took:.1f} s"


async def reads_nothing(stage: Stage) -> str:
    """A small receive buffer and 16 choices: what is not read soon waits in the frontend."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", stage.port))
        data = json.dumps(body_of(99, 1000, 8, n=16)).encode()
        deaf.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            % (len(data), data)
        )
        said = await stage.unharmed(lambda: asyncio.sleep(0), tokens=200, pause_s=1.0)
        deaf.setblocking(False)
        got = sum(map(len, received(deaf)))
    assert got < 64 << 10, f"{got} bytes were not held back"
    return said


def received(sock: socket.socket) -> Iterator[bytes]:
    """What the kernel has of it."""
    with suppress(BlockingIOError):
        while data := sock.recv(1 << 16):
            yield data


async def poisoned(stage: Stage) -> str:
    """Whoever computes this prompt dies."""
    asking = asyncio.get_running_loop().create_task(ask(stage.port, 1, 20, words=40))
    deaths = 0
    try:
        while not asking.done() and deaths < 6:
            for record in stage.ready("worker"):
                try:
                    running = stage.metrics(record)["dynamo_worker_running_requests"]
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


async def etcd_away(stage: Stage) -> str:
    etcd = stage.etcd
    assert etcd is not None
    await asyncio.to_thread(etcd.kill)
    try:
        said = await stage.unharmed(lambda: asyncio.sleep(8), pause_s=1.5)
        gone = stage.kill("worker")
        answers = await stage.crowd(range(24), 20)
        assert all(one.whole for one in answers), [one for one in answers if not one.whole][:2]
    finally:
        await asyncio.to_thread(etcd.start)
    began = time.monotonic()
    while gone in (pids := await listed_workers(etcd.url)) or len(pids) != 3:
        assert time.monotonic() - began < 5.0, (gone, pids)
        await asyncio.sleep(0.05)
    took = time.monotonic() - began
    answers = await stage.crowd(range(24), 20)
    assert all(one.whole for one in answers)
    return f"{said}; etcd names who lives {took:.1f} s after its return"


async def listed_workers(url: str) -> list[int]:
    """Whom discovery names, by their pids."""
    plane = await open_discovery(url)
    try:
        records = await plane.get("/_processes/worker/")
    except PlaneUnavailable:
        return []
    finally:
        await plane.close()
    return [json.loads(record)["pid"] for record in records.values()]


async def nats_away(stage: Stage) -> str:
    nats = stage.nats
    assert nats is not None

    async def inject() -> None:
        await asyncio.to_thread(nats.kill)
        answers = await stage.crowd(range(24), 20)
        assert all(one.whole for one in answers), [one for one in answers if not one.whole][:2]

    try:
        said = await stage.unharmed(inject, tokens=200, pause_s=2.5)
    finally:
        await asyncio.to_thread(nats.start)
    answers = await stage.crowd(range(24), 20)
    assert all(one.whole for one in answers)
    return said


async def nats_hung(stage: Stage) -> str:
    """It takes what it is told and answers nothing."""
    nats = stage.nats
    assert nats is not None
    told_s = 0.0

    async def inject() -> None:
        nonlocal told_s
        nats.signal(signal.SIGSTOP)
        (frontend,) = stage.ready("frontend")
        told_s = await stage.soon(lambda: "does not answer" in stage.health(frontend))
        answers = await stage.crowd(range(24), 20)
        assert all(one.whole for one in answers), [one for one in answers if not one.whole][:2]

    try:
        said = await stage.unharmed(inject, tokens=200, pause_s=2.0)
    finally:
        nats.signal(signal.SIGCONT)
    assert "worker does not answer" not in stage.log
    assert told_s < 2.0, told_s
    answers = await stage.crowd(range(24), 20)
    assert all(one.whole for one in answers)
    return f"{said}; no worker given up, /health tells after {told_s:.1f} s"


async def disk_full(stage: Stage) -> str:
    """No process can make a file longer, from here on."""
    roles = ("supervisor", "frontend", "worker")
    pids = [one.pid for role in roles for one in stage.processes(role)]
    no_limit = resource.RLIM_INFINITY

    async def inject() -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, no_limit))
        stage.kill("worker")
        answers = await stage.crowd(range(24), 20)
        assert all(one.whole for one in answers), [one for one in answers if not one.whole][:2]

    try:
        said = await stage.unharmed(inject, pause_s=1.5)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (no_limit, no_limit))
    back = await stage.soon(lambda: len(stage.ready("worker")) == 3, 40)
    return f"{said}; with room again the killed worker is back in {back:.1f} s"


async def router_killed(stage: Stage) -> str:
    async def inject() -> None:
        for _ in range(3):
            stage.kill("router")
            answers = await stage.crowd(range(24), 20)
            assert all(one.whole for one in answers), [one for one in answers if not one.whole][:2]
            await stage.soon(lambda: stage.ready("router"))

    return await stage.unharmed(inject, tokens=300, pause_s=1.0)


TABLE = (
    Fault("a worker is killed (SIGKILL)", "its streams go on elsewhere after a pause; a new worker comes", killed, quick=True),
    Fault("a worker is frozen (SIGSTOP)", "its streams go on elsewhere within 2.1 s, new requests within 2.5 s; thawed, it serves again", frozen, quick=True),
    Fault("a worker is slow (stopped 4/5 of the time)", "nobody is ejected, every stream is whole", slow),
    Fault("four times the streams that have places", "nobody is ejected; every stream is whole or refused at once", overloaded, flags=("--max-num-seqs", "4")),
    Fault("every worker is killed at once", "every stream waits for the next workers and goes on", all_killed),
    Fault("a worker is drained, another added", "its streams move at once", drained, quick=True),
    Fault("every worker and frontend is replaced under load", "no request fails", rolled),
    Fault("a frontend of two is killed", "its clients' connections end, nobody else's", frontend_killed, frontends=2),
    Fault("clients hang up, before and after the first token", "the engines are free, every KV block is back", hung_up, timing="constant:2,20"),
    Fault("a client reads nothing", "the others notice nothing", reads_nothing),
    Fault("a request that kills its worker", "500 poisoned_request after three deaths", poisoned, timing="constant:10,20"),
    Fault("etcd is killed for 8 s, a worker meanwhile", "requests go on; when it is back the dead one is gone", etcd_away, planes=("servers",)),
    Fault("NATS is killed and comes back", "requests go on over TCP", nats_away, planes=("servers",)),
    Fault("NATS hangs (SIGSTOP) and goes on", "requests go on over TCP, no worker is blamed", nats_hung, planes=("servers",)),
    Fault("the disk is full, a worker is killed", "requests go on; with room again a new worker comes", disk_full),
    Fault("a router of its own is killed, three times", "frontends choose by themselves meanwhile", router_killed, flags=("--router-replicas", "1")),
)  # fmt: skip

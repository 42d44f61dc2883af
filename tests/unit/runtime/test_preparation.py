"""What the supervisor does before some of its processes may start."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.processes.child import ChildSpec
from dynamo.runtime.processes.parent_pipe import ChildStart, ParentPipe
from dynamo.runtime.processes.supervisor import Supervisor

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]
Tell = Callable[[str], None]

LISTEN = """
print("up", flush=True)
while line := os.read(0, 1 << 16):
    print(line.decode().strip(), flush=True)
    if json.loads(line.splitlines()[-1]).get("preparing", "") == "":
        tell(state="ready")
"""
SERVE = 'tell(state="ready"); signal.pause()'


async def test_who_needs_it_starts_after_it_and_the_others_hear(
    spec: Spec, supervise: Supervise
) -> None:
    go = asyncio.Event()

    out = io.StringIO()

    async def prepare(tell: Tell) -> None:
        while "up" not in out.getvalue():
            await asyncio.sleep(0.005)
        tell("half")
        await go.wait()

    waiting = replace(spec(SERVE, "worker", 1), needs_preparation=True)
    supervisor = supervise(spec(LISTEN, "frontend"), waiting, out=out, prepare=prepare)
    frontend, worker = supervisor.children
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        while "half" not in out.getvalue():
            await asyncio.sleep(0.005)
        assert frontend.pid
        assert worker.pid == 0
        go.set()
        await supervisor.ready.wait()
        supervisor.stop()
        assert await running == 0
    assert out.getvalue().splitlines() == [
        "frontend | up",
        'frontend | {"preparing":"half"}',
        "frontend | {}",
    ]


async def test_its_failure_ends_all_and_is_raised(spec: Spec, supervise: Supervise) -> None:
    async def prepare(tell: Tell) -> None:
        del tell
        while not supervisor.children[0].ready:
            await asyncio.sleep(0.005)
        raise ModelUnavailable("no network")

    waiting = replace(spec(SERVE, "worker"), needs_preparation=True)
    supervisor = supervise(spec(SERVE, "frontend"), waiting, prepare=prepare)
    with pytest.raises(ModelUnavailable):
        await supervisor.run()
    assert [child.pid for child in supervisor.children] == [0, 0]


async def test_stopping_cancels_it(spec: Spec, supervise: Supervise) -> None:
    ended: list[str] = []

    async def prepare(tell: Tell) -> None:
        del tell
        try:
            supervisor.stop()
            await asyncio.Event().wait()
        finally:
            ended.append("prepare")

    waiting = replace(spec(SERVE, "worker"), needs_preparation=True)
    supervisor = supervise(waiting, prepare=prepare)
    assert await supervisor.run() == 0
    assert ended == ["prepare"]


def test_a_child_reads_notices_that_come_with_its_start() -> None:
    heard: list[str] = []
    start = msgspec.json.encode(ChildStart(Settings(), "frontend", 1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(start + b'\n{"preparing":"ha')
        link = ParentPipe.from_fd(theirs.fileno())
        ours.send(b'lf"}\n{"preparing":""}\n')
        loop = asyncio.new_event_loop()
        link.watch_parent(loop, loop.stop)
        link.on_notice(lambda notice: heard.append(notice.preparing))
        ours.close()
        loop.run_forever()
        loop.close()
    assert link.start_message.name == "frontend"
    assert heard == ["", "half", ""]

"""The supervisor's preparation: start order, notices, failure, cancellation."""

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
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.parent_pipe import ChildStart, ParentPipe
from dynamo.runtime.processes.supervisor import Supervisor

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]
Progress = Callable[[str], None]

LISTEN = """
print("up", flush=True)
while line := os.read(0, 1 << 16):
    print(line.decode().strip(), flush=True)
    if json.loads(line.splitlines()[-1]).get("preparing", "") == "":
        tell(state="ready")
"""
SERVE = 'tell(state="ready"); signal.pause()'


async def test_processes_that_need_it_start_after_it_and_others_get_notices(
    spec: Spec, supervise: Supervise
) -> None:
    finish_preparation = asyncio.Event()
    out = io.StringIO()

    async def prepare(progress: Progress) -> None:
        while "up" not in out.getvalue():
            await asyncio.sleep(0.005)
        progress("half")
        await finish_preparation.wait()

    worker_spec = replace(spec(SERVE, "worker", 1), needs_preparation=True)
    supervisor = supervise(spec(LISTEN, "frontend"), worker_spec, out=out, prepare=prepare)
    frontend, worker = supervisor.children
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        while "half" not in out.getvalue():
            await asyncio.sleep(0.005)
        assert frontend.pid
        assert worker.pid == 0
        finish_preparation.set()
        await supervisor.ready.wait()
        supervisor.stop()
        assert await running == 0
    assert out.getvalue().splitlines() == [
        "frontend | up",
        'frontend | {"preparing":"half"}',
        "frontend | {}",
    ]


async def test_a_failed_preparation_stops_all_and_is_raised(
    spec: Spec, supervise: Supervise
) -> None:
    async def prepare(progress: Progress) -> None:
        del progress
        while not supervisor.children[0].ready:
            await asyncio.sleep(0.005)
        raise ModelUnavailable("no network")

    worker_spec = replace(spec(SERVE, "worker"), needs_preparation=True)
    supervisor = supervise(spec(SERVE, "frontend"), worker_spec, prepare=prepare)
    with pytest.raises(ModelUnavailable):
        await supervisor.run()
    assert [child.pid for child in supervisor.children] == [0, 0]


async def test_stopping_cancels_the_preparation(spec: Spec, supervise: Supervise) -> None:
    ended: list[str] = []

    async def prepare(progress: Progress) -> None:
        del progress
        try:
            supervisor.stop()
            await asyncio.Event().wait()
        finally:
            ended.append("prepare")

    worker_spec = replace(spec(SERVE, "worker"), needs_preparation=True)
    supervisor = supervise(worker_spec, prepare=prepare)
    assert await supervisor.run() == 0
    assert ended == ["prepare"]


def test_a_child_reads_notices_that_come_with_its_start() -> None:
    notices: list[str] = []
    start = msgspec.json.encode(ChildStart(Settings(), "frontend", 1))
    parent_end, child_end = socket.socketpair()
    with parent_end, child_end:
        parent_end.send(start + b'\n{"preparing":"ha')
        pipe = ParentPipe.from_fd(child_end.fileno())
        parent_end.send(b'lf"}\n{"preparing":""}\n')
        loop = asyncio.new_event_loop()
        pipe.watch_parent(loop, loop.stop)
        pipe.on_notice(lambda notice: notices.append(notice.preparing))
        parent_end.close()
        loop.run_forever()
        loop.close()
    assert pipe.start_message.name == "frontend"
    assert notices == ["", "half", ""]

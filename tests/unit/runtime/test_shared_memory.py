"""Memory that processes share: one builds, the others wait, and it outlives them."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest
from msgspec.structs import replace
from tests.support.shared_memory import MemoryUsers, descriptors
from tests.support.supervisors import serving

from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.runtime.shared_memory import (
    SEALS,
    SUPPORTED,
    SharedMemoryClient,
)

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")


def sealed(content: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


@pytest.fixture
async def users() -> AsyncIterator[MemoryUsers]:
    memory_users = MemoryUsers()
    yield memory_users
    memory_users.close()


async def read(client: SharedMemoryClient, build: Callable[[], int], key: str = "k") -> bytes:
    fd = await asyncio.to_thread(client.open, key, build)
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def never() -> int:
    raise AssertionError("the memory is built once")


async def test_one_builds_and_the_others_wait(users: MemoryUsers) -> None:
    building, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def build() -> int:
        loop.call_soon_threadsafe(building.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        return sealed(b"weights")

    async with BackgroundTasks() as tasks:
        first = tasks.start(read(users.start(), build))
        await building.wait()
        others = [tasks.start(read(users.start(), never)) for _ in range(2)]
        await read(users.start(), lambda: sealed(b"x"), "another")  # answered after the others
        assert not any(other.done() for other in others)
        go.set()
        assert [await task for task in (first, *others)] == [b"weights"] * 3
    assert users.broker.size_bytes == len(b"weights") + len(b"x")


async def test_the_next_builds_after_a_death(users: MemoryUsers) -> None:
    building = asyncio.Event()
    loop = asyncio.get_running_loop()
    first, second = users.start(), users.start()
    died = asyncio.Event()

    def build() -> int:
        loop.call_soon_threadsafe(building.set)
        asyncio.run_coroutine_threadsafe(died.wait(), loop).result()
        return sealed(b"too late")

    async with BackgroundTasks() as tasks:
        failed = tasks.start(read(first, build))
        await building.wait()
        after = tasks.start(read(second, lambda: sealed(b"second")))
        users.die(first)
        assert await after == b"second"
        died.set()
        assert await failed == b"too late"  # nobody else has it
    assert await read(users.start(), never) == b"second"


@pytest.mark.parametrize("error", [OSError("no memory"), ValueError("damaged")])
async def test_the_next_builds_after_an_error(users: MemoryUsers, error: Exception) -> None:
    def fail() -> int:
        raise error

    with pytest.raises(type(error)):
        await read(users.start(), fail)
    assert await read(users.start(), lambda: sealed(b"right")) == b"right"


async def test_memory_that_could_change_is_not_passed_on(users: MemoryUsers) -> None:
    await read(users.start(), lambda: os.memfd_create("unsealed"))
    assert await read(users.start(), lambda: sealed(b"right")) == b"right"


async def test_deaths_leave_no_descriptor(users: MemoryUsers) -> None:
    user = users.start()
    await read(user, lambda: sealed(b"weights"))
    before = descriptors()
    for _ in range(50):
        client = users.start()
        assert await read(client, never) == b"weights"
        users.die(client)
    assert descriptors() == before


async def test_memory_without_users_is_given_back_after_a_while() -> None:
    users = MemoryUsers(keep_s=0.0)
    first, second = users.start(), users.start()
    await read(first, lambda: sealed(b"weights"))
    await read(second, never)
    users.die(first)
    await asyncio.sleep(0)
    assert users.broker.size_bytes, "one process still uses it"
    users.changed.clear()
    users.die(second)
    await users.changed.wait()
    assert users.broker.size_bytes == 0
    users.close()


async def test_memory_without_users_can_be_given_back_at_once(users: MemoryUsers) -> None:
    first, second = users.start(), users.start()
    await read(first, lambda: sealed(b"weights"))
    users.broker.drop_unused()
    assert await read(second, never) == b"weights"
    for user in (first, second):
        users.die(user)
    await asyncio.sleep(0)
    assert users.broker.size_bytes
    users.broker.drop_unused()
    assert users.broker.size_bytes == 0


WORKER = """
import fcntl, socket
memory = socket.socket(fileno=start["memory_fd"])
send = lambda kind, *fds: socket.send_fds(memory, [json.dumps(dict(kind=kind, key="k")).encode()], fds)
send("open")
message, fds, _, _ = socket.recv_fds(memory, 4096, 1)
if json.loads(message)["kind"] == "build":
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, b"built")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 15)
    send("built", fd)
    print("built it", flush=True)
else:
    print("found", os.pread(fds[0], 10, 0).decode(), flush=True)
tell(state="ready"); signal.pause()
"""


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_restarted_process_finds_the_memory_of_its_predecessor(
    spec: Callable[..., ChildSpec],
    supervise: Callable[..., Supervisor],
    deployment: Deployment,
) -> None:
    out = io.StringIO()
    supervisor = supervise(spec(WORKER), out=out)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        (child,) = supervisor.children
        await until(lambda: [r.shared_bytes for r in deployment.live_processes()] == [5])
        before = descriptors()
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.restarts and child.ready)
        await until(lambda: descriptors() <= before)
        supervisor.stop()
        await running
    assert out.getvalue().splitlines() == ["child | built it", "child | found built"]


async def test_a_model_that_is_unloaded_leaves_no_memory(
    spec: Callable[..., ChildSpec],
    supervise: Callable[..., Supervisor],
) -> None:
    rare = spec(WORKER, "rare-worker")
    model = replace(rare.settings.model, load="on_demand", names=("rare",))
    rare = replace(rare, model="rare", settings=replace(rare.settings, model=model))
    supervisor = supervise(spec("tell(state='ready'); signal.pause()"), rare, out=io.StringIO())
    async with serving(supervisor):
        group, memory = supervisor._group, supervisor._shared_memory
        await group.start_model([rare], lambda _: None)
        assert memory.size_bytes == len(b"built")
        await group.stop_model("rare", lambda _: None)
        assert memory.size_bytes == 0

"""The fork server: processes that it forks, the supervisor as their parent, and its own death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from dynamo.runtime.processes.fork_server import ForkServer, StartedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux forks workers")

SERVER = """
import json, os, random, sys, threading
from dynamo.runtime.processes.fork_server import become_worker
engines = []
become_worker(engines.append)
code = int(os.read(0, 10))  # as a worker waits for its start message
facts = {
    "engines": engines,
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "variable": os.environ.get("FORKED"),
    "chance": random.random(),
    "threads": threading.active_count(),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
}
print(json.dumps(facts))
sys.exit(code)
"""


class Forked(NamedTuple):
    """A forked process, which waits for its exit code: its standard input and output."""

    process: StartedProcess
    stdin: socket.socket
    stdout: IO[bytes]

    async def end(self, code: int) -> dict[str, Any]:
        """Let the process end, and return what it has said about itself."""
        self.stdin.send(b"%d" % code)
        output = await asyncio.to_thread(self.stdout.read)
        assert os.waitstatus_to_exitcode(os.waitpid(self.process.pid, 0)[1]) == code
        facts: dict[str, Any] = json.loads(output)
        return facts


class Forks:
    """Forks processes of a server."""

    def __init__(self) -> None:
        self.server = ForkServer((sys.executable, "-c", SERVER))
        self._streams = ExitStack()

    async def fork(self, engine: str = "native", variable: str = "yes") -> Forked:
        own, theirs = socket.socketpair()
        reader, writer = os.pipe()
        output = self._streams.enter_context(os.fdopen(reader, "rb"))
        self._streams.enter_context(own)
        with theirs, os.fdopen(writer, "wb", 0):
            fds = (theirs.fileno(), writer, theirs.fileno())
            process = await self.server.fork(engine, {**os.environ, "FORKED": variable}, fds)
        return Forked(process, own, output)

    def close(self) -> None:
        self.server.close()
        self._streams.close()


@pytest.fixture
async def forks() -> AsyncIterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def children() -> set[int]:
    """Return the children of this process. Other tests may have left servers."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


async def test_forked_processes_are_children_with_own_streams(forks: Forks) -> None:
    workers = []
    for code in (3, 4):
        forked = await forks.fork()
        facts = await forked.end(code)
        workers.append(facts)
        assert facts["parent"] == os.getpid()
        assert facts["session"]
        assert facts["variable"] == "yes"
        assert facts["threads"] == 1
        assert set(forked.process.fds) < set(facts["descriptors"])
    assert workers[0]["engines"] == ["native"]
    assert workers[1]["engines"] == ["native", "native"]
    assert len(workers[0]["descriptors"]) == len(workers[1]["descriptors"])
    assert workers[0]["chance"] != workers[1]["chance"]


async def test_variables_can_be_larger_than_a_message(forks: Forks) -> None:
    variable = "x" * (1 << 20)
    facts = await (await forks.fork(variable=variable)).end(0)
    assert facts["variable"] == variable
    assert (await (await forks.fork()).end(0))["variable"] == "yes"


async def test_its_death_ends_no_worker_and_the_next_order_starts_another(forks: Forks) -> None:
    before = children()
    first = await forks.fork()
    (server,) = children() - before - {first.process.pid}
    os.kill(server, signal.SIGKILL)
    with pytest.raises(OSError):
        await forks.fork()
    second = await forks.fork()
    await first.end(7)
    await second.end(8)


async def test_a_renewed_server_imports_the_present_code(forks: Forks) -> None:
    before = children()
    first = await forks.fork()
    (old,) = children() - before - {first.process.pid}
    await forks.server.renew()
    second = await forks.fork()
    (new,) = children() - before - {first.process.pid, second.process.pid}
    assert new != old
    assert (await first.end(7))["parent"] == os.getpid()
    assert (await second.end(8))["engines"] == ["native"]  # the first one of its server


async def test_a_server_that_cannot_start_is_an_error() -> None:
    before = children()
    server = ForkServer((sys.executable, "-c", ""))
    with pytest.raises(OSError, match=r"fork server ended|reset|Broken"):
        await server.fork("native", {}, (0, 1))
    assert children() == before

"""Descriptors: the raised limit, and which connections are closed when few are left."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from math import inf
from typing import Any

import pytest
from tests.unit.http.conftest import Serve

from dynamo.communication.http import Request, Response, descriptors
from dynamo.communication.http.descriptors import (
    MAX_REFUSED,
    MIN_IDLE_S,
    NEWEST_IDLE,
    DescriptorBudget,
    count_open_descriptors,
)

LIMIT = 200
RESERVED = 64
OTHERS = 20


class Transport(asyncio.BaseTransport):
    """A transport with a descriptor of the given number."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def fileno(self) -> int:
        return self._fd


class Connection:
    def __init__(self, idle_since: float) -> None:
        self.idle_since = idle_since

    def close(self) -> None:
        self.idle_since = inf


HIGH, LOW = Transport(LIMIT - RESERVED), Transport(30)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number of open descriptors, and how often it was counted."""
    state = {"open": 0, "calls": 0}

    def count() -> int:
        state["calls"] += 1
        return state["open"]

    monkeypatch.setattr(descriptors, "count_open_descriptors", count)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (LIMIT, LIMIT))
    return state


def fill(counted: dict[str, int], idle_since: list[float]) -> list[Connection]:
    """Return connections that fill all places of clients but one, with `OTHERS` other files."""
    connections = [Connection(since) for since in idle_since]
    counted["open"] = len(connections) + OTHERS
    return connections


def test_nothing_is_counted_while_descriptors_are_low(counted: dict[str, int]) -> None:
    connections = fill(counted, [0.0] * 500)

    assert DescriptorBudget().make_room(LOW, connections, 100.0) == "free"
    assert counted["calls"] == 0


def test_the_connection_that_is_idle_longest_is_closed(counted: dict[str, int]) -> None:
    places = LIMIT - RESERVED - OTHERS
    connections = fill(counted, [50.0 + number for number in range(places)] + [99.0])
    connections[7].idle_since = 1.0
    budget = DescriptorBudget()

    assert budget.make_room(HIGH, connections, 200.0) == "free"
    assert connections[7].idle_since == inf
    assert budget.make_room(LOW, connections, 200.0) == "free"
    assert connections[0].idle_since == inf
    assert counted["calls"] == 1


def test_a_candidate_that_is_used_meanwhile_stays(counted: dict[str, int]) -> None:
    connections = fill(counted, [float(number) for number in range(LIMIT)])
    budget = DescriptorBudget()
    budget.make_room(HIGH, connections, 300.0)
    connections[1].idle_since = 299.0
    budget.make_room(HIGH, connections, 300.0)

    assert connections[1].idle_since == 299.0
    assert connections[2].idle_since == inf


def test_the_newest_connections_have_time_for_their_first_request(
    counted: dict[str, int],
) -> None:
    busy = [inf] * (LIMIT - RESERVED - OTHERS - NEWEST_IDLE + 1)
    connections = fill(counted, [*busy, *([10.0] * NEWEST_IDLE)])
    budget = DescriptorBudget()

    assert budget.make_room(HIGH, connections, 10.0) == "full"
    assert budget.make_room(HIGH, connections, 10.0 + MIN_IDLE_S) == "free"


def test_busy_connections_leave_room_for_refusals_and_not_more(counted: dict[str, int]) -> None:
    places = LIMIT - RESERVED - OTHERS
    budget = DescriptorBudget()

    assert budget.make_room(HIGH, fill(counted, [inf] * places), 1.0) == "free"
    assert budget.make_room(LOW, fill(counted, [inf] * (places + 1)), 3.0) == "full"
    connections = fill(counted, [inf] * (places + MAX_REFUSED + 1))
    assert budget.make_room(LOW, connections, 5.0) == "exhausted"


def test_there_is_room_again_when_other_descriptors_are_closed(counted: dict[str, int]) -> None:
    connections = fill(counted, [inf] * (LIMIT - RESERVED - OTHERS + 1))
    budget = DescriptorBudget()
    assert budget.make_room(HIGH, connections, 1.0) == "full"
    counted["open"] -= 1

    assert budget.make_room(HIGH, connections, 1.5) == "full"
    assert budget.make_room(HIGH, connections, 2.0) == "free"


@pytest.mark.parametrize("size", [None, 0])
def test_open_descriptors_are_counted(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.2 the folder has no size."""
    if size is not None:
        monkeypatch.setattr(os, "stat", lambda _: os.stat_result([0] * 10))
    before = count_open_descriptors()
    with socket.socket(), socket.socket():
        assert count_open_descriptors() == before + 2


def test_the_soft_limit_is_raised_to_the_hard_limit() -> None:
    program = (
        "import resource; from dynamo.communication.http import raise_open_file_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); raise_open_file_limit();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20).stdout

    assert output == b"300 300\n"


async def test_connections_tell_since_when_they_are_idle(serve: Serve) -> None:
    release = asyncio.Event()

    async def handle(request: Request, response: Response) -> None:
        await release.wait()
        response.send(200, (), b"")

    server, port = await serve(handle)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not server.connections:
        await asyncio.sleep(0.01)
    state = server._state
    assert state is not None
    (connection,) = state.connections
    now = state.clock.now()
    opened = connection.idle_since
    assert now - 5 < opened <= now

    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
    while connection.idle_since == opened:
        await asyncio.sleep(0.01)
    assert opened <= connection.idle_since <= state.clock.now()
    writer.write(b"\r\n")
    while connection.idle_since != inf:
        await asyncio.sleep(0.01)
    release.set()
    await reader.readuntil(b"\r\n\r\n")
    assert opened < connection.idle_since <= state.clock.now()

    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1")
    while connection.idle_since != inf:
        await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()

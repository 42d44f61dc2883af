"""Clients hold more connections than the frontend has descriptors: 256, of which 64 are reserved."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.attacks.client import bystanders, chat, exchange, request_bytes
from tests.faults.cluster import Cluster
from tests.faults.stream_client import body_of

LIMIT = 256
RESERVED = 64
ATTACKERS = 400
LIMIT_FILES = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "bash")
LIVE = request_bytes(method="GET", path="/live")


@pytest.fixture(scope="module")
def small(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A deployment whose processes may open 256 files."""
    folder = tmp_path_factory.mktemp("descriptors")
    with Cluster(tiny_model, folder, workers=2, prefix=LIMIT_FILES) as cluster:
        yield cluster


@contextmanager
def connections(port: int, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that have sent `data` and nothing else."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            opened.append(stack.enter_context(connection))
            if data:
                connection.sendall(data)
        yield opened


def frontend_metric(cluster: Cluster, name: str) -> float:
    """Return a metric from the frontend's status port."""
    return cluster.metrics(cluster.processes("frontend")[0])[name]


def assert_whole(cluster: Cluster) -> None:
    """Assert that a new request is answered and that no worker is withheld."""
    assert exchange(cluster.port, LIVE).status == 200
    assert chat(cluster.port).status == 200
    assert frontend_metric(cluster, 'dynamo_frontend_workers{model="tiny"}') == 2


@pytest.mark.attack(
    "400 idle connections to a frontend that may open 256 files",
    "new requests are answered, streams go on, no worker is withheld",
)
@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n"], ids=["idle", "slow"])
def test_idle_connections_are_closed_for_new_ones(
    small: Cluster, data: bytes, outcome: Callable[[str], None]
) -> None:
    """A connection without a complete head counts as idle."""
    with bystanders(small) as seen, connections(small.port, ATTACKERS, data):
        time.sleep(0.5)
        opened = frontend_metric(small, "process_open_fds")
        assert_whole(small)
    assert not [error for error in seen.errors if "stream" in error]
    assert len(seen.errors) <= 3, seen.errors  # a new connection may be among those closed
    assert opened <= LIMIT - RESERVED + 4
    outcome(f"answered with {opened:.0f} files open")


@pytest.mark.attack(
    "400 connections arrive at once at a frontend that may open 256 files",
    "a new request is answered at once, without a busy loop",
)
def test_a_burst_beyond_the_limit_is_survived(
    small: Cluster, outcome: Callable[[str], None]
) -> None:
    """The frontend accepts all of them in one iteration of its loop."""
    frontend = small.kill("frontend", number=signal.SIGSTOP)
    with connections(small.port, ATTACKERS):
        os.kill(frontend, signal.SIGCONT)
        time.sleep(0.5)
        began_s, cpu_s = time.monotonic(), frontend_metric(small, "process_cpu_seconds_total")
        assert_whole(small)
        time.sleep(0.5)
        used_s = frontend_metric(small, "process_cpu_seconds_total") - cpu_s
        share = used_s / (time.monotonic() - began_s)
    assert share < 0.5
    outcome(f"answered, {share:.0%} of a core used")


@pytest.mark.attack(
    "Streams take all connections of a frontend, and 100 more clients come",
    "they get a 503 with Retry-After, streams and the status port go on",
)
def test_clients_beyond_the_busy_connections_get_a_503(
    small: Cluster, outcome: Callable[[str], None]
) -> None:
    """When the streams have gone, requests are answered again."""
    request = request_bytes(body_of(1, 2000, 4))
    with connections(small.port, LIMIT - RESERVED, request) as streams:
        time.sleep(0.5)
        answers = [exchange(small.port, LIVE) for _ in range(100)]
        refused = [answer for answer in answers if answer.status == 503]
        answered = sum(answer.status == 200 for answer in answers)
        assert answered <= 30  # in the places of refused connections that lingered
        assert len(refused) >= 20  # beyond `MAX_REFUSED` at once, connections close unanswered
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert {answer.error["code"] for answer in refused} == {"overloaded"}
        texts = {answer.error["message"] for answer in refused}
        assert texts == {"too many connections are open"}
        opened = frontend_metric(small, "process_open_fds")
        assert opened <= LIMIT - RESERVED / 2
        assert b"200 OK" in streams[0].recv(1 << 16)
    small.wait_blocking(lambda: frontend_metric(small, "process_open_fds") < LIMIT / 2)
    assert_whole(small)
    outcome(f"{len(refused)} of 100 got a 503, {opened:.0f} files open")

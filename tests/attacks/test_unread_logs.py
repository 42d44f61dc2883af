"""Nobody reads the log: a terminal after Ctrl-S, an unread pipe, a stopped supervisor."""

from __future__ import annotations

import os
import pty
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.attacks.client import chat, request_bytes
from tests.faults.cluster import Cluster

REQUESTS = 10_000
BATCH = 10
CTRL_C, CTRL_Q, CTRL_S = b"\x03", b"\x11", b"\x13"
DRAIN_S = 1.0
EXIT_S = DRAIN_S + 6.0
"""Generous; the bar is 2 s after the drain."""
FLAGS = ("--log-requests", "--runtime.drain_s", str(DRAIN_S))
LOSS_REPORT = b"log lines were lost because nobody read stderr"


def send_logged_requests(port: int, count: int = REQUESTS) -> float:
    """Send requests, each of which is logged, and return the seconds."""
    began = time.monotonic()
    batch = request_bytes(method="GET", path="/live") * BATCH
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for _ in range(count // BATCH):
            connection.sendall(batch)
            received = b""
            while received.count(b"HTTP/1.1 200 OK\r\n") < BATCH or not received.endswith(b"}"):
                part = connection.recv(1 << 16)
                assert part
                received += part
    return time.monotonic() - began


class Reader:
    """Reads a descriptor while `reading` is set."""

    def __init__(self, fd: int) -> None:
        self.text = b""
        self.reading = threading.Event()
        self.reading.set()
        self._fd = fd
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self.reading.wait()
                self.text += os.read(self._fd, 1 << 16)
        except OSError:  # the terminal was closed
            return


@contextmanager
def end_timed(cluster: Cluster, outcome: Callable[[str], None], text: str) -> Iterator[None]:
    """Report how long the deployment took to end, and that no process is left."""
    pids = [record.pid for record in cluster.processes("worker") + cluster.processes("frontend")]
    began = time.monotonic()
    yield
    cluster.wait_for_exit(EXIT_S)
    seconds = time.monotonic() - began
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    outcome(f"{text}, ended in {seconds:.1f} s")


@pytest.mark.attack(
    "Ctrl-S in the terminal of a deployment with --log-requests, then Ctrl-C",
    "10,000 requests are answered; Ctrl-C ends everything",
)
def test_ctrl_s_stops_only_the_log(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    """After Ctrl-Q the log continues and reports the loss."""
    keyboard, terminal = pty.openpty()
    screen = Reader(keyboard)
    with Cluster(tiny_model, tmp_path, workers=1, flags=FLAGS, output=terminal) as cluster:
        os.close(terminal)
        os.write(keyboard, CTRL_S)
        time.sleep(0.2)
        seconds = send_logged_requests(cluster.port)
        assert chat(cluster.port).status == 200
        os.write(keyboard, CTRL_Q)
        cluster.wait_blocking(lambda: LOSS_REPORT in screen.text)
        assert chat(cluster.port).status == 200
        os.write(keyboard, CTRL_S)
        send_logged_requests(cluster.port, 2000)
        with end_timed(cluster, outcome, f"all answered in {seconds:.1f} s"):
            os.write(keyboard, CTRL_C)
    os.close(keyboard)


@pytest.mark.attack(
    "stderr is a pipe that nobody reads; the supervisor is stopped",
    "10,000 requests are answered each time; SIGTERM ends everything",
)
def test_an_unread_pipe_and_a_stopped_supervisor_stop_only_the_log(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    """The lost lines are counted and reported once somebody reads."""
    unread, pipe = os.pipe()
    with Cluster(tiny_model, tmp_path, workers=1, flags=FLAGS, output=pipe) as cluster:
        os.close(pipe)
        (supervisor,) = cluster.processes("supervisor")
        seconds = send_logged_requests(cluster.port)
        cluster.wait_blocking(lambda: lost(cluster, "supervisor") > 0)

        os.kill(supervisor.pid, signal.SIGSTOP)
        stopped_s = send_logged_requests(cluster.port)
        assert lost(cluster, "frontend") > 0
        assert chat(cluster.port).status == 200
        os.kill(supervisor.pid, signal.SIGCONT)

        send_logged_requests(cluster.port, 2000)
        text = f"all answered in {seconds:.1f} s and {stopped_s:.1f} s"
        with end_timed(cluster, outcome, text):
            os.kill(supervisor.pid, signal.SIGTERM)
    os.close(unread)


def lost(cluster: Cluster, role: str) -> float:
    """Return the number of log lines that a process dropped."""
    (record,) = cluster.processes(role)
    return cluster.metrics(record)["dynamo_log_lines_dropped_total"]

"""`dynamo top` in a terminal of 80x24: a person looks, sorts, reads logs and drains a worker."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
from tests.faults.cluster import Cluster
from tests.faults.stream_client import ask

COLUMNS, ROWS = 80, 24
ENTER_MODE, LEAVE_MODE = b"\x1b[?1049h", b"\x1b[?1049l"
"""Of xterm: the screen of a program, and back to what was there."""


class Terminal:
    """A pseudo-terminal in which a command runs."""

    def __init__(self, cluster: Cluster, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dynamo", *arguments],
            env=cluster.environ | {"TERM": "xterm", "LC_ALL": "C.UTF-8"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        os.set_blocking(self._master, False)

    def press(self, keys: str) -> None:
        """Type characters."""
        os.write(self._master, keys.encode())

    def read(self) -> str:
        """Return what the screen shows now."""
        try:
            while data := os.read(self._master, 1 << 16):
                self.output += data
                self._stream.feed(data)
        except (BlockingIOError, OSError):  # nothing more for now, or the program has ended
            pass
        return "\n".join(self.screen.display)

    async def wait_for(self, condition: Callable[[str], bool]) -> str:
        """Wait until the screen is as it should be."""
        for _ in range(400):
            if condition(shown := self.read()):
                return shown
            await asyncio.sleep(0.05)
        raise AssertionError(f"not shown in time:\n{self.read()}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextmanager
def run(cluster: Cluster, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(cluster, *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


async def test_a_person_looks_at_a_deployment(tiny_model: Path, tmp_path: Path) -> None:
    with Cluster(tiny_model, tmp_path, workers=2, flags=("--observer",)) as cluster:
        for key in range(4):
            await ask(cluster.port, key, 5)
        with run(cluster, "top", "--deployment", str(cluster.port)) as terminal:
            shown = await terminal.wait_for(lambda text: "worker-2" in text and "median" in text)
            assert f"http-{cluster.port}" in shown
            assert "ready" in shown
            assert ENTER_MODE in terminal.output
            await terminal.wait_for(lambda text: "SLOWEST AND FAILED" in text)
            terminal.press("?")
            await terminal.wait_for(lambda text: "the last log lines of the worker" in text)
            terminal.press("q/worker-2\r")
            await terminal.wait_for(lambda text: "worker-1  " not in text and "worker-2" in text)
            terminal.press("\r")
            await terminal.wait_for(lambda text: "instance   worker-2-" in text)
            terminal.press("ql")
            await terminal.wait_for(lambda text: text.startswith("logs of worker-2"))
            terminal.press("qd")
            await terminal.wait_for(lambda text: "drain worker-2?" in text)
            terminal.press("y")
            await cluster.wait_for(lambda: len(cluster.ready("worker")) == 1)
            terminal.press("q" * 4)
            code = await asyncio.to_thread(terminal.process.wait, 10)
            terminal.read()
            assert code == 0
            assert terminal.output.rstrip().endswith(b"\x1b[?1l\x1b>") or LEAVE_MODE in (
                terminal.output
            )
        once = await cluster.command("top", "--once")
        assert "worker-1" in once
        state = json.loads(await cluster.command("top", "--json"))
        assert [row["name"] for row in state["workers"] if row["state"] == "ready"] == ["worker-1"]

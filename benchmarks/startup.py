#!/usr/bin/env python3
"""Measure CPU seconds and memory of a warm start: default model, native engine, 1 worker, 1 frontend.

    benchmarks/startup.py [--rounds 5] [--idle 10] [-- ARGUMENTS OF dynamo run]

Measures every process of the deployment from its start: the CPU until the worker logs "weights opened"
and until /health is 200, and the RSS then. `--idle S` adds the CPU of the whole deployment in S idle
seconds. A first round fills the caches, including Python's bytecode, and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
OPENED = "weights opened"


def cpu_s(pid: int) -> float:
    """Return the user and system time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) * TICK_S


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB


def processes(supervisor: int) -> dict[str, int]:
    """Return the pids by role, from the command lines of the children."""
    pids = {"supervisor": supervisor}
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for pid in map(int, children):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "_child" in words:
            role = words[words.index("_child") + 1]
            if "--fork-server" in words and "fork server" not in pids:
                role = "fork server"  # the first of them
            pids[role if role not in pids else f"{role}-{pid}"] = pid
    return pids


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(state: str) -> dict[str, str]:
    """Return an environment with state and bytecode in the folder of this run."""
    mine = {"XDG_RUNTIME_DIR": state, "PYTHONPYCACHEPREFIX": f"{state}/bytecode"}
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | mine


class Start:
    """A deployment that is measured from its start."""

    def __init__(self, arguments: list[str], state: str) -> None:
        port = free_port()
        self.health = f"http://127.0.0.1:{port}/health"
        command = [sys.executable, "-m", "dynamo", "run", "--http-port", str(port), *arguments]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(state),
        )
        self.log: list[str] = []
        self.opened: dict[str, float] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until_ready(self) -> float:
        """Return the seconds until /health is 200. Exits with the log if the deployment ends."""
        while self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.health, timeout=5):
                    return time.monotonic() - self.began
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                pass
            time.sleep(0.02)
        sys.exit("".join(self.log))

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds by role until now."""
        return {role: cpu_s(pid) for role, pid in processes(self.process.pid).items()}

    def memory(self) -> dict[str, float]:
        """Return the RSS by role in MB."""
        return {role: rss_mb(pid) for role, pid in processes(self.process.pid).items()}

    def stop(self) -> None:
        """Stop the deployment and wait."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if OPENED in line and not self.opened:
                self.opened = self.cpu()
            self.log.append(line)


def one_round(arguments: list[str], state: str, idle_s: float) -> dict[str, dict[str, float]]:
    """Measure one start."""
    start = Start(arguments, state)
    try:
        wall = {"seconds to ready": start.until_ready()}
        time.sleep(0.3)
        ready, memory = start.cpu(), start.memory()
        figures = {"CPU s to weights opened": start.opened, "CPU s to ready": ready}
        for each in figures.values():
            each["sum"] = sum(each.values())
        if idle_s:
            before = sum(start.cpu().values())
            time.sleep(idle_s)
            wall["idle CPU %"] = (sum(start.cpu().values()) - before) / idle_s * 100
        return figures | {"RSS MB": memory, "wall": wall}
    finally:
        start.stop()


def main() -> None:
    """Start several times and print medians as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=0)
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        one_round(args.arguments, state, 0)
        rounds = [one_round(args.arguments, state, args.idle) for _ in range(args.rounds)]
    for name in rounds[0]:
        keys = rounds[0][name]
        medians = {
            key: statistics.median(run[name].get(key, 0.0) for run in rounds) for key in keys
        }
        print(name, json.dumps({key: round(value, 2) for key, value in medians.items()}))


if __name__ == "__main__":
    main()

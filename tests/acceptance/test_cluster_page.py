"""The commands of docs/how-to/cluster.md, with other ports and another model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import free_port
from tests.support.servers import EtcdProcess, NatsProcess

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "cluster.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVERS = ("etcd ", "nats-server")


class Terminal:
    """Runs the page's commands. Commands that serve run until `end`."""

    def __init__(self, home: Path, model: Path, etcd: EtcdProcess, nats: NatsProcess) -> None:
        self.port = free_port()
        self.log = home / "log"
        self._home = home
        self._running: list[subprocess.Popen[bytes]] = []
        self._replacements = {
            "2379": str(etcd.port),
            "4222": str(nats.port),
            "8000": str(self.port),
            "./model": str(model),
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "XDG_RUNTIME_DIR": str(home), "ETCDCTL_ENDPOINTS": etcd.url[7:]}
        self.environ = os.environ | own

    def run(self, command: str) -> str:
        """Run a line of the page and return its output, empty for a command that serves."""
        for original, replacement in self._replacements.items():
            command = command.replace(original, replacement)
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            output = self._shell(f"echo {value}")
            self.environ[name] = output.strip()
            return output
        if not command.startswith("dynamo run"):
            return self._shell(command)
        with self.log.open("ab") as log:
            self._running.append(
                subprocess.Popen(
                    shlex.split(command), env=self.environ, stdout=log, stderr=log, cwd=self._home
                )
            )
        end = time.monotonic() + 40
        while self.log.read_text().count(" served ") < len(self._running):
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)
        return ""

    def end(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in reversed(self._running):
            assert process.wait(20) == 0, self.log.read_text()

    def _shell(self, command: str) -> str:
        return subprocess.run(
            ["bash", "-c", command],
            env=self.environ,
            check=True,
            capture_output=True,
            text=True,
            cwd=self._home,
        ).stdout


@pytest.fixture
def terminal(tmp_path: Path, tiny_model: Path) -> Iterator[Terminal]:
    tmp_path.chmod(0o700)
    with EtcdProcess() as etcd, NatsProcess() as nats:
        terminal = Terminal(tmp_path, tiny_model, etcd, nats)
        yield terminal
        terminal.end()


def test_the_page_works(terminal: Terminal) -> None:
    outputs = {}
    for block in BLOCK.findall(PAGE.read_text()):
        for command in block.splitlines():
            if command.startswith(SERVERS):
                continue
            outputs[command] = terminal.run(command)
    records = [text for command, text in outputs.items() if command.startswith("etcdctl")]
    assert records[0].count("/worker/generate/") == 3
    assert "Traceback" not in terminal.log.read_text()


def test_the_servers_that_the_page_starts_are_those_of_the_tests() -> None:
    first = BLOCK.findall(PAGE.read_text())[0].splitlines()
    assert [line.split()[0] for line in first] == ["etcd", "nats-server"]

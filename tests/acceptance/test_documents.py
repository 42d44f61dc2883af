"""Every command of the README, the tutorial and the how-to pages works as it stands there.

Blocks marked `sh` are run in order, with the default model; only ports are others. A command that
serves is up until the next one that serves, or the end of the page. Files that a page tells to
write (a `yaml` block under "`NAME`:") are written. `<!-- not run: WHY -->` above a block skips it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import free_port

from dynamo.models.download import fetch

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/how-to/serve-a-model.md",
    "docs/how-to/several-workers.md",
    "docs/how-to/troubleshooting.md",
    "docs/how-to/watch.md",
)
BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+ -->\n+)?(?:`(?P<file>[^`\n]+)`:\n\n)?"
    r"^```(?P<kind>sh|yaml)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PORT = re.compile(r"\b80\d\d\b")
SERVES = ("make run", "dynamo run")
ELSEWHERE = ("dynamo serve", "dynamo call")
"""Run by the tests of the services' pages."""
PATIENCE_S = 40


class Block(NamedTuple):
    """`file`: what to write it to; else commands."""

    file: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """What is to be done, in order."""
    for found in BLOCK.finditer((ROOT / page).read_text()):
        if not found["skip"] and (found["kind"] == "sh" or found["file"]):
            yield Block(found["file"] or "", found["text"])


class Reader:
    """Does what a page says, in a folder and with a state of its own."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.ports = {"8000": str(free_port())}
        self.done: list[str] = []
        self._folder = folder
        self._log = folder / "log.txt"
        self._serving: subprocess.Popen[bytes] | None = None
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        port = self.ports["8000"]
        self._environ = os.environ | environ | {"PATH": path, "DYNAMO_SERVER__HTTP_PORT": port}
        self._environ["PORT"] = port
        (folder / "model.gguf").symlink_to(fetch())

    def write(self, name: str, text: str) -> None:
        """A file of the page."""
        (self._folder / name).write_text(self._other_ports(text))

    def run(self, command: str) -> None:
        """One command: left running if it serves, else awaited."""
        if command.startswith(ELSEWHERE):
            return
        command = self._other_ports(command)
        if command == "dynamo stop":  # the user who runs the tests may have others
            command += f" {self.ports['8000']}"
        if command.startswith(SERVES):
            self._serve(command)
        else:
            self._await(command)
        self.done.append(command)

    def end(self) -> None:
        """Ctrl-C for what serves; it ends well and in time, if it has not already."""
        if self._serving is None:
            return
        if self._serving.poll() is None:
            os.killpg(self._serving.pid, signal.SIGINT)  # as a terminal does: `make` hears it, too
        try:
            code = self._serving.wait(PATIENCE_S)
            assert code in {0, -signal.SIGINT}, self._log.read_text()
            assert "Traceback" not in self._log.read_text(), self._log.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._serving.pid, signal.SIGKILL)
            self._serving.wait()
            self._serving = None

    def _serve(self, command: str) -> None:
        self.end()
        with self._log.open("wb") as log:
            self._serving = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=ROOT if command.startswith("make") else self._folder,
                start_new_session=True,
            )
        until = time.monotonic() + PATIENCE_S
        while not any(map(healthy, self.ports.values())):
            assert self._serving.poll() is None, self._log.read_text()
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.1)

    def _await(self, command: str) -> None:
        ended = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            env=self._environ,
            cwd=ROOT if command.startswith("source") else self._folder,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ended.returncode == 0, command + ended.stdout + ended.stderr
        assert '"error"' not in ended.stdout
        if "capital of France" in command:
            assert "Paris" in ended.stdout

    def _other_ports(self, text: str) -> str:
        def other(port: re.Match[str]) -> str:
            return self.ports.setdefault(port[0], str(free_port()))

        return PORT.sub(other, text)


def healthy(port: str) -> bool:
    """A request would be served there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def commands(text: str) -> Iterator[str]:
    """One each; continued lines are one."""
    yield from filter(None, text.replace("\\\n", " ").splitlines())


@pytest.fixture
def reader(tmp_path: Path, runtime_environ: Mapping[str, str]) -> Iterator[Reader]:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    made = Reader(tmp_path, {**runtime_environ, "XDG_RUNTIME_DIR": str(state)})
    yield made
    made.end()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(180)
def test_a_page(page: str, reader: Reader) -> None:
    for block in blocks(page):
        if block.file:
            reader.write(block.file, block.text)
            continue
        for command in commands(block.text):
            reader.run(command if made() else command.replace("make run", "dynamo run"))
    assert reader.done


def made() -> bool:
    """`make` is there and `make run` would install nothing first."""
    if shutil.which("make") is None:
        return False
    asked = subprocess.run(["make", "--question", ".venv/.installed"], cwd=ROOT, check=False)
    return asked.returncode == 0

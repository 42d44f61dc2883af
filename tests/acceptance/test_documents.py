"""Every command of the README, the tutorial, the how-to pages and the examples works as it stands.

Blocks marked `sh` and `python` are run in order, with the default model; only ports and durations
are others. A command that serves is up until the next one that serves, or the end of the page;
parts started by `--only` are up together. Files that a page tells to write (a block under "`NAME`:")
are written. `<!-- not run: WHY -->` above a block skips it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
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

from dynamo.models.downloads.default_model import fetch_default_model

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+ -->\n+)?(?:`(?P<file>[^`\n/][^`\n]*)`:\n\n)?"
    r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUN = ("sh", "python")
PORT = re.compile(r"\b80\d\d\b")
DURATION = re.compile(r"--duration \S+")
ASKS = re.compile(r"dynamo (?:chat|bench)(?! http| compare| draw)")
SERVES = re.compile(r"(\w+=\S+ )*(make run|dynamo serve|dynamo run)(?!.* (in=batch|--dry-run))")
BEFORE = {
    "docs/how-to/benchmark.md": "dynamo run out=mock --speedup-ratio 1000",
    "docs/how-to/chat.md": "dynamo run",
    "docs/how-to/client.md": "dynamo run",
}
"""What runs already where a page begins."""
SAID = re.compile(r"^\w+ serves$", re.MULTILINE)
"""What the terminal is told where nothing speaks HTTP."""
PATIENCE_S = 40
TYPING_S = 5
"""A reader types slower than a frontend learns of a service."""


def pages() -> Iterator[str]:
    """Those with something to run."""
    found = [ROOT / "README.md", ROOT / "docs/tutorial.md"]
    found += sorted([*ROOT.glob("docs/how-to/*.md"), *ROOT.glob("examples/*/README.md")])
    for page in found:
        if any(blocks(str(page.relative_to(ROOT)))):
            yield str(page.relative_to(ROOT))


class Block(NamedTuple):
    """`file`: what to write it to; else commands, or a program."""

    file: str
    text: str
    program: bool


def blocks(page: str) -> Iterator[Block]:
    """What is to be done, in order."""
    for found in BLOCK.finditer((ROOT / page).read_text()):
        if not found["skip"] and (found["kind"] in RUN or found["file"]):
            yield Block(found["file"] or "", found["text"], found["kind"] == "python")


class Reader:
    """Does what a page says, in a folder and with a state of its own."""

    def __init__(self, home: Path, folder: Path, environ: Mapping[str, str]) -> None:
        self.ports = {"8000": str(free_port())}
        self.done: list[str] = []
        self._folder = folder
        self._log = home / "log.txt"
        self._serving: list[subprocess.Popen[bytes]] = []
        self._parts = False
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        port = self.ports["8000"]
        self._environ = os.environ | environ | {"PATH": path, "DYNAMO_SERVER__HTTP_PORT": port}
        self._environ |= {"PORT": port, "PYTHONDONTWRITEBYTECODE": "1", "DYNAMO_ROUTER__PORT": "0"}

    def do(self, block: Block) -> None:
        """One block."""
        if block.file:
            (self._folder / block.file).write_text(self._other_ports(block.text))
        elif block.program:
            self.run(f"python -c {shlex.quote(block.text)}")
        else:
            for command in commands(block.text):
                self.run(command if made() else command.replace("make run", "dynamo run"))
        if self._parts:
            self._wait()

    def run(self, command: str) -> None:
        """One command: left running if it serves, else awaited."""
        self.done.append(command)
        if command.startswith("cd "):
            self._folder /= command.removeprefix("cd ")
            return
        port = self.ports["8000"]
        command = DURATION.sub("--duration 1s", self._other_ports(command))
        command = ASKS.sub(rf"\g<0> http://127.0.0.1:{port}", command)
        if command == "dynamo stop":  # the user who runs the tests may have others
            command += f" {port}"
        if SERVES.match(command):
            self.serve(command)
        else:
            self._await(command)

    def end(self) -> None:
        """Ctrl-C for what serves; it ends well and in time, if it has not already."""
        while self._serving:
            self._end(self._serving.pop())

    def _end(self, serving: subprocess.Popen[bytes]) -> None:
        if serving.poll() is None:
            os.killpg(serving.pid, signal.SIGINT)  # as a terminal does: `make` hears it, too
        try:
            code = serving.wait(PATIENCE_S)
            assert code in {0, -signal.SIGINT}, self._log.read_text()
            assert "Traceback" not in self._log.read_text(), self._log.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(serving.pid, signal.SIGKILL)
            serving.wait()

    def serve(self, command: str) -> None:
        """Leave it running; what ran before ends first, unless both are parts of one."""
        part = "--only" in command
        if not part or not self._parts:
            self.end()
            self._log.write_text("")
        self._parts = part
        with self._log.open("ab") as log:
            one = subprocess.Popen(
                ["bash", "-c", re.sub(r"^((?:\w+=\S+ )*)", r"\1exec ", command)],
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=ROOT if command.startswith("make") else self._folder,
                start_new_session=True,
            )
        self._serving.append(one)
        if not part:
            self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not (any(map(healthy, self.ports.values())) or SAID.search(self._log.read_text())):
            assert all(one.poll() is None for one in self._serving), self._log.read_text()
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.1)

    def _await(self, command: str) -> None:
        until = time.monotonic() + TYPING_S
        while True:
            ended = subprocess.run(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self._environ,
                cwd=ROOT if command.startswith("source") else self._folder,
                timeout=PATIENCE_S,
                check=False,
            )
            if '"error"' not in ended.stdout or time.monotonic() > until:
                break
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
def home(tmp_path: Path) -> Path:
    """A folder with all that pages take to be there."""
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for folder in (tmp_path, *tmp_path.glob("examples/*")):
        (folder / "model.gguf").symlink_to(fetch_default_model())
    trace = {"timestamp": 30, "input_length": 40, "output_length": 3, "hash_ids": [1]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(trace) + "\n")
    subprocess.run(["gzip", "--keep", tmp_path / "trace.jsonl"], check=True)
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello there"}]
    (tmp_path / "conversations.json").write_text(json.dumps([{"conversations": turns * 2}]))
    return tmp_path


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, home: Path, runtime_environ: Mapping[str, str]
) -> Iterator[Reader]:
    state = home / "state"
    state.mkdir(mode=0o700)
    page = Path(request.getfixturevalue("page"))
    folder = home / page.parent if page.parts[0] == "examples" else home
    made = Reader(home, folder, {**runtime_environ, "XDG_RUNTIME_DIR": str(state)})
    yield made
    made.end()


@pytest.mark.parametrize("page", list(pages()))
@pytest.mark.timeout(180)
def test_a_page(page: str, reader: Reader) -> None:
    if page in BEFORE:
        reader.serve(BEFORE[page])
    for block in blocks(page):
        reader.do(block)
    assert reader.done


def made() -> bool:
    """`make` is there and `make run` would install nothing first."""
    if shutil.which("make") is None:
        return False
    asked = subprocess.run(["make", "--question", ".venv/.installed"], cwd=ROOT, check=False)
    return asked.returncode == 0

"""Every command of the README, the tutorial, the how-to pages and the examples works.

Blocks marked `sh` and `python` are run in order with the default model. Only ports and durations are
replaced. A command that serves runs until the next one that serves, or until the end of the page.
Parts started with `--only` run together. A block below "`NAME`:" is written to that file.
`<!-- not run: WHY -->` above a block skips it. Packages that `make run` does not install are hidden
unless the page has named them before.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
ERROR = re.compile(r'"error"(?!:\s*null)')
"""An error in an answer of a server. Responses have the field without one."""
BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+ -->\n+)?(?:`(?P<file>[^`\n/][^`\n]*)`:\n\n)?"
    r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUN = ("sh", "python")
PORT = re.compile(r"\b80\d\d\b")
DURATION = re.compile(r"--duration \S+")
TIMELESS = re.compile(r"dynamo bench(?= http| -)(?!.*--(?:duration|requests|trace|preset))")
"""A benchmark that would run for ten seconds."""
SERVES = re.compile(
    r"(\w+=\S+ )*(make run|dynamo serve|dynamo run|dynamo indexer)"
    r"(?!.* (in=batch|in=text|--dry-run|&$))"
)
CHOOSES = re.compile(r"dynamo (why|slo|top|chat|bench)(?! http| compare| draw)")
"""Commands that take the only deployment. A user who runs the tests may have others."""
SHELL_BLOCK = re.compile(r"^ *```(?:sh|bash)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
READY_LINE = re.compile(r"^\w+ serves$", re.MULTILINE)
"""Output of a deployment without HTTP when it is ready."""
TIMEOUT_S = 40
RETRY_S = 5
"""Commands are retried for this long, since a frontend discovers a service with a delay."""


def all_pages() -> Iterator[Path]:
    """Yield every page with commands for readers."""
    for pattern in ("*.md", "docs/*.md", "docs/how-to/*.md", "docs/architecture/*.md"):
        yield from sorted(ROOT.glob(pattern))
    yield from sorted(ROOT.glob("examples/*/README.md"))


def pages() -> Iterator[str]:
    """Yield the pages that have blocks to run."""
    paths = [ROOT / "README.md", ROOT / "docs/tutorial.md", ROOT / "docs/requirements.md"]
    paths += sorted([*ROOT.glob("docs/how-to/*.md"), *ROOT.glob("examples/*/README.md")])
    for page in paths:
        if any(blocks(str(page.relative_to(ROOT)))):
            yield str(page.relative_to(ROOT))


NEEDED = re.compile(r"(?:extra `|pip install (?:--\S+ )*(?:'?[\w.-]*\[)?)([\w-]+)")
"""An extra or a package that a page says to install."""
HIDE = """
import os
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_visible(name, path=None, target=None):
    hidden = name.partition(".")[0] in os.environ["HIDDEN_MODULES"].split(",")
    return None if hidden else find_spec(name, path, target)

PathFinder.find_spec = find_visible
"""


def hidden_modules(needed: Collection[str]) -> str:
    """Return the modules that `make run` does not install and no extra or package of `needed`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = re.findall(
        r"^([\w.-]+)==", (ROOT / "requirements/run.txt").read_text(), re.MULTILINE
    )
    named = [*needed, *(line for name in needed for line in extras.get(name, ()))]
    present = {"pip", "setuptools", "dynamo-python", *map(normal_name, installed)}
    present |= set(with_dependencies(named))
    return ",".join(
        module for module, names in packages_by_module().items() if present.isdisjoint(names)
    )


@cache
def packages_by_module() -> Mapping[str, Sequence[str]]:
    """Return the packages that each module is from. Reading them takes 0.2 s, and there are 200 blocks."""
    return {
        module: [normal_name(name) for name in names]
        for module, names in packages_distributions().items()
    }


def with_dependencies(lines: Iterable[str]) -> Iterator[str]:
    """Yield the packages of lines like "numpy>=2", and those that they depend on."""
    pending, known = [*lines], set()
    while pending:
        line = pending.pop()
        name = normal_name(re.split(r"[^\w.-]", line)[0])
        if name and name not in known and "extra ==" not in line:
            known.add(name)
            yield name
            with suppress(PackageNotFoundError):
                pending += requires(name) or ()


def normal_name(name: str) -> str:
    """Return a package's name as indexes write it."""
    return name.lower().replace("_", "-")


class Block(NamedTuple):
    """A block of a page: the content of `file`, else a Python program or shell commands. `needed`
    are the extras and packages that the page names up to there."""

    file: str
    text: str
    program: bool
    needed: frozenset[str]


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks to run or write, in order."""
    text = (ROOT / page).read_text()
    for match in BLOCK.finditer(text):
        if not match["skip"] and (match["kind"] in RUN or match["file"]):
            needed = frozenset(NEEDED.findall(text[: match.end()]))
            yield Block(match["file"] or "", match["text"], match["kind"] == "python", needed)


class Reader:
    """Follows the instructions of a page in a separate folder with a separate state folder."""

    def __init__(self, home: Path, folder: Path, environ: Mapping[str, str]) -> None:
        self.ports = {"8000": str(free_port())}
        self.commands: list[str] = []
        self._folder = folder
        self._log = home / "log.txt"
        self._serving: list[subprocess.Popen[bytes]] = []
        self._parts = False
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        port = self.ports["8000"]
        self._environ = os.environ | environ | {"PATH": path, "DYNAMO_SERVER__HTTP_PORT": port}
        self._environ |= {"PORT": port, "PYTHONDONTWRITEBYTECODE": "1", "DYNAMO_ROUTER__PORT": "0"}
        self._environ["DYNAMO_OBSERVER__ENABLED"] = "true"
        (home / "hide").mkdir()
        (home / "hide" / "sitecustomize.py").write_text(HIDE)
        self._environ["PYTHONPATH"] = str(home / "hide")

    def follow(self, block: Block) -> None:
        """Write the block's file or run its commands."""
        self._environ["HIDDEN_MODULES"] = hidden_modules(block.needed)
        if block.file:
            (self._folder / block.file).write_text(self._other_ports(block.text))
        elif block.program:
            self.run(f"python -c {shlex.quote(block.text)}")
        else:
            for command in commands(block.text):
                can_make = make_is_up_to_date()
                self.run(command if can_make else command.replace("make run", "dynamo run"))

    def run(self, command: str) -> None:
        """Start a command that serves, or run another command to its end."""
        self.commands.append(command)
        if command.startswith("cd "):
            self._folder /= command.removeprefix("cd ")
            return
        command = DURATION.sub("--duration 1s", self._other_ports(command))
        command = TIMELESS.sub(r"\g<0> --duration 1s", command)
        port = self.ports["8000"]
        command = CHOOSES.sub(rf"\g<0> --deployment {port}", command)
        command = re.sub(r"^dynamo stop$", f"dynamo stop {port}", command)
        if SERVES.match(command):
            self.serve(command)
        else:
            if self._parts:
                self._wait()
            self._await(command)

    def end(self) -> None:
        """Interrupt the commands that serve and check that they end without an error."""
        if self._parts:
            self._wait()
        self._parts = False
        while self._serving:
            self._end(self._serving.pop())

    def _end(self, serving: subprocess.Popen[bytes]) -> None:
        if serving.poll() is None:
            os.killpg(serving.pid, signal.SIGINT)  # Ctrl-C signals the whole group, `make` too
        try:
            code = serving.wait(TIMEOUT_S)
            assert code in {0, -signal.SIGINT}, self._log.read_text()
            assert "Traceback" not in self._log.read_text(), self._log.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(serving.pid, signal.SIGKILL)
            serving.wait()

    def serve(self, command: str) -> None:
        """Start a command that serves. Earlier ones end first, unless both have `--only`."""
        part = "--only" in command
        if not part or not self._parts:
            self.end()
            self._log.write_text("")
        self._parts = part
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", re.sub(r"^((?:\w+=\S+ )*)", r"\1exec ", command)],
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=ROOT if command.startswith("make") else self._folder,
                start_new_session=True,
            )
        self._serving.append(process)
        if not part:
            self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (
            any(map(healthy, self.ports.values())) or READY_LINE.search(self._log.read_text())
        ):
            running = all(process.poll() is None for process in self._serving)
            assert running, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def _await(self, command: str) -> None:
        deadline = time.monotonic() + RETRY_S
        while True:
            completed = subprocess.run(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self._environ,
                cwd=ROOT if command.startswith("source") else self._folder,
                timeout=TIMEOUT_S,
                check=False,
            )
            if not ERROR.search(completed.stdout) or time.monotonic() > deadline:
                break
        assert completed.returncode == 0, command + completed.stdout + completed.stderr
        assert not ERROR.search(completed.stdout), completed.stdout
        if "capital of France" in command:
            assert "Paris" in completed.stdout

    def _other_ports(self, text: str) -> str:
        def other(port: re.Match[str]) -> str:
            return self.ports.setdefault(port[0], str(free_port()))

        return PORT.sub(other, text)


def healthy(port: str) -> bool:
    """Return True if the server on this port can serve requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a block. A backslash joins lines."""
    yield from filter(None, text.replace("\\\n", " ").splitlines())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Create a folder with the files that pages expect."""
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, home: Path, runtime_environ: Mapping[str, str]
) -> Iterator[Reader]:
    state = home / "state"
    state.mkdir(mode=0o700)
    page = Path(request.getfixturevalue("page"))
    folder = home / page.parent if page.parts[0] == "examples" else home
    reader = Reader(home, folder, {**runtime_environ, "XDG_RUNTIME_DIR": str(state)})
    yield reader
    reader.end()


def test_nothing_stands_behind_a_command_that_serves() -> None:
    """A reader's terminal would never come to it."""
    behind = [
        (str(page.relative_to(ROOT)), command)
        for page in all_pages()
        for block in SHELL_BLOCK.findall(page.read_text())
        for command in list(commands(block))[:-1]
        if SERVES.match(command.strip())
    ]
    assert behind == []


@pytest.mark.parametrize("page", list(pages()))
@pytest.mark.timeout(180)
def test_a_page(page: str, reader: Reader) -> None:
    for block in blocks(page):
        reader.follow(block)
    assert reader.commands


def make_is_up_to_date() -> bool:
    """Return True if `make` exists and `make run` would install nothing."""
    if shutil.which("make") is None:
        return False
    command = ["make", "--question", ".venv/.installed"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0

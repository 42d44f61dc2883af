"""The messages and leftovers of `make` where it cannot install, and the folders of test runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
OLD = """#!/bin/sh
test "$1" = --version && echo Python 3.10.4 && exit
test "$1" = -c && exec {python} -c 'import sys
sys.version_info = (3, 10, 4, "final", 0)
exec(sys.argv[1])' "$2"
echo "ran with $*"
"""

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what `make run` reads before it runs anything."""
    checkout = tmp_path / "checkout"
    for name in ("Makefile", "pyproject.toml", "scripts", "requirements", "src/dynamo/__init__.py"):
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    return checkout


def make(checkout: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run make with a package index that does not answer."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE"))}
    pip = {"PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}/", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["make", *words],
        cwd=checkout,
        env=inherited | pip | environ,
        capture_output=True,
        text=True,
    )


def old_python(path: Path) -> Path:
    """Write an interpreter that takes itself for 3.10.4."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD.format(python=sys.executable))
    path.chmod(0o755)
    return path


@needs_make
@pytest.mark.parametrize("where", ["command line", "environment"])
def test_an_old_interpreter_is_refused_at_once(checkout: Path, tmp_path: Path, where: str) -> None:
    named = f"PYTHON={old_python(tmp_path / 'python3.10')}"
    ran = (
        make(checkout, "run", named)
        if where == "command line"
        else make(checkout, "run", PYTHON=named.partition("=")[2])
    )

    assert ran.returncode == 2
    assert f"{named} is Python 3.10.4, and Python 3.11 or newer is needed" in ran.stderr
    assert (ran.stdout, ran.stderr.count("\n")) == ("", 1)
    assert not (checkout / ".venv").exists()


@needs_make
def test_an_interpreter_that_does_not_run_is_refused(checkout: Path, tmp_path: Path) -> None:
    ran = make(checkout, "setup", f"PYTHON={tmp_path / 'nowhere'}")

    assert ran.returncode == 2
    assert "nowhere does not run" in ran.stderr
    assert not (checkout / ".venv").exists()


@needs_make
def test_an_environment_of_an_old_interpreter_is_named(checkout: Path) -> None:
    old_python(checkout / ".venv" / "bin" / "python")
    ran = make(checkout, "run")

    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.splitlines()[0] == (
        "make: .venv has Python 3.10.4, and Python 3.11 or newer is needed: "
        "run rm -r .venv, then make again"
    )
    assert (checkout / ".venv" / "bin" / "python").exists()


@needs_make
def test_an_index_that_does_not_answer_is_one_line_and_leaves_nothing(checkout: Path) -> None:
    ran = make(checkout, "run", f"PYTHON={sys.executable}")

    assert ran.returncode == 2
    line, of_make = ran.stderr.splitlines()
    assert line.startswith("make: the package index does not answer (No matching distribution")
    assert of_make.startswith("make: ***")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("complete", [True, False])
def test_a_failure_removes_only_an_environment_that_was_never_complete(
    tmp_path: Path, complete: bool
) -> None:
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    if not complete:
        (folder / ".installing").touch()
    command = [ROOT / "scripts" / "install.sh", folder, "", "--no-such-option"]
    ran = subprocess.run(command, capture_output=True, text=True)

    assert ran.returncode != 0
    assert "no such option" in ran.stderr
    assert folder.exists() == complete
    assert not list(tmp_path.glob("*/.installing*"))


def isolated(tmp_path: Path, program: str) -> subprocess.Popen[str]:
    """Run a Python program in folders of its own, in a process group of its own."""
    command = [str(ROOT / "scripts" / "isolated.sh"), sys.executable, "-S", "-c", program]
    home = tmp_path / "home"
    (home / ".config" / "pip").mkdir(parents=True)
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        command,
        env=environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


SHOW = """
import os
names = "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "PIP_CACHE_DIR", "XDG_CACHE_HOME"
print(*map(os.environ.get, names), sep="\\n")
folder = os.environ["TMPDIR"] + "/locked"
os.mkdir(folder)
open(folder + "/file", "w").close()
os.chmod(folder, 0)
print(oct(os.stat(os.environ["XDG_RUNTIME_DIR"]).st_mode & 0o777))
print(os.path.isdir(os.environ["HOME"] + "/.config/pip"), flush=True)
"""


WAIT = "import time\nwhile True: time.sleep(0.1)"
"""Waits for a signal, also for one that comes just before the wait, which `pause` would miss."""


@pytest.mark.parametrize("end", ["success", "failure", "Ctrl-C", "SIGTERM"])
def test_folders_of_a_test_run_are_its_own_and_removed(tmp_path: Path, end: str) -> None:
    ends = {"success": "os._exit(0)", "failure": "os._exit(3)"}
    process = isolated(tmp_path, SHOW + ends.get(end, WAIT))
    assert process.stdout is not None
    home, tmp, runtime, pip_cache, cache, mode, configured = (
        process.stdout.readline().strip() for _ in range(7)
    )
    if end in {"Ctrl-C", "SIGTERM"}:
        os.killpg(process.pid, signal.SIGINT if end == "Ctrl-C" else signal.SIGTERM)
    status = process.wait()
    process.stdout.close()

    expected = {"success": 0, "failure": 3, "Ctrl-C": 130, "SIGTERM": 143}
    assert status == expected[end]
    root = Path(home).parent
    assert (root.parent, Path(tmp).parent, Path(runtime).parent) == (tmp_path, root, root)
    assert (pip_cache, cache) == (str(tmp_path / "cache" / "pip"), "None")
    assert (mode, configured) == ("0o700", "True")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_an_interrupt_while_the_environment_is_made_prints_no_traceback(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\nkill -INT $PPID\nexit 1\n")
    python.chmod(0o755)
    command = [ROOT / "scripts" / "install.sh", tmp_path / "environment", python]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "")
    assert not (tmp_path / "environment").exists()

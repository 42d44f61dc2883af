"""Files of deployments come first, and the suite continues when one of its processes has died, as a
test beyond its time limit ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [
    *(sys.executable, "-m", "pytest", "-q", "-p", "tests.support.file_scheduling"),
    *("--dist", "loadfile", "-p", "no:cacheprovider"),
]
DIES_ONCE = """
import os, pathlib, time

def test_dies_once():
    died = pathlib.Path(__file__).with_name("died")
    if not died.exists():
        died.touch()
        time.sleep(0.3)
        os._exit(1)

def test_other(): pass
"""
ONCE_ALL_BEGAN = """
import os, pathlib, time

def test_it():
    begun = pathlib.Path("begun")
    with begun.open("a") as file:
        file.write(pathlib.Path(__file__).parent.name + "\\n")
    end = time.monotonic() + 20
    while len(begun.read_text().split()) < int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):
        assert time.monotonic() < end
        time.sleep(0.01)
"""
"""Each process is in its first test before one begins a second."""
PAGES = """
import os, pathlib, pytest, time

@pytest.mark.parametrize("page", range(8))
def test_a_page(page):
    pathlib.Path(os.environ["PYTEST_XDIST_WORKER"]).touch()
    end = time.monotonic() + 20
    while not all(pathlib.Path(name).exists() for name in ("gw0", "gw1")):
        assert time.monotonic() < end, "the other process has no page"
        time.sleep(0.01)
"""


def test_all_files_run_after_a_process_has_died(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_dies.py").write_text(DIES_ONCE)
    for count in [1, 2, 3, 4, 5] * 4:
        tests = "\n".join(f"def test_{number}(): pass" for number in range(count))
        (tmp_path / f"test_{len(list(tmp_path.iterdir()))}.py").write_text(tests)

    run = run_suite(tmp_path)

    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 failed, 62 passed" in run.stdout  # test_dies_once runs again


@pytest.mark.parametrize(
    ("processes", "first"),
    [(1, {"acceptance"}), (2, {"acceptance"}), (3, {"acceptance", "unit"})],
)
def test_slow_files_come_first_and_a_third_process_begins_with_others(
    tmp_path: Path, processes: int, first: set[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, more in (("unit", "def test_other(): pass\n"), ("acceptance", "")):
        folder = tmp_path / "tests" / name
        folder.mkdir(parents=True)
        for number in range(3):
            (folder / f"test_{name}_{number}.py").write_text(ONCE_ALL_BEGAN + more)

    run = run_suite(tmp_path, processes)

    assert run.returncode == 0, run.stdout + run.stderr
    begun = (tmp_path / "begun").read_text().split()
    assert set(begun[:processes]) == first
    assert len(begun) == 6


def test_pages_of_one_file_run_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    folder = tmp_path / "tests" / "acceptance"
    folder.mkdir(parents=True)
    (folder / "test_documents.py").write_text(PAGES)

    run = run_suite(tmp_path)

    assert run.returncode == 0, run.stdout + run.stderr
    assert "8 passed" in run.stdout


def run_suite(folder: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "-n", str(processes)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )

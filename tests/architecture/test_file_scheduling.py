"""The suite continues when one of its processes has died, as a test beyond its time limit ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OPTIONS = ["-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
ROOT = Path(__file__).parents[2]
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


def test_all_files_run_after_a_process_has_died(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_dies.py").write_text(DIES_ONCE)
    for count in [1, 2, 3, 4, 5] * 4:
        tests = "\n".join(f"def test_{number}(): pass" for number in range(count))
        (tmp_path / f"test_{len(list(tmp_path.iterdir()))}.py").write_text(tests)

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.file_scheduling", *OPTIONS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 failed, 62 passed" in run.stdout  # test_dies_once runs again

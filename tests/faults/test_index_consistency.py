"""Test that the index equals the engines' caches again after faults of events and processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "index_consistency.py"


def test_the_index_equals_the_engines_caches_after_every_fault() -> None:
    command = [sys.executable, BENCHMARK, "--workers", "2", "--rounds", "1", "--load-s", "0.3"]
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=55)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    result = json.loads(process.stdout)
    assert set(result["equal_after_s"]) >= {"dropped events", "paused publisher", "kill -9"}
    assert result["batches_dropped"] > 0
    assert result["events_lost"] == 0

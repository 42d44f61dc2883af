"""After dropped events, a paused publisher, kill -9 and a router that begins anew, the index equals
the engines' own dumps again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

STORM = Path(__file__).parents[2] / "benchmarks" / "index_truth.py"


def test_the_index_equals_the_engines_caches_after_every_fault() -> None:
    command = [sys.executable, STORM, "--workers", "2", "--rounds", "1", "--load-s", "0.3"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=55)
    found = json.loads(told.stdout)
    assert set(found["equal_after_s"]) >= {"dropped events", "paused publisher", "kill -9"}
    assert found["batches_dropped"] > 0
    assert found["events_lost"] == 0

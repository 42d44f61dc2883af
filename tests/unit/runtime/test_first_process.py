"""The first process of each kind on an empty machine leaves folders that the next one accepts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.first_process import KINDS, MACHINES

TESTS = Path(__file__).parents[2]
PROGRAM = TESTS / "support" / "first_process.py"
TRACE = TESTS / "data" / "traces" / "chats.jsonl"


@pytest.fixture(scope="module")
def results() -> Any:
    """The folders and output of each kind of process on each machine."""
    ran = subprocess.run([sys.executable, PROGRAM, TRACE], capture_output=True, check=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_first_process_makes_private_folders(results: Any, machine: str, kind: str) -> None:
    left = results[machine][kind]
    assert left["status"] == 0, left["printed"]
    assert set(left["modes"].values()) <= {"0o700"}, left["modes"]
    expected = "run/dynamo" if machine == "runtime folder" else "tmp/dynamo-"
    assert expected in left["root"]
    assert "is ignored" not in left["printed"]
    assert left["printed"].count("is closed to them now") == (machine == "open root")
    if kind in {"supervisor", "runtime", "discovery", "client", "KvRouter"}:
        assert any(path.endswith("/discovery") for path in left["modes"])
    if kind == "doctor":
        assert "ok    state folder" in left["printed"]

"""The script that measures a card runs all its steps on the CPU, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="make test-torch installs PyTorch")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def run_script(out: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), "--out", str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.timeout(
    1500
)  # five deployments, one after the other: half a minute if nothing else runs
def test_no_step_fails_on_the_cpu(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--quick", "--minutes", "24")  # a busy machine is slow
    printed = run_script(tmp_path / "gpu.json", *flags)
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert not [step for step in steps if step["state"] == "failed"], printed
    passed = {step["step"] for step in steps if step["state"] == "passed"}
    assert {"live: kill -9 mid-stream", "live: roles apart on one device", "qwen: tiers"} <= passed
    assert "| hand-over between two workers |" in (tmp_path / "gpu.md").read_text()


def test_a_part_that_breaks_is_told_and_the_others_run(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--quick", "--parts", "none,card")
    printed = run_script(tmp_path / "gpu.json", *flags)
    assert "| none | failed | KeyError: 'none' |" in printed
    assert "| speeds of the card | passed |" in printed


def test_nothing_is_measured_without_a_card(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a card is here")
    assert "finds no card here: nothing is measured" in run_script(tmp_path / "gpu.json")
    assert not list(tmp_path.iterdir())

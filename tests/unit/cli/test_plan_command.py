"""`dynamo plan`: decisions of a planner, and those that it would make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.cli.entry import main
from dynamo.operations.planner.decisions import FILE, PLANNER_FOLDER, PlannerLog, read_decisions
from dynamo.operations.planner.values import KindState, Order, ScaleDecision


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [
        {"timestamp": number * 2000, "input_length": 2000, "output_length": 50}
        for number in range(240)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def decision(number: int) -> ScaleDecision:
    orders = [Order(number, "worker", 3, "more load")]
    return ScaleDecision(number, number * 15.0, {"worker": KindState(2, 2)}, orders=orders)


def test_decisions_are_kept_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = tmp_path / "plant"
    deployment.mkdir()
    log = PlannerLog(deployment / PLANNER_FOLDER)
    for number in range(1, 6):
        log.write(decision(number))
    with (deployment / PLANNER_FOLDER / FILE).open("ab") as file:
        file.write(b'{"number": 6, "now')  # of a planner that died
    assert [each.number for each in read_decisions(deployment / PLANNER_FOLDER, 3)] == [3, 4, 5]
    monkeypatch.setattr("dynamo.operations.planner.decisions.state_roots", lambda: [tmp_path])
    assert main(["plan", "plant", "--explain", "--last", "2"]) == 0
    assert capsys.readouterr().out.count("worker 2 -> 3") == 2
    assert main(["plan", "other"]) == 1
    assert "no planner of a deployment 'other'" in capsys.readouterr().err


def test_a_dry_run_plays_the_policy(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    promise = ["--planner.ttft", "2s", "--planner.itl", "60ms", "--workers", "2"]
    assert main(["plan", "--dry-run", trace, *promise, "--explain", "--last", "2"]) == 0
    out = capsys.readouterr().out
    assert "workers of work arrived" in out
    assert "policy flow acts as rule: the history has" in out
    assert "GPU-hours" in out


def test_a_promise_beyond_physics_is_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    promise = ["--planner.ttft", "2s", "--planner.itl", "1ms", "--planner.policy", "rule"]
    assert main(["plan", "--dry-run", trace, *promise]) == 0
    assert capsys.readouterr().out.count("no number of workers keeps 1 ms between tokens") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "nothing is promised"),
        (["--planner.budget", "0"], "at least 1"),
        (["--planner.min", "3", "--planner.max", "2"], "is above planner.max"),
        (["--planner.ttft", "-1"], "planner.ttft"),
        (["--planner.policy", "oracle"], "one of: flow, rule"),
        (["--planner.sizes", "worker"], "planner.sizes"),
        (["--speed", "0"], "--speed: 0 is not above 0"),
        (["--rows", "-1"], "--rows: -1 is not above 0"),
    ],
)
def test_wrong_input_is_usage(
    trace: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--dry-run", trace, *flags]) == 2
    assert words in capsys.readouterr().err

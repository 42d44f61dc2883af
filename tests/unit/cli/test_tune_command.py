"""`dynamo tune`: better settings by a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.cli.entry import main
from dynamo.cli.foresight.tune import _check_models
from dynamo.core.errors import ConfigError
from dynamo.operations.tuner.search import SettingSearch, Values

PROMISE = ["--planner.ttft", "2s", "--planner.itl", "60ms"]
SMALL = ["--workers", "1", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [
        {"timestamp": number * 25, "input_length": 400, "output_length": 100}
        for number in range(250)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_larger_batches_are_recommended_where_requests_wait(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--trace", trace, *SMALL, *PROMISE, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["replays"] <= 32
    best = answer["recommendations"][0]
    assert best["before"]["engine.max_num_seqs"] == 16
    assert best["after"]["engine.max_num_seqs"] > 16
    assert best["old"]["broken"] > 0.5
    assert best["new"]["broken"] == 0.0
    assert best["comparison"]["gain"] > 0.5
    assert main(["tune", "--trace", trace, "--rows", "50", *PROMISE]) == 0
    assert "nothing better was found" in capsys.readouterr().out


def test_what_no_promise_allows_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--trace", trace, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "refused: engine.max_num_" in out
    assert "a promise by planner.ttft and planner.itl" in out


def test_an_interrupted_search_prints_what_it_found(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = SettingSearch._play

    def interrupted(self: SettingSearch, stage: int, values: Values) -> None:
        if self.replays == 9:
            raise KeyboardInterrupt
        play(self, stage, values)

    monkeypatch.setattr(SettingSearch, "_play", interrupted)
    assert main(["tune", "--trace", trace, *SMALL, *PROMISE]) == 130
    captured = capsys.readouterr()
    assert "interrupted after 9 replays" in captured.err
    assert captured.out.startswith("1. engine.max_num_")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "TRACE", "--rows", "20"], "the record has 20 requests; a search needs 50"),
        (["--trace", "TRACE", "--speed", "0"], "--speed: 0 is not above 0"),
        (["--trace", "missing.jsonl"], "missing.jsonl: No such file"),
        (["http-1", "--trace", "trace.jsonl"], "two sources of requests"),
        (["no-such-deployment"], "no record of a deployment 'no-such-deployment'"),
        (["--tuner.min_safety_score", "2"], "tuner.min_safety_score"),
        (["--tuner.tuning_observation_period", "nan"], "tuner.tuning_observation_period"),
    ],
)
def test_wrong_input_is_said_in_a_line(
    trace: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *(trace if word == "TRACE" else word for word in words)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_trace_of_another_model_is_refused(trace: str, tmp_path: Path) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    row = {"timestamp": 0, "input_length": 9, "output_length": 9, "model": "own"}
    (folder / "frontend-1.jsonl").write_text(json.dumps(row) + "\n")
    _check_models(trace, str(folder))  # names no model
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({**row, "model": "other"}))
    with pytest.raises(ConfigError, match="has requests for other, and the deployment serves own"):
        _check_models(str(other), str(folder))

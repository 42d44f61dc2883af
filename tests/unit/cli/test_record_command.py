"""`dynamo record` shows a record and writes it as a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.foresight.record import run
from dynamo.core.errors import ConfigError
from dynamo.runtime.deployment import STATE_ROOT_VARIABLE


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_ROOT_VARIABLE, str(tmp_path))
    tmp_path.chmod(0o700)
    folder = tmp_path / "http-8000" / "record"
    folder.mkdir(parents=True)
    return folder


def write(folder: Path, *rows: dict[str, Any]) -> None:
    lengths = {"input_length": 100, "output_length": 10}
    text = "".join(json.dumps(lengths | row) + "\n" for row in rows)
    (folder / "frontend-00001.jsonl").write_text(text)


ROWS = (
    {"timestamp": 5_000.0, "ttft_ms": 20.0, "e2e_ms": 400.0, "session": "a", "worker": "w1"},
    {"timestamp": 5_100.0, "end": "overloaded"},
    {"timestamp": 5_600.0, "ttft_ms": 40.0, "e2e_ms": 100.0, "session": "a", "worker": "w2"},
    {"timestamp": 5_650.0, "ttft_ms": 60.0, "e2e_ms": 100.0, "session": "a", "moves": 1},
)


@pytest.mark.parametrize("name", ["", "8000", "http-8000"])
def test_show_counts_what_was_recorded(
    record: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(record, *ROWS)
    with (record / "frontend-00001.jsonl").open("a") as file:
        file.write('{"timest')
    assert run(["show", *filter(None, [name]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["folder"] == str(record)
    assert (shown["requests"], shown["damaged_lines"], shown["moved"]) == (4, 1, 1)
    assert shown["ends"] == {"complete": 3, "overloaded": 1}
    assert shown["ttft_ms"]["mean"] == pytest.approx(40.0)
    assert run(["show"]) == 0
    assert "complete 3, overloaded 1" in capsys.readouterr().out


def test_export_writes_a_trace_from_zero(record: Path, tmp_path: Path) -> None:
    write(record, *ROWS)
    out = tmp_path / "trace.jsonl.gz"
    assert run(["export", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert [row["timestamp"] for row in rows] == [0.0, 100.0, 600.0, 650.0]
    assert rows[1]["end"] == "overloaded"


def test_sessions_are_sequences_unless_their_requests_overlap(record: Path, tmp_path: Path) -> None:
    write(record, *ROWS)
    out = tmp_path / "trace.jsonl"
    assert run(["export", str(record), "--sessions", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("session_id") for row in rows] == ["a.0", None, "a.0", "a.1"]
    assert [row.get("delay") for row in rows] == [0.0, None, 200.0, 0.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "other"], "no record of a deployment 'other'"),
        (["export", "8000"], "export needs --out"),
        (["show", "8000"], "no requests"),
    ],
)
def test_what_is_missing_is_named(record: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(words)

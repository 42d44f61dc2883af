from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.cli.inputs.batch_file import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    parse_batch_line,
    parse_batch_options,
    plan_batch,
    read_answered_ids,
    read_pending_lines,
)
from dynamo.cli.run import parse_words, parser
from dynamo.core.errors import ConfigError

HI = b'[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("line", "name", "path", "body"),
    [
        (
            b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}',
            "a",
            COMPLETIONS_PATH,
            {"model": "default", "prompt": "x"},
        ),
        (
            b'{"id":7,"prompt":"x","model":"m"}',
            "7",
            COMPLETIONS_PATH,
            {"model": "m", "prompt": "x"},
        ),
        (
            b'{"text":"hi","stream":true,"top_p":0.5}',
            "line-3",
            CHAT_PATH,
            {
                "model": "default",
                "top_p": 0.5,
                "messages": [{"role": "user", "content": "hi"}],
            },
        ),
    ],
)
def test_lines(line: bytes, name: str, path: str, body: dict[str, object]) -> None:
    task = parse_batch_line(line, 3)

    assert (task.custom_id, task.path, task.body, task.error) == (name, path, body, "")


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b'{"id": "x"}', b'"text"', b"\xff"])
def test_a_wrong_line_says_so(line: bytes) -> None:
    assert parse_batch_line(line, 3).error.startswith("line 3 ")


def test_answers_are_found_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt":"a"}\n\n{"prompt":"b"}\n{"id":"c","messages":' + HI + b"}\n")
    whole = b'{"custom_id":"c","error":null}\n{"custom_id":"line-1","error":{"code":"x"}}\n'
    output.write_bytes(whole + b'{"custom_id":"li')

    work = plan_batch(source, output)

    assert (work.total_lines, work.pending_lines, work.answered_ids) == (3, 2, {"c"})
    assert output.read_bytes() == whole
    assert [one.custom_id for one in read_pending_lines(source, work.answered_ids)] == [
        "line-1",
        "line-3",
    ]


def test_what_cannot_be_a_batch(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with pytest.raises(ConfigError, match="cannot read"):
        plan_batch(source, tmp_path / "none")
    source.write_bytes(b'{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}\n')
    with pytest.raises(ConfigError, match="stands in lines 1 and 2"):
        plan_batch(source, tmp_path / "none")
    with pytest.raises(ConfigError, match="not the output of a batch"):
        read_answered_ids(source)


def test_options() -> None:
    found = parser().parse(["in=batch:a.jsonl", "out=mock", "--concurrency", "3"])
    source, _ = parse_words(found.words)

    assert source == "batch:a.jsonl"
    made = parse_batch_options("a.jsonl", found)
    assert (made.output, made.concurrency) == (Path("a.out.jsonl"), 3)
    with pytest.raises(ConfigError, match="needs a file"):
        parse_batch_options("", found)
    found.output = "a.jsonl"
    with pytest.raises(ConfigError, match="overwritten"):
        parse_batch_options("a.jsonl", found)

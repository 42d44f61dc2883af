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
            {"model": "default", "top_p": 0.5, "messages": [{"role": "user", "content": "hi"}]},
        ),
    ],
)
def test_a_line_is_parsed(line: bytes, name: str, path: str, body: dict[str, object]) -> None:
    parsed = parse_batch_line(line, 3)

    assert (parsed.custom_id, parsed.path, parsed.body, parsed.error) == (name, path, body, "")


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b'{"id": "x"}', b'"text"', b"\xff"])
def test_an_invalid_line_has_an_error_with_its_number(line: bytes) -> None:
    assert parse_batch_line(line, 3).error.startswith("line 3 ")


def test_answered_lines_are_skipped_and_an_incomplete_line_is_truncated(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt":"a"}\n\n{"prompt":"b"}\n{"id":"c","messages":' + HI + b"}\n")
    complete = b'{"custom_id":"c","error":null}\n{"custom_id":"line-1","error":{"code":"x"}}\n'
    output.write_bytes(complete + b'{"custom_id":"li')

    plan = plan_batch(source, output)

    assert (plan.total_lines, plan.pending_lines, plan.answered_ids) == (3, 2, {"c"})
    assert output.read_bytes() == complete
    assert [line.custom_id for line in read_pending_lines(source, plan.answered_ids)] == [
        "line-1",
        "line-3",
    ]


def test_invalid_batch_files_are_rejected(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with pytest.raises(ConfigError, match="cannot read"):
        plan_batch(source, tmp_path / "none")
    source.write_bytes(b'{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}\n')
    with pytest.raises(ConfigError, match="is in lines 1 and 2"):
        plan_batch(source, tmp_path / "none")
    with pytest.raises(ConfigError, match="not the output of a batch"):
        read_answered_ids(source)


def test_options() -> None:
    args = parser().parse(["in=batch:a.jsonl", "out=mock", "--concurrency", "3"])
    source, _ = parse_words(args.words)

    assert source == "batch:a.jsonl"
    options = parse_batch_options("a.jsonl", args)
    assert (options.output, options.concurrency) == (Path("a.out.jsonl"), 3)
    with pytest.raises(ConfigError, match="needs a file"):
        parse_batch_options("", args)
    args.output = "a.jsonl"
    with pytest.raises(ConfigError, match="overwritten"):
        parse_batch_options("a.jsonl", args)

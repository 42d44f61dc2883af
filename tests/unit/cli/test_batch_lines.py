from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.cli.batch_lines import CHAT, COMPLETIONS, answered, parse_task, plan, read_tasks
from dynamo.cli.batch_options import options
from dynamo.cli.run import parser, read_words
from dynamo.core.errors import ConfigError

HI = b'[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("line", "name", "path", "body"),
    [
        (
            b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}',
            "a",
            COMPLETIONS,
            {"model": "default", "prompt": "x"},
        ),
        (b'{"id":7,"prompt":"x","model":"m"}', "7", COMPLETIONS, {"model": "m", "prompt": "x"}),
        (
            b'{"text":"hi","stream":true,"top_p":0.5}',
            "line-3",
            CHAT,
            {
                "model": "default",
                "top_p": 0.5,
                "messages": [{"role": "user", "content": "hi"}],
            },
        ),
    ],
)
def test_lines(line: bytes, name: str, path: str, body: dict[str, object]) -> None:
    task = parse_task(line, 3)

    assert (task.id, task.path, task.body, task.wrong) == (name, path, body, "")


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b'{"id": "x"}', b'"text"', b"\xff"])
def test_a_wrong_line_says_so(line: bytes) -> None:
    assert parse_task(line, 3).wrong.startswith("line 3 ")


def test_answers_are_found_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt":"a"}\n\n{"prompt":"b"}\n{"id":"c","messages":' + HI + b"}\n")
    whole = b'{"custom_id":"c","error":null}\n{"custom_id":"line-1","error":{"code":"x"}}\n'
    output.write_bytes(whole + b'{"custom_id":"li')

    work = plan(source, output)

    assert (work.total, work.left, work.done) == (3, 2, {"c"})
    assert output.read_bytes() == whole
    assert [one.id for one in read_tasks(source, work.done)] == ["line-1", "line-3"]


def test_what_cannot_be_a_batch(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with pytest.raises(ConfigError, match="cannot read"):
        plan(source, tmp_path / "none")
    source.write_bytes(b'{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}\n')
    with pytest.raises(ConfigError, match="stands in lines 1 and 2"):
        plan(source, tmp_path / "none")
    with pytest.raises(ConfigError, match="not the output of a batch"):
        answered(source)


def test_options() -> None:
    found = parser().parse(["in=batch:a.jsonl", "out=mock", "--concurrency", "3"])
    source, _ = read_words(found.words)

    assert source == "batch:a.jsonl"
    made = options("a.jsonl", found)
    assert (made.output, made.concurrency) == (Path("a.out.jsonl"), 3)
    with pytest.raises(ConfigError, match="needs a file"):
        options("", found)
    found.output = "a.jsonl"
    with pytest.raises(ConfigError, match="overwritten"):
        options("a.jsonl", found)

"""The files of a batch: lines in, and the answers that are there already."""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
DEFAULT_MODEL = "default"
DEFAULT_CONCURRENCY = 64


class BatchOptions(msgspec.Struct, frozen=True):
    """Where lines come from, where answers go, and how many are asked at a time."""

    source: Path
    output: Path
    concurrency: int


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that only `in=batch:` reads."""
    group = parser.add_argument_group("batch", "Only for in=batch:FILE.jsonl.")
    group.add_argument(
        "--concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"requests in work at a time (default: {DEFAULT_CONCURRENCY})",
    )
    group.add_argument(
        "--output", metavar="FILE", help="where answers are appended (default: FILE.out.jsonl)"
    )


def parse_batch_options(path: str, found: argparse.Namespace) -> BatchOptions:
    """Raises `ConfigError`."""
    if not path:
        raise ConfigError("in=batch needs a file", hint="in=batch:FILE.jsonl")
    if found.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    source = Path(path)
    output = Path(found.output) if found.output else source.with_suffix(".out.jsonl")
    if output == source:
        raise ConfigError(f"{source} would be overwritten", hint="give --output FILE")
    return BatchOptions(source=source, output=output, concurrency=found.concurrency)


class BatchLine(msgspec.Struct, frozen=True):
    """One line. `wrong`: why it cannot be asked."""

    custom_id: str
    path: str = ""
    body: dict[str, Any] = {}
    error: str = ""


class BatchPlan(msgspec.Struct, frozen=True):
    """How many lines there are, how many of them have no answer yet, and whose answers exist."""

    total_lines: int
    pending_lines: int
    answered_ids: frozenset[str]


def plan_batch(source: Path, output: Path) -> BatchPlan:
    """Compare input and output, and cut off what a crash left of the output's last line. Raises
    `ConfigError`: no such file, or an id that stands twice."""
    done = read_answered_ids(output)
    seen: dict[str, int] = {}
    left = 0
    for number, task in _numbered_lines(source):
        if task.custom_id in seen:
            raise ConfigError(
                f"{source}: id {task.custom_id!r} stands in lines {seen[task.custom_id]} and {number}",
                hint="answers are found by their ids: give each line its own, or none",
            )
        seen[task.custom_id] = number
        left += task.custom_id not in done
    return BatchPlan(total_lines=len(seen), pending_lines=left, answered_ids=done)


def read_pending_lines(source: Path, done: Container[str]) -> Iterator[BatchLine]:
    """The lines whose ids are not in `done`."""
    return (task for _, task in _numbered_lines(source) if task.custom_id not in done)


def read_answered_ids(output: Path) -> frozenset[str]:
    """Ids that have an answer which is no error. Raises `ConfigError` where the file holds
    something else."""
    if not output.exists():
        return frozenset()
    done = set()
    whole = 0
    with output.open("rb+") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                lines.truncate(whole)
                break
            whole += len(line)
            try:
                found = msgspec.json.decode(line)
                if found["error"] is None:
                    done.add(str(found["custom_id"]))
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{output} is not the output of a batch", hint="give another --output"
                ) from error
    return frozenset(done)


def parse_batch_line(line: bytes, number: int) -> BatchLine:
    """One line in OpenAI's batch shape, or with `messages`, `prompt` or `text`; an id of its own
    or its number."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BatchLine(custom_id=f"line-{number}", error=f"line {number} is not JSON: {error}")
    if not isinstance(found, dict):
        return BatchLine(custom_id=f"line-{number}", error=f"line {number} is not an object")
    name = str(found.pop("custom_id", None) or found.pop("id", None) or f"line-{number}")
    path = ""
    if isinstance(found.get("body"), dict):
        path = str(found.get("url", CHAT_PATH))
        found = found["body"]
    if "text" in found and not path:
        found["messages"] = [{"role": "user", "content": found.pop("text")}]
    path = path or (
        CHAT_PATH if "messages" in found else COMPLETIONS_PATH if "prompt" in found else ""
    )
    if not path.startswith("/"):
        return BatchLine(
            custom_id=name, error=f"line {number} has none of body, messages, prompt, text"
        )
    for unwanted in ("stream", "stream_options"):
        found.pop(unwanted, None)
    return BatchLine(custom_id=name, path=path, body={"model": DEFAULT_MODEL} | found)


def _numbered_lines(source: Path) -> Iterator[tuple[int, BatchLine]]:
    try:
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, parse_batch_line(line, number)
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error

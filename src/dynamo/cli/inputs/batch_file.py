"""The flags and files of `in=batch`: input lines, and answers of earlier runs.

This module does not import asyncio, since `dynamo run --help` loads it.
"""

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
    """Options of a batch. Answers are appended to `output`."""

    source: Path
    output: Path
    concurrency: int


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `in=batch:`."""
    group = parser.add_argument_group("batch", "Only for in=batch:FILE.jsonl.")
    group.add_argument(
        "--concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"requests in flight (default: {DEFAULT_CONCURRENCY})",
    )
    group.add_argument(
        "--output", metavar="FILE", help="file for answers, appended (default: FILE.out.jsonl)"
    )


def parse_batch_options(path: str, args: argparse.Namespace) -> BatchOptions:
    """Return the options for the input file `path`. Raises `ConfigError`."""
    if not path:
        raise ConfigError("in=batch needs a file", hint="in=batch:FILE.jsonl")
    if args.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    source = Path(path)
    output = Path(args.output) if args.output else source.with_suffix(".out.jsonl")
    if output == source:
        raise ConfigError(f"{source} would be overwritten", hint="give --output FILE")
    return BatchOptions(source=source, output=output, concurrency=args.concurrency)


class BatchLine(msgspec.Struct, frozen=True):
    """A line of the input. A line with an `error` cannot be sent."""

    custom_id: str
    path: str = ""
    body: dict[str, Any] = {}
    error: str = ""


class BatchPlan(msgspec.Struct, frozen=True):
    """The number of input lines, of those without an answer, and the ids with an answer."""

    total_lines: int
    pending_lines: int
    answered_ids: frozenset[str]


def plan_batch(source: Path, output: Path) -> BatchPlan:
    """Compare the input with the output of earlier runs. Truncates an incomplete last line of the
    output. Raises `ConfigError` for a missing file or a repeated id."""
    answered_ids = read_answered_ids(output)
    line_numbers: dict[str, int] = {}
    pending = 0
    for number, line in _numbered_lines(source):
        first = line_numbers.setdefault(line.custom_id, number)
        if first != number:
            raise ConfigError(
                f"{source}: id {line.custom_id!r} is in lines {first} and {number}",
                hint="give every line a different id, or none",
            )
        pending += line.custom_id not in answered_ids
    return BatchPlan(len(line_numbers), pending, answered_ids)


def read_pending_lines(source: Path, answered_ids: Container[str]) -> Iterator[BatchLine]:
    """Yield the lines whose ids are not in `answered_ids`."""
    return (line for _, line in _numbered_lines(source) if line.custom_id not in answered_ids)


def read_answered_ids(output: Path) -> frozenset[str]:
    """Return the ids with a successful answer. Raises `ConfigError` for a file of another kind."""
    if not output.exists():
        return frozenset()
    answered_ids = set()
    complete_bytes = 0
    with output.open("rb+") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                lines.truncate(complete_bytes)
                break
            complete_bytes += len(line)
            try:
                record = msgspec.json.decode(line)
                if record["error"] is None:
                    answered_ids.add(str(record["custom_id"]))
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{output} is not the output of a batch", hint="give another --output"
                ) from error
    return frozenset(answered_ids)


def parse_batch_line(line: bytes, number: int) -> BatchLine:
    """Parse a line in OpenAI's batch format, or one with `messages`, `prompt` or `text`. Without an
    id, the line's number is its id."""
    try:
        body = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BatchLine(custom_id=f"line-{number}", error=f"line {number} is not JSON: {error}")
    if not isinstance(body, dict):
        return BatchLine(custom_id=f"line-{number}", error=f"line {number} is not an object")
    name = str(body.pop("custom_id", None) or body.pop("id", None) or f"line-{number}")
    path = ""
    if isinstance(body.get("body"), dict):
        path = str(body.get("url", CHAT_PATH))
        body = body["body"]
    if "text" in body and not path:
        body["messages"] = [{"role": "user", "content": body.pop("text")}]
    path = path or (
        CHAT_PATH if "messages" in body else COMPLETIONS_PATH if "prompt" in body else ""
    )
    if not path.startswith("/"):
        return BatchLine(
            custom_id=name, error=f"line {number} has none of body, messages, prompt, text"
        )
    for unsupported in ("stream", "stream_options"):
        body.pop(unsupported, None)
    return BatchLine(custom_id=name, path=path, body={"model": DEFAULT_MODEL} | body)


def _numbered_lines(source: Path) -> Iterator[tuple[int, BatchLine]]:
    try:
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, parse_batch_line(line, number)
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error

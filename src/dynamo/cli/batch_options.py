"""What a batch needs beyond the settings of a deployment."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError

CONCURRENCY = 64


class Options(msgspec.Struct, frozen=True):
    """Where lines come from, where answers go, and how many are asked at a time."""

    source: Path
    output: Path
    concurrency: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that only `in=batch:` reads."""
    group = parser.add_argument_group("batch", "Only for in=batch:FILE.jsonl.")
    group.add_argument(
        "--concurrency",
        type=int,
        default=CONCURRENCY,
        metavar="N",
        help=f"requests in work at a time (default: {CONCURRENCY})",
    )
    group.add_argument(
        "--output", metavar="FILE", help="where answers are appended (default: FILE.out.jsonl)"
    )


def options(path: str, found: argparse.Namespace) -> Options:
    """Raises `ConfigError`."""
    if not path:
        raise ConfigError("in=batch needs a file", hint="in=batch:FILE.jsonl")
    if found.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    source = Path(path)
    output = Path(found.output) if found.output else source.with_suffix(".out.jsonl")
    if output == source:
        raise ConfigError(f"{source} would be overwritten", hint="give --output FILE")
    return Options(source=source, output=output, concurrency=found.concurrency)

"""What a batch needs beyond the settings of a deployment."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError

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

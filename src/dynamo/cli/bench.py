"""`dynamo bench`: measure a server, compare two results, draw them."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dynamo.cli.bar import Bar
from dynamo.cli.bench_flags import bench_of, parser
from dynamo.cli.bench_text import Progress, as_text, comparison
from dynamo.cli.outputs import check_writable
from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.operations.bench.figures import Result

__all__ = ["parser", "run"]

INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Measure, or what the first word says. 1 if no request succeeded, 130 after Ctrl-C, with the
    figures of what had been answered."""
    found = parser().parse(arguments)
    words = found.words or [""]
    return VERBS.get(words[0], _measure)(found)


def _measure(found: argparse.Namespace) -> int:
    from dynamo.operations.bench.picture import check_drawable

    if found.picture:
        check_drawable()
    check_writable(found.out, found.picture)
    bench = bench_of(found)
    results = _cases(found) if found.preset else [_one(found)]
    if found.out:
        _write(found.out, results)
    if found.picture:
        _draw(results, found.picture)
    if found.json:
        print(_json(results))
    elif not found.preset:
        print(as_text(results[0], bench.target.url))
    if any(one.interrupted for one in results):
        return INTERRUPTED
    return 0 if all(one.requests for one in results) else 1


def _one(found: argparse.Namespace) -> Result:
    from dynamo.operations.bench.bench import run_bench
    from dynamo.runtime.process import run_on_loop

    bench = bench_of(found)

    async def work() -> Result:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)  # the second Ctrl-C ends at once

        loop.add_signal_handler(signal.SIGINT, interrupt)
        return await run_bench(bench, progress, stop=stop)

    with Bar(sys.stderr) as bar:
        progress = Progress(bar, bench.load)
        return _stamped(run_on_loop(work()))


def _cases(found: argparse.Namespace) -> Sequence[Result]:
    from dynamo.operations.bench.latency import PRESETS, run_cases
    from dynamo.runtime.process import run_on_loop

    tell: Callable[[str], object] = sys.stderr.write if found.json else sys.stdout.write
    requests = found.requests or 1
    work = run_cases(bench_of(found), PRESETS[found.preset], requests=requests, tell=tell)
    return [_stamped(one) for one in run_on_loop(work)]


def _stamped(result: Result) -> Result:
    from datetime import UTC, datetime

    return replace(result, when=datetime.now(UTC).isoformat(timespec="seconds"))


def _compare(found: argparse.Namespace) -> int:
    from dynamo.operations.bench.compare import compare, differing_settings
    from dynamo.operations.bench.figures import read_result

    files = found.words[1:]
    if len(files) != 2:
        raise ConfigError("two result files are wanted", hint="dynamo bench compare A.json B.json")
    first, second = map(read_result, files)
    rows = list(compare(first, second))
    if found.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print(comparison(files, rows, differing_settings(first, second)))
    if found.picture:
        _draw(
            [_named(one, file) for one, file in zip((first, second), files, strict=True)],
            found.picture,
        )
    return 0


def _draw_files(found: argparse.Namespace) -> int:
    from dynamo.operations.bench.figures import read_result

    files = found.words[1:]
    if not files or not found.picture:
        hint = "dynamo bench draw A.json [B.json ...] --picture FILE.png"
        raise ConfigError("result files and --picture are wanted", hint=hint)
    check_writable(found.picture)
    _draw([_named(read_result(file), file) for file in files], found.picture)
    return 0


def _named(result: Result, file: str) -> Result:
    return result if result.name else replace(result, name=Path(file).stem)


def _draw(results: Sequence[Result], path: str) -> None:
    from dynamo.operations.bench.picture import draw

    draw(results, path)
    print(f"picture: {path}", file=sys.stderr)


def _write(path: str, results: Sequence[Result]) -> None:
    try:
        Path(path).write_text(_json(results) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _json(results: Sequence[Result]) -> str:
    whole = results[0] if len(results) == 1 else results
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()


VERBS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "compare": _compare,
    "draw": _draw_files,
}

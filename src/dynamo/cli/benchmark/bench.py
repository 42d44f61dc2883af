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

from dynamo.cli.benchmark.bench_flags import parse_bench_config, parser
from dynamo.cli.benchmark.report import BenchProgress, format_bench_result, format_comparison
from dynamo.cli.parsing import check_writable
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.operations.bench.bench_result import BenchResult

__all__ = ["parser", "run"]

EXIT_INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Measure, or what the first word says. 1 if no request succeeded, 130 after Ctrl-C, with the
    figures of what had been answered."""
    found = parser().parse(arguments)
    words = found.words or [""]
    return SUBCOMMANDS.get(words[0], _measure)(found)


def _measure(found: argparse.Namespace) -> int:
    from dynamo.operations.bench.bench_plot import check_bench_plot

    if found.picture:
        check_bench_plot()
    check_writable(found.out, found.picture)
    bench = parse_bench_config(found)
    results = _run_preset(found) if found.preset else [_run_single(found)]
    if found.out:
        _write_results(found.out, results)
    if found.picture:
        _draw_plot(results, found.picture)
    if found.json:
        print(_results_json(results))
    elif not found.preset:
        print(format_bench_result(results[0], bench.target.url))
    if any(one.interrupted for one in results):
        return EXIT_INTERRUPTED
    return 0 if all(one.requests for one in results) else 1


def _run_single(found: argparse.Namespace) -> BenchResult:
    from dynamo.operations.bench.bench import run_bench
    from dynamo.runtime.processes.process import run_on_loop

    bench = parse_bench_config(found)

    async def work() -> BenchResult:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)  # the second Ctrl-C ends at once

        loop.add_signal_handler(signal.SIGINT, interrupt)
        return await run_bench(bench, progress, stop=stop)

    with ProgressBar(sys.stderr) as bar:
        progress = BenchProgress(bar, bench.load)
        return _with_timestamp(run_on_loop(work()))


def _run_preset(found: argparse.Namespace) -> Sequence[BenchResult]:
    from dynamo.operations.bench.latency import PRESET_CASES, run_cases
    from dynamo.runtime.processes.process import run_on_loop

    tell: Callable[[str], object] = sys.stderr.write if found.json else sys.stdout.write
    requests = found.requests or 1
    work = run_cases(
        parse_bench_config(found), PRESET_CASES[found.preset], requests=requests, write=tell
    )
    return [_with_timestamp(one) for one in run_on_loop(work)]


def _with_timestamp(result: BenchResult) -> BenchResult:
    from datetime import UTC, datetime

    return replace(result, when=datetime.now(UTC).isoformat(timespec="seconds"))


def _compare(found: argparse.Namespace) -> int:
    from dynamo.operations.bench.bench_result import read_result
    from dynamo.operations.bench.compare import compare, differing_settings

    files = found.words[1:]
    if len(files) != 2:
        raise ConfigError("two result files are wanted", hint="dynamo bench compare A.json B.json")
    first, second = map(read_result, files)
    rows = list(compare(first, second))
    if found.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print(format_comparison(files, rows, differing_settings(first, second)))
    if found.picture:
        _draw_plot(
            [_with_name(one, file) for one, file in zip((first, second), files, strict=True)],
            found.picture,
        )
    return 0


def _draw_files(found: argparse.Namespace) -> int:
    from dynamo.operations.bench.bench_result import read_result

    files = found.words[1:]
    if not files or not found.picture:
        hint = "dynamo bench draw A.json [B.json ...] --picture FILE.png"
        raise ConfigError("result files and --picture are wanted", hint=hint)
    check_writable(found.picture)
    _draw_plot([_with_name(read_result(file), file) for file in files], found.picture)
    return 0


def _with_name(result: BenchResult, file: str) -> BenchResult:
    return result if result.name else replace(result, name=Path(file).stem)


def _draw_plot(results: Sequence[BenchResult], path: str) -> None:
    from dynamo.operations.bench.bench_plot import draw_bench_results

    draw_bench_results(results, path)
    print(f"picture: {path}", file=sys.stderr)


def _write_results(path: str, results: Sequence[BenchResult]) -> None:
    try:
        Path(path).write_text(_results_json(results) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _results_json(results: Sequence[BenchResult]) -> str:
    whole = results[0] if len(results) == 1 else results
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()


SUBCOMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "compare": _compare,
    "draw": _draw_files,
}

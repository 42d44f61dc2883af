"""`dynamo bench`: measure a server, compare two results, or plot them."""

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
from dynamo.cli.parsing import EXIT_INTERRUPTED, check_writable, write_json
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.operations.bench.bench import BenchConfig
    from dynamo.operations.bench.bench_result import BenchResult

__all__ = ["parser", "run"]


def run(arguments: Sequence[str]) -> int:
    """Measure a server, or run the subcommand that the first word names. Returns 1 if no request
    succeeded. Ctrl-C prints the result so far and returns 130."""
    args = parser().parse(arguments)
    words = args.words or [""]
    return SUBCOMMANDS.get(words[0], _measure)(args)


def _measure(args: argparse.Namespace) -> int:
    from dynamo.operations.bench.bench_plot import DRAW_LATER
    from dynamo.operations.plotting import check_matplotlib

    if args.picture:
        check_matplotlib(DRAW_LATER)
    check_writable(args.out, args.picture)
    bench = parse_bench_config(args)
    results = _run_preset(args, bench) if args.preset else [_run_single(bench)]
    saved = results[0] if len(results) == 1 else results
    if args.out:
        write_json(args.out, saved)
    if not any(result.requests for result in results):
        args.picture = None
        print("no request was answered; nothing was measured", file=sys.stderr)
    if args.picture:
        _draw_plot(results, args.picture)
    if args.json:
        write_json("-", saved)
    elif not args.preset:
        print(format_bench_result(results[0], bench.target.url))
    if any(result.interrupted for result in results):
        return EXIT_INTERRUPTED
    return 0 if all(result.requests for result in results) else 1


def _run_single(bench: BenchConfig) -> BenchResult:
    from dynamo.operations.bench.bench import run_bench
    from dynamo.runtime.processes.process import run_on_loop

    async def measure() -> BenchResult:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C raises KeyboardInterrupt

        loop.add_signal_handler(signal.SIGINT, interrupt)
        return await run_bench(bench, progress, stop=stop)

    with ProgressBar(sys.stderr) as bar:
        progress = BenchProgress(bar, bench.load)
        return _with_timestamp(run_on_loop(measure()))


def _run_preset(args: argparse.Namespace, bench: BenchConfig) -> Sequence[BenchResult]:
    from dynamo.operations.bench.bench import PRESET_CASES, run_cases
    from dynamo.runtime.processes.process import run_on_loop

    write = sys.stderr.write if args.json else sys.stdout.write
    requests = args.requests or 1
    cases = run_cases(bench, PRESET_CASES[args.preset], requests=requests, write=write)
    return [_with_timestamp(result) for result in run_on_loop(cases)]


def _with_timestamp(result: BenchResult) -> BenchResult:
    from datetime import UTC, datetime

    return replace(result, when=datetime.now(UTC).isoformat(timespec="seconds"))


def _compare(args: argparse.Namespace) -> int:
    from dynamo.operations.bench.bench_result import compare, differing_settings, read_result

    files = args.words[1:]
    if len(files) != 2:
        raise ConfigError("compare needs two files", hint="dynamo bench compare A.json B.json")
    first, second = map(read_result, files)
    rows = list(compare(first, second))
    if args.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print(format_comparison(files, rows, differing_settings(first, second)))
    if args.picture:
        _draw_plot([_with_name(first, files[0]), _with_name(second, files[1])], args.picture)
    return 0


def _draw_files(args: argparse.Namespace) -> int:
    from dynamo.operations.bench.bench_result import read_result

    files = args.words[1:]
    if not files or not args.picture:
        hint = "dynamo bench draw A.json [B.json ...] --picture FILE.png"
        raise ConfigError("draw needs result files and --picture", hint=hint)
    check_writable(args.picture)
    _draw_plot([_with_name(read_result(file), file) for file in files], args.picture)
    return 0


def _with_name(result: BenchResult, file: str) -> BenchResult:
    return result if result.name else replace(result, name=Path(file).stem)


def _draw_plot(results: Sequence[BenchResult], path: str) -> None:
    from dynamo.operations.bench.bench_plot import draw_bench_results

    draw_bench_results(results, path)
    print(f"picture: {path}", file=sys.stderr)


SUBCOMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "compare": _compare,
    "draw": _draw_files,
}

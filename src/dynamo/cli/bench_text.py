"""What `dynamo bench` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dynamo.cli.bar import ProgressBar, render_bar

if TYPE_CHECKING:
    from dynamo.operations.bench.compare import ResultDifference
    from dynamo.operations.bench.figures import BenchResult
    from dynamo.operations.bench.measure import LoadGenerator
    from dynamo.operations.bench.plan import LoadProfile

LATENCY_ROWS = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))
BENCH_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


class BenchProgress:
    """Shows on `bar` how far a measurement is."""

    def __init__(self, bar: ProgressBar, load: LoadProfile) -> None:
        self._bar = bar
        self._load = load

    def __call__(self, measurement: LoadGenerator, seconds: float) -> None:
        """How far it is after `seconds`."""
        if not self._bar.should_redraw():
            return
        done = len(measurement.samples)
        self._bar.show(
            f"{render_bar(self._completed_share(done, seconds))} {seconds:.0f} s  {done} done  "
            f"{measurement.in_flight} in flight  {measurement.text_events / seconds:.0f} events/s"
        )

    def _completed_share(self, done: int, seconds: float) -> float:
        shares = [0.0]
        if self._load.requests:
            shares.append(done / self._load.requests)
        if self._load.duration_s:
            shares.append(seconds / self._load.duration_s)
        return min(1.0, max(shares))


def format_bench_result(result: BenchResult, url: str) -> str:
    """The figures for a reader."""
    return "\n".join(_bench_result_lines(result, url))


def _bench_result_lines(result: BenchResult, url: str) -> Iterator[str]:
    yield f"{url}  {result.name}".rstrip() + ("  (interrupted)" if result.interrupted else "")
    failed = f", {result.failed} failed" if result.failed else ""
    yield (
        f"{result.requests} requests in {result.seconds:g} s{failed}: "
        f"{result.requests_per_s:g} requests/s, {result.output_tokens_per_s:g} tokens/s"
    )
    yield (
        f"prompts {result.prompt_tokens} tokens, {result.cached_ratio:.1%} of them cached; "
        f"answers {result.output_tokens}, {result.events_per_token:g} events a token"
    )
    yield ""
    yield f"{'ms':<6}" + "".join(f"{name:>10}" for name in BENCH_COLUMNS)
    for key, title in LATENCY_ROWS:
        spread = getattr(result, key)
        yield f"{title:<6}" + "".join(f"{getattr(spread, name):>10.2f}" for name in BENCH_COLUMNS)
    yield from _goodput_and_cpu_lines(result)


def _goodput_and_cpu_lines(result: BenchResult) -> Iterator[str]:
    if result.goodput is not None:
        good = result.goodput
        yield f"\ngoodput {good.requests_per_s:g} requests/s, {good.ratio:.1%} of all requests"
    if result.processes:
        yield ""
    for role, cpu in result.processes.items():
        yield (
            f"cpu {role:<11} {cpu.cpu_s:8.2f} s  {cpu.us_per_token:8.2f} us/token  "
            f"{cpu.us_per_request:10.1f} us/request"
        )
    for error, count in result.errors.items():
        yield f"failed {count:>6}  {error}"


def format_comparison(
    files: Sequence[str], rows: Sequence[ResultDifference], differing: Sequence[str]
) -> str:
    """A table, and what was asked for differently."""
    width = max([len(row.figure) for row in rows] + [8])
    lines = [f"{'':<{width}}  {files[0]:>14}  {files[1]:>14}"]
    for row in rows:
        change = "" if row.change is None else f"{row.change:+.1%}"
        word = {True: "better", False: "worse", None: ""}[row.better]
        values = f"{row.first:>14g}  {row.second:>14g}"
        lines.append(f"{row.figure:<{width}}  {values}  {change:>8} {word}".rstrip())
    if differing:
        lines.append(f"\nnot asked alike: {', '.join(differing)}")
    return "\n".join(lines)

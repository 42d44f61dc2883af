"""Text that `dynamo bench` and `dynamo replay` print: progress, results and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dynamo.cli.progress_bar import ProgressBar, render_bar
from dynamo.core.errors import Overloaded

if TYPE_CHECKING:
    from dynamo.operations.bench.bench_result import BenchResult, ResultDifference
    from dynamo.operations.bench.load_generator import LoadGenerator
    from dynamo.operations.bench.workload import LoadProfile
    from dynamo.operations.replay.request_log import ReplayLog
    from dynamo.operations.replay.result import LatencyLimit, ReplayResult

LATENCY_ROWS = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))
LATENCY_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
MOST_COUNTS = 32
"""Workers whose requests are printed one by one."""


class ReplayProgress:
    """Shows the progress of a replay of `total` requests on `bar`, after `label`."""

    def __init__(self, bar: ProgressBar, total: int, label: str = "") -> None:
        self._bar = bar
        self._label = label
        self._total = max(1, total)

    def __call__(self, log: ReplayLog) -> None:
        if not self._bar.should_redraw():
            return
        share = log.completed / self._total
        self._bar.show(
            f"{self._label}{render_bar(share)} {share:.0%}  {log.completed} done  "
            f"{len(log.in_flight)} in flight  {log.clock.now():.0f} s of virtual time"
        )


def format_capacity_step(
    result: ReplayResult, speed: float, limits: Sequence[LatencyLimit], *, within_limits: bool
) -> str:
    """Format one replay of a search for the capacity."""
    measured = ", ".join(
        f"{limit.latency.removesuffix('_ms')} {limit.statistic} {limit.measured_ms(result):.1f} of "
        f"{limit.limit_ms:g} ms"
        for limit in limits
    )
    rate = result.requests / result.duration_s
    verdict = "within the limits" if within_limits else "missed"
    return f"speed {speed:<8.4g} {rate:7.2f} requests/s  {measured}: {verdict}"


def format_replay_result(result: ReplayResult) -> str:
    """Format a replay's result for a terminal."""
    failed = result.requests - result.completed - result.rejected
    lines = [
        f"{result.requests} requests in {result.duration_s:.1f} s of virtual time"
        + (f", {result.rejected} rejected" if result.rejected else "")
        + (f", {failed} failed" if failed else "")
        + f"; {result.output_tokens_per_s:.0f} tokens/s",
        f"prompt tokens {result.reuse_first_admission:.1%} cached at first admission",
        f"{result.evictions} blocks evicted, {result.preemptions} preemptions",
        f"requests per worker: {_format_counts(result.requests_per_worker)}",
        *_moved_lines(result),
        "",
        *_latency_lines(result),
        f"{'rejected':<10}{result.rejected:>8}",
    ]
    if result.good_share is not None:
        lines.append(f"{'good':<10}{result.good_share:>8.1%}")
        lines.append(f"{'broken':<10}{result.broken_promises:>8}")
    if result.timeline:
        lines.append(f"{'moved':<10}{result.moved_requests:>8}")
    lines.append(f"{'GPU-hours':<10}{result.gpu_hours:>8.4g}")
    others = [(error, count) for error, count in result.errors.items() if error != Overloaded.code]
    lines += [f"{'failed':<10}{count:>8}  {error}" for error, count in others]
    lines += _load_lines(result)
    lines.append(f"\ntook {result.wall_s:.1f} s ({result.cpu_s:.1f} s of CPU)")
    return "\n".join(lines)


def _format_counts(counts: Sequence[int]) -> str:
    """Format one count a worker, or the range of many."""
    if len(counts) <= MOST_COUNTS:
        return " ".join(map(str, counts))
    ordered = sorted(counts)
    return f"{ordered[0]} to {ordered[-1]}, half of them at most {ordered[len(ordered) // 2]}"


def _moved_lines(result: ReplayResult) -> Iterator[str]:
    for name, tier in result.tiers.items():
        yield (
            f"tier {name}: {tier.hit_share:.1%} of prompt tokens loaded, {tier.loaded_blocks} "
            f"blocks loaded, {tier.stored_blocks} stored, {tier.evicted_blocks} evicted"
        )
    prefills = result.prefills
    if prefills.remote or result.prefill_fallbacks:
        yield (
            f"prompts: {prefills.local} computed where they are decoded, {prefills.remote} by "
            f"another worker; {result.kv_bytes_moved / 1e9:.1f} GB of KV moved"
        )
    for reason, count in result.prefill_fallbacks.items():
        yield f"prompts whose KV did not arrive: {count}  {reason}"


def _load_lines(result: ReplayResult) -> Iterator[str]:
    """Yield what several loads showed."""
    capacity = result.capacity
    if capacity is not None:
        yield (
            f"\ncapacity{' (every speed keeps the limits)' if capacity.lower_bound else ''}: "
            f"speed {capacity.speed:.4g}, {capacity.requests_per_s:.2f} requests/s, "
            f"{capacity.output_tokens_per_s_per_gpu:.0f} output tokens/s/GPU"
            if capacity.speed
            else "\ncapacity: no speed keeps the limits"
        )
    if result.pareto:
        yield f"\n{'speed':>8}{'tokens/s/GPU':>16}{'tokens/s/user':>16}{'TTFT p90 ms':>14}"
    for point in result.pareto:
        yield (
            f"{point.speed:>8g}{point.tokens_per_s_per_gpu:>16.1f}"
            f"{point.tokens_per_s_per_user:>16.1f}{point.ttft_ms_p90:>14.0f}"
        )


def _latency_lines(result: BenchResult | ReplayResult) -> Iterator[str]:
    yield f"{'ms':<6}" + "".join(f"{column:>12}" for column in LATENCY_COLUMNS)
    for name, title in LATENCY_ROWS:
        summary = getattr(result, name)
        values = (getattr(summary, column) for column in LATENCY_COLUMNS)
        yield f"{title:<6}" + "".join(f"{value:>12.2f}" for value in values)


class BenchProgress:
    """Shows the progress of a measurement on `bar`."""

    def __init__(self, bar: ProgressBar, load: LoadProfile) -> None:
        self._bar = bar
        self._load = load

    def __call__(self, generator: LoadGenerator, seconds: float) -> None:
        if not self._bar.should_redraw():
            return
        done = len(generator.samples)
        self._bar.show(
            f"{render_bar(self._completed_share(done, seconds))} {seconds:.0f} s  {done} done  "
            f"{generator.in_flight} in flight  {generator.text_events / seconds:.0f} events/s"
        )

    def _completed_share(self, done: int, seconds: float) -> float:
        shares = [0.0]
        if self._load.requests:
            shares.append(done / self._load.requests)
        if self._load.duration_s:
            shares.append(seconds / self._load.duration_s)
        return min(1.0, max(shares))


def format_bench_result(result: BenchResult, url: str) -> str:
    """Format a bench result for a terminal."""
    return "\n".join(_bench_result_lines(result, url))


def _bench_result_lines(result: BenchResult, url: str) -> Iterator[str]:
    yield f"{url}  {result.name}".rstrip() + ("  (interrupted)" if result.interrupted else "")
    if not result.requests:
        yield f"0 requests in {result.seconds:g} s, {result.failed} failed"
        yield from _error_lines(result)
        return
    failed = f", {result.failed} failed" if result.failed else ""
    yield (
        f"{result.requests} requests in {result.seconds:g} s{failed}: "
        f"{result.requests_per_s:g} requests/s, {result.output_tokens_per_s:g} tokens/s"
    )
    yield (
        f"prompts {result.prompt_tokens} tokens, {result.cached_ratio:.1%} of them cached; "
        f"answers {result.output_tokens} tokens, {result.events_per_token:g} events per token"
    )
    yield ""
    yield from _latency_lines(result)
    if result.goodput is not None:
        per_s, ratio = result.goodput.requests_per_s, result.goodput.ratio
        yield f"\ngoodput {per_s:g} requests/s, {ratio:.1%} of all requests"
    if result.processes:
        yield ""
    for role, cpu in result.processes.items():
        yield (
            f"cpu {role:<11} {cpu.cpu_s:8.2f} s  {cpu.us_per_token:8.2f} us/token  "
            f"{cpu.us_per_request:10.1f} us/request"
        )
    yield from _error_lines(result)


def _error_lines(result: BenchResult) -> Iterator[str]:
    for error, count in result.errors.items():
        yield f"failed {count:>6}  {error}"


def format_comparison(
    files: Sequence[str], rows: Sequence[ResultDifference], differing: Sequence[str]
) -> str:
    """Format the differences of two result files, and the `differing` settings below them."""
    width = max([len(row.figure) for row in rows] + [8])
    lines = [f"{'':<{width}}  {files[0]:>14}  {files[1]:>14}"]
    for row in rows:
        change = "" if row.change is None else f"{row.change:+.1%}"
        word = {True: "better", False: "worse", None: ""}[row.better]
        values = f"{row.first:>14g}  {row.second:>14g}"
        lines.append(f"{row.figure:<{width}}  {values}  {change:>8} {word}".rstrip())
    if differing:
        lines.append(f"\nsettings that differ: {', '.join(differing)}")
    return "\n".join(lines)

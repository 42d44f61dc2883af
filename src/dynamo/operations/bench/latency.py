"""Latency of single requests at three lengths, as a quick check of a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from dynamo.operations.bench.bench import BenchConfig, run_bench
from dynamo.operations.bench.bench_result import BenchResult
from dynamo.operations.bench.workload import BenchTarget, LoadProfile, RequestShape

CASES = ((50, 100), (200, 200), (500, 300))
"""(input tokens, output tokens) of each case."""
PRESET_CASES: Mapping[str, Sequence[tuple[int, int]]] = {"benchmark_latency": CASES}


async def benchmark_latency(
    base_url: str = "http://localhost:8000",
    model: str = "default",
    *,
    requests: int = 1,
    write: Callable[[str], object] = sys.stdout.write,
) -> Sequence[BenchResult]:
    """Measure the latency of single requests. Each case sends one request to warm up and then
    `requests`, one at a time. `write` receives one line per case. Raises `Unreachable`."""
    bench = BenchConfig(target=BenchTarget(url=base_url, model=model))
    return await run_cases(bench, CASES, requests=requests, write=write)


async def run_cases(
    bench: BenchConfig,
    cases: Sequence[tuple[int, int]],
    *,
    requests: int,
    write: Callable[[str], object],
) -> Sequence[BenchResult]:
    """Run each case; all else is taken from `bench`."""
    results = []
    load = LoadProfile(
        concurrency=1, requests=requests, duration_s=0.0, warmup=1, seed=bench.load.seed
    )
    for input_tokens, output_tokens in cases:
        shape = RequestShape(input_tokens=input_tokens, output_tokens=output_tokens)
        name = f"{input_tokens}/{output_tokens}"
        result = await run_bench(replace(bench, shape=shape, load=load, name=name))
        results.append(result)
        write(f"{format_case(input_tokens, output_tokens, result)}\n")
    return results


def format_case(input_tokens: int, output_tokens: int, result: BenchResult) -> str:
    """Format one case as a line."""
    case = f"input {input_tokens} tokens, output {output_tokens} tokens"
    if not result.requests:
        return (
            f"{case}: no request was answered, {result.failed} failed: {', '.join(result.errors)}"
        )
    latency_s = result.e2e_ms.mean / 1000
    rate = result.output_tokens / result.requests / latency_s
    failed = f", {result.failed} failed" if result.failed else ""
    return (
        f"{case}: latency {latency_s:.2f} s, "
        f"{rate:.2f} tokens/s, first token {result.ttft_ms.mean:.1f} ms{failed}"
    )

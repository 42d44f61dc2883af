"""Latency of single requests at three lengths: a quick look at a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from dynamo.operations.bench.bench import Bench, run_bench
from dynamo.operations.bench.figures import Result
from dynamo.operations.bench.plan import Load, Shape, Target

CASES = ((50, 100), (200, 200), (500, 300))
"""Prompt and answer, tokens."""
PRESETS: Mapping[str, Sequence[tuple[int, int]]] = {"benchmark_latency": CASES}


async def benchmark_latency(
    base_url: str = "http://localhost:8000",
    model: str = "default",
    *,
    requests: int = 1,
    tell: Callable[[str], object] = sys.stdout.write,
) -> Sequence[Result]:
    """One request after the other, `requests` a case, after one to warm up; `tell` gets a line a
    case. Raises `Unreachable`."""
    bench = Bench(target=Target(url=base_url, model=model))
    return await run_cases(bench, CASES, requests=requests, tell=tell)


async def run_cases(
    bench: Bench,
    cases: Sequence[tuple[int, int]],
    *,
    requests: int,
    tell: Callable[[str], object],
) -> Sequence[Result]:
    """Each case with the rest of `bench` as it is."""
    results = []
    load = Load(concurrency=1, requests=requests, duration_s=0.0, warmup=1, seed=bench.load.seed)
    for given, wanted in cases:
        shape = Shape(input_tokens=given, output_tokens=wanted)
        name = f"{given}/{wanted}"
        result = await run_bench(replace(bench, shape=shape, load=load, name=name))
        results.append(result)
        tell(f"{line_of(given, wanted, result)}\n")
    return results


def line_of(given: int, wanted: int, result: Result) -> str:
    """One case in a line."""
    latency_s = result.e2e_ms.mean / 1000
    rate = result.output_tokens / result.requests / latency_s if result.requests else 0.0
    failed = f", {result.failed} failed" if result.failed else ""
    return (
        f"input {given} tokens, output {wanted} tokens: latency {latency_s:.2f} s, "
        f"{rate:.2f} tokens/s, first token {result.ttft_ms.mean:.1f} ms{failed}"
    )

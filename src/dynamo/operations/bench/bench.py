"""A benchmark run: choose prompt words, warm up, measure, compute the result."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.bench.bench_result import BenchResult, ProcessCpuMeter, compute_result
from dynamo.operations.bench.load_client import LoadClient, Unreachable
from dynamo.operations.bench.load_generator import (
    LoadGenerator,
    ThroughputTimeline,
    synthetic_sessions,
)
from dynamo.operations.bench.prompts import PromptGenerator
from dynamo.operations.bench.single_token_words import (
    token_counter_from_tokenizer,
    words_from_server,
    words_from_tokenizer,
)
from dynamo.operations.bench.traces import (
    TRACE_BLOCK_TOKENS,
    read_mooncake,
    read_sharegpt,
    trace_block_tokens,
)
from dynamo.operations.bench.workload import (
    BenchTarget,
    LatencyObjectives,
    LoadProfile,
    RequestShape,
    SessionPlan,
)

BenchProgressCallback = Callable[[LoadGenerator, float], None]


class BenchConfig(msgspec.Struct, frozen=True):
    """Configuration of a run. Requests come from the Mooncake `trace`, from the `sharegpt` file, or
    else are synthetic with `shape`. Each hash id of a trace stands for `block_tokens` tokens, 0: as
    many as the trace tells. A trace is sent `speed` times as fast; if `closed`, its times are
    ignored and `load.concurrency` sessions run at a time."""

    target: BenchTarget = BenchTarget()
    shape: RequestShape = RequestShape()
    load: LoadProfile = LoadProfile()
    objectives: LatencyObjectives = LatencyObjectives()
    trace: str = ""
    block_tokens: int = 0
    speed: float = 1.0
    closed: bool = False
    sharegpt: str = ""
    tokenizer: str = ""
    name: str = ""


async def run_bench(
    bench: BenchConfig,
    on_progress: BenchProgressCallback | None = None,
    clock: Clock | None = None,
    stop: asyncio.Event | None = None,
) -> BenchResult:
    """Run a benchmark. `on_progress(generator, seconds)` is called every `PROGRESS_INTERVAL_S`.
    Setting `stop` ends the run early with the requests answered so far. Raises `Unreachable` and
    `ConfigError`."""
    clock = clock or SystemClock()
    stop = stop or asyncio.Event()
    seed = bench.load.seed or secrets.randbelow(1 << 31) + 1
    bench = replace(bench, load=replace(bench.load, seed=seed))
    replays_times = bench.trace and not bench.load.rate
    load = replace(bench.load, duration_s=0.0) if replays_times else bench.load
    server = LoadClient(bench.target)
    try:
        check_context_length(bench, await fetch_models(server))
        words = await _load_words(bench, server, clock)
        block_tokens = bench.block_tokens or await clock.offload(_trace_block_tokens, bench)
        prompts = PromptGenerator(words, bench.shape, bench.load.seed, block_tokens)
        sessions = await clock.offload(_make_sessions, bench)
        generator = LoadGenerator(bench.target, server, prompts, clock, stop)
        if bench.load.warmup:
            await generator.warm_up(synthetic_sessions(bench.shape), bench.load)
        cpu = await clock.offload(ProcessCpuMeter, bench.target.url)
        async with BackgroundTasks() as tasks:
            timeline = ThroughputTimeline(generator, on_progress, clock)
            tasks.start(timeline.run())
            cpu.start()
            run = await generator.run(sessions, load)
            cpu.stop()
    finally:
        server.close()
    result = compute_result(run, bench.objectives)
    return replace(
        result,
        name=bench.name,
        settings=_recorded_settings(bench),
        interrupted=stop.is_set(),
        processes=cpu.summarize(result.output_tokens, result.requests),
        timeline=timeline.per_second,
    )


async def fetch_models(server: LoadClient) -> Sequence[Mapping[str, Any]]:
    """Fetch the entries of the server's /v1/models. Raises `Unreachable`."""
    status, response = await server.fetch_json("/v1/models", method="GET")
    if status != 200:
        error = response.get("error") if isinstance(response, dict) else None
        message = error.get("message", "") if isinstance(error, dict) else ""
        raise Unreachable(
            f"/v1/models answers {status} {message}".strip(),
            hint="the URL must be that of an OpenAI-compatible server; --api-key gives its key",
        )
    models = response.get("data") if isinstance(response, dict) else None
    if not isinstance(models, list):
        raise Unreachable("/v1/models lists no models", hint="is it an OpenAI-compatible server?")
    return [model for model in models if isinstance(model, dict)]


def check_context_length(bench: BenchConfig, models: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if synthetic requests exceed the context length that the server lists."""
    named = [model for model in models if model.get("id") == bench.target.model] or models
    context = named[0].get("max_model_len") if named else None
    shape = bench.shape
    needed = shape.turns * (shape.input_tokens + shape.output_tokens)
    if bench.trace or bench.sharegpt or not isinstance(context, int) or needed <= context:
        return
    turns = f", {shape.turns} turns" if shape.turns > 1 else ""
    raise ConfigError(
        f"{shape.input_tokens} tokens in and {shape.output_tokens} out{turns} are more than the "
        f"context of {named[0].get('id')}: {context} tokens",
        hint="reduce --isl, --osl or --turns",
    )


async def _load_words(bench: BenchConfig, server: LoadClient, clock: Clock) -> Sequence[str]:
    if bench.sharegpt:
        return ()
    if bench.tokenizer:
        return await clock.offload(words_from_tokenizer, bench.tokenizer)
    return await words_from_server(server, bench.target.model)


def _trace_block_tokens(bench: BenchConfig) -> int:
    return trace_block_tokens(bench.trace) if bench.trace else TRACE_BLOCK_TOKENS


def _make_sessions(bench: BenchConfig) -> Iterable[SessionPlan]:
    if bench.trace:
        rows = bench.load.requests
        sessions = read_mooncake(bench.trace, rows=rows, speed=bench.speed)
        if bench.closed or bench.load.rate:
            return [SessionPlan(session.turns) for session in sessions]
        return sessions
    if bench.sharegpt:
        count = (
            token_counter_from_tokenizer(bench.tokenizer) if bench.tokenizer else _estimate_tokens
        )
        sessions = read_sharegpt(bench.sharegpt, count, turns=bench.shape.turns)
        limited = bench.load.requests or bench.load.duration_s
        return itertools.cycle(sessions) if limited else sessions
    return synthetic_sessions(bench.shape)


def _estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text without a tokenizer."""
    return max(1, len(text) // 4)


def _recorded_settings(bench: BenchConfig) -> dict[str, object]:
    without_key = replace(bench, target=replace(bench.target, api_key=""))
    settings: dict[str, object] = msgspec.to_builtins(without_key)
    return settings


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

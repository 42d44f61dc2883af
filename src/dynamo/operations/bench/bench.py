"""A whole measurement: find the words, warm up, measure, count."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.bench.arrivals import synthetic_sessions
from dynamo.operations.bench.bench_result import BenchResult, compute_result
from dynamo.operations.bench.load_client import LoadClient, Unreachable
from dynamo.operations.bench.load_generator import LoadGenerator, ThroughputTimeline
from dynamo.operations.bench.process_cpu import ProcessCpuMeter
from dynamo.operations.bench.prompts import PromptGenerator
from dynamo.operations.bench.single_token_words import (
    token_counter_from_tokenizer,
    words_from_server,
    words_from_tokenizer,
)
from dynamo.operations.bench.traces import read_mooncake, read_sharegpt
from dynamo.operations.bench.workload import (
    BenchTarget,
    LatencyObjectives,
    LoadProfile,
    RequestShape,
    SessionPlan,
)

BenchProgressCallback = Callable[[LoadGenerator, float], None]


class BenchConfig(msgspec.Struct, frozen=True):
    """What to measure. `trace`: a Mooncake file whose hash ids stand for `block_tokens` each,
    `speed` times as fast; `closed`: not at its times, but `load.concurrency` sessions at a time;
    `sharegpt`: a file of conversations; without either requests are made up by `shape`."""

    target: BenchTarget = BenchTarget()
    shape: RequestShape = RequestShape()
    load: LoadProfile = LoadProfile()
    objectives: LatencyObjectives = LatencyObjectives()
    trace: str = ""
    block_tokens: int = 512
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
    """Measure. `tell(measurement, seconds)` now and then; `stop`: set, what was answered until then
    is the result. Raises `Unreachable`, `ConfigError`."""
    clock = clock or SystemClock()
    stop = stop or asyncio.Event()
    bench = replace(bench, load=replace(bench.load, seed=bench.load.seed or random_seed()))
    server = LoadClient(bench.target)
    try:
        check_context_length(bench, await fetch_models(server))
        words = await _load_words(bench, server, clock)
        prompts = PromptGenerator(words, bench.shape, bench.load.seed, bench.block_tokens)
        sessions = await clock.offload(_make_sessions, bench)
        measurement = LoadGenerator(bench.target, server, prompts, clock, stop)
        if bench.load.warmup:
            await measurement.warm_up(synthetic_sessions(bench.shape), bench.load)
        cpu = await clock.offload(ProcessCpuMeter, bench.target.url)
        async with BackgroundTasks() as tasks:
            timeline = ThroughputTimeline(measurement, on_progress, clock)
            tasks.start(timeline.run())
            cpu.start()
            run = await measurement.run(sessions, _effective_load(bench))
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


def random_seed() -> int:
    """Another one every time."""
    return secrets.randbelow(1 << 31) + 1


async def fetch_models(server: LoadClient) -> Sequence[Mapping[str, Any]]:
    """What the server tells of its models. Raises `Unreachable`."""
    status, answer = await server.fetch_json("/v1/models", method="GET")
    if status != 200:
        error = answer.get("error") if isinstance(answer, dict) else None
        told = error.get("message", "") if isinstance(error, dict) else ""
        raise Unreachable(
            f"/v1/models answers {status} {told}".strip(),
            hint="wanted an OpenAI-compatible server; a key goes into --api-key",
        )
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list):
        raise Unreachable("/v1/models lists no models", hint="wanted an OpenAI-compatible server")
    return [one for one in models if isinstance(one, dict)]


def check_context_length(bench: BenchConfig, models: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ConfigError` where made-up requests go beyond the context that the server tells."""
    named = [one for one in models if one.get("id") == bench.target.model] or models
    context = named[0].get("max_model_len") if named else None
    shape = bench.shape
    wanted = shape.turns * (shape.input_tokens + shape.output_tokens)
    if bench.trace or bench.sharegpt or not isinstance(context, int) or wanted <= context:
        return
    turns = f", {shape.turns} turns" if shape.turns > 1 else ""
    raise ConfigError(
        f"{shape.input_tokens} tokens in and {shape.output_tokens} out{turns} are more than the "
        f"context of {named[0].get('id')}: {context} tokens",
        hint="less by --isl, --osl or --turns",
    )


async def _load_words(bench: BenchConfig, server: LoadClient, clock: Clock) -> Sequence[str]:
    if bench.sharegpt:
        return ()
    if bench.tokenizer:
        return await clock.offload(words_from_tokenizer, bench.tokenizer)
    return await words_from_server(server, bench.target.model)


def _make_sessions(bench: BenchConfig) -> Iterable[SessionPlan]:
    if bench.trace:
        rows = bench.load.requests
        sessions = read_mooncake(bench.trace, rows=rows, speed=bench.speed)
        if bench.closed or bench.load.rate:
            return [SessionPlan(one.turns) for one in sessions]
        return sessions
    if bench.sharegpt:
        count = (
            token_counter_from_tokenizer(bench.tokenizer) if bench.tokenizer else _estimate_tokens
        )
        found = read_sharegpt(bench.sharegpt, count, turns=bench.shape.turns)
        return itertools.cycle(found) if bench.load.requests or bench.load.duration_s else found
    return synthetic_sessions(bench.shape)


def _effective_load(bench: BenchConfig) -> LoadProfile:
    """A trace ends by itself."""
    if bench.trace and not bench.load.rate:
        return replace(bench.load, duration_s=0.0)
    return bench.load


def _estimate_tokens(text: str) -> int:
    """Tokens of a text, roughly, where no tokenizer is at hand."""
    return max(1, len(text) // 4)


def _recorded_settings(bench: BenchConfig) -> dict[str, object]:
    bare = replace(bench, target=replace(bench.target, api_key=""))
    found: dict[str, object] = msgspec.to_builtins(bare)
    return found

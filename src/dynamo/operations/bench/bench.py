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
from dynamo.core.tasks import Tasks
from dynamo.operations.bench.arrivals import made_up
from dynamo.operations.bench.figures import Result, figures
from dynamo.operations.bench.measure import Measurement
from dynamo.operations.bench.plan import Load, Objectives, Session, Shape, Target
from dynamo.operations.bench.processes import Cpu
from dynamo.operations.bench.prompts import Prompts
from dynamo.operations.bench.timeline import Timeline
from dynamo.operations.bench.traces import read_mooncake, read_sharegpt
from dynamo.operations.bench.wire import Server, Unreachable
from dynamo.operations.bench.words import (
    counter_of_folder,
    words_of_folder,
    words_of_server,
)

Tell = Callable[[Measurement, float], None]


class Bench(msgspec.Struct, frozen=True):
    """What to measure. `trace`: a Mooncake file whose hash ids stand for `block_tokens` each,
    `speed` times as fast; `closed`: not at its times, but `load.concurrency` sessions at a time;
    `sharegpt`: a file of conversations; without either requests are made up by `shape`."""

    target: Target = Target()
    shape: Shape = Shape()
    load: Load = Load()
    objectives: Objectives = Objectives()
    trace: str = ""
    block_tokens: int = 512
    speed: float = 1.0
    closed: bool = False
    sharegpt: str = ""
    tokenizer: str = ""
    name: str = ""


async def run_bench(
    bench: Bench,
    tell: Tell | None = None,
    clock: Clock | None = None,
    stop: asyncio.Event | None = None,
) -> Result:
    """Measure. `tell(measurement, seconds)` now and then; `stop`: set, what was answered until then
    is the result. Raises `Unreachable`, `ConfigError`."""
    clock = clock or SystemClock()
    stop = stop or asyncio.Event()
    bench = replace(bench, load=replace(bench.load, seed=bench.load.seed or fresh_seed()))
    server = Server(bench.target)
    try:
        check_fits(bench, await models_of(server))
        words = await _words(bench, server, clock)
        prompts = Prompts(words, bench.shape, bench.load.seed, bench.block_tokens)
        sessions = await clock.offload(_sessions, bench)
        measurement = Measurement(bench.target, server, prompts, clock, stop)
        if bench.load.warmup:
            await measurement.warm_up(made_up(bench.shape), bench.load)
        cpu = await clock.offload(Cpu, bench.target.url)
        async with Tasks() as tasks:
            timeline = Timeline(measurement, tell, clock)
            tasks.start(timeline.keep())
            cpu.start()
            run = await measurement.run(sessions, _limits(bench))
            cpu.stop()
    finally:
        server.close()
    result = figures(run, bench.objectives)
    return replace(
        result,
        name=bench.name,
        settings=_shown(bench),
        interrupted=stop.is_set(),
        processes=cpu.per(result.output_tokens, result.requests),
        timeline=timeline.per_second,
    )


def fresh_seed() -> int:
    """Another one every time."""
    return secrets.randbelow(1 << 31) + 1


async def models_of(server: Server) -> Sequence[Mapping[str, Any]]:
    """What the server tells of its models. Raises `Unreachable`."""
    status, answer = await server.call("/v1/models", method="GET")
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


def check_fits(bench: Bench, models: Sequence[Mapping[str, Any]]) -> None:
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


async def _words(bench: Bench, server: Server, clock: Clock) -> Sequence[str]:
    if bench.sharegpt:
        return ()
    if bench.tokenizer:
        return await clock.offload(words_of_folder, bench.tokenizer)
    return await words_of_server(server, bench.target.model)


def _sessions(bench: Bench) -> Iterable[Session]:
    if bench.trace:
        rows = bench.load.requests
        sessions = read_mooncake(bench.trace, rows=rows, speed=bench.speed)
        if bench.closed or bench.load.rate:
            return [Session(one.turns) for one in sessions]
        return sessions
    if bench.sharegpt:
        count = counter_of_folder(bench.tokenizer) if bench.tokenizer else _guess
        found = read_sharegpt(bench.sharegpt, count, turns=bench.shape.turns)
        return itertools.cycle(found) if bench.load.requests or bench.load.duration_s else found
    return made_up(bench.shape)


def _limits(bench: Bench) -> Load:
    """A trace ends by itself."""
    if bench.trace and not bench.load.rate:
        return replace(bench.load, duration_s=0.0)
    return bench.load


def _guess(text: str) -> int:
    """Tokens of a text, roughly, where no tokenizer is at hand."""
    return max(1, len(text) // 4)


def _shown(bench: Bench) -> dict[str, object]:
    bare = replace(bench, target=replace(bench.target, api_key=""))
    found: dict[str, object] = msgspec.to_builtins(bare)
    return found

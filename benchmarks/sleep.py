#!/usr/bin/env python3
"""Measure sleeping native workers: memory that they give back, time to wake, answers under load.

    benchmarks/sleep.py [--case memory|cycles|kills] [--model DIR] [--cycles 200] [--kills 10]

- memory: a worker answers, sleeps, and answers again, at levels 1 and 2. Its private memory before
  and while it sleeps, the times to fall asleep and to wake up, and the first answer are compared.
- cycles: two workers under streams, one of which sleeps and wakes up, in turns.
- kills: two workers under streams; one is killed while it falls asleep, sleeps or wakes up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from load import vocabulary
from processes import deployment_of, ready, wait_ready
from servers import Server
from shared_weights import PROMPT, STREAMS, TOKENS, ask, case_parser, deployment, run_cases
from streams import StreamClient, now, quantile
from targets import Targets

from dynamo.cli.workers.calls import call_worker, find_instances, open_command_runtime
from dynamo.core.errors import DynamoError
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import ProcessRecord
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.sleep import SLEEP_ENDPOINT, SleepAnswer, SleepOrder, encode_sleep_order

ORDER_S = 60.0
TRIES = 5
STAGES = ("falling asleep", "asleep", "waking up")


def private_mb(pid: int) -> float:
    """Return the private memory of a process in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return sum(sizes) / 1024


async def send_order(runtime: DistributedRuntime, instance: str, level: int) -> SleepAnswer:
    """Let a worker sleep at a level, or wake up (0)."""
    worker = (await find_instances(runtime, SLEEP_ENDPOINT))[instance]
    answer = await call_worker(runtime, worker, encode_sleep_order(SleepOrder(level)), ORDER_S)
    return msgspec.json.decode(answer, type=SleepAnswer)


async def measure_memory(server: Server, level: int) -> dict[str, float]:
    """Let the only worker sleep and wake up a few times."""
    deployed = deployment_of(server)
    (worker,) = ready(deployed, "worker")
    figures: dict[str, list[float]] = {}
    reference = await asyncio.to_thread(ask, server)
    async with open_command_runtime(Settings(), deployed.discovery_url) as runtime:
        for _ in range(TRIES):
            before_mb, began = private_mb(worker.pid), now()
            await send_order(runtime, worker.instance, level)
            asleep_s, asleep_mb = now() - began, private_mb(worker.pid)
            woken = (await send_order(runtime, worker.instance, 0)).seconds
            answer = await asyncio.to_thread(ask, server)
            for name, value in (
                ("before_mb", before_mb),
                ("asleep_mb", asleep_mb),
                ("asleep_s", asleep_s),
                ("wake_s", woken),
                ("altered", answer != reference),
            ):
                figures.setdefault(name, []).append(float(value))
    medians = {name: round(statistics.median(values), 3) for name, values in figures.items()}
    return medians | {"altered": sum(figures["altered"])}


def case_memory(args: argparse.Namespace) -> Targets:
    """Compare memory before and after, with shared and private weights."""
    targets, result = Targets(), {}
    for level, shared in itertools.product((1, 2), (True, False)):
        name = f"level {level}, {'shared' if shared else 'private'} weights"
        with deployment(args.model, 1, shared=shared) as server:
            wait_ready(deployment_of(server), "worker", 1)
            result[name] = figures = uvloop.run(measure_memory(server, level))
        targets.at_most(f"{name}: altered answers", figures["altered"], 0)
        targets.at_most(f"{name}: seconds until it sleeps", figures["asleep_s"], 1, " s")
        if shared and level == 1:
            targets.at_most(f"{name}: wake up, p50", figures["wake_s"], 0.1, " s")
        if shared or level == 2:
            targets.at_most(f"{name}: private memory asleep", figures["asleep_mb"], 60, " MB")
    targets.print_report(result, "memory")
    return targets


def case_cycles(args: argparse.Namespace) -> Targets:
    """Let two workers sleep in turns under streams."""

    async def cycle(runtime: DistributedRuntime, server: Server, result: dict[str, Any]) -> None:
        names = [record.instance for record in ready(deployment_of(server), "worker")]
        for number in range(args.cycles):
            name, level = names[number % 2], 1 + number // 2 % 2
            result["sleep_s"].append((await send_order(runtime, name, level)).seconds)
            result["wake_s"].append((await send_order(runtime, name, 0)).seconds)

    result = measure_streams(args, cycle)
    targets = Targets()
    targets.at_most("failed streams", result["failed"], 0)
    targets.at_most("altered texts", result["altered"], 0)
    targets.at_most("wake up, p50", result["wake_s"]["p50"], 0.1, " s")
    targets.print_report(result, f"{args.cycles} cycles")
    return targets


async def kill_at(
    stage: str, runtime: DistributedRuntime, worker: ProcessRecord, rng: random.Random
) -> None:
    """Kill a worker at a stage of its sleep. Raises `DynamoError` for an order that it lost."""
    async with BackgroundTasks(lambda _: None) as tasks:
        order = tasks.start(send_order(runtime, worker.instance, 1))
        if stage == STAGES[0]:
            await asyncio.sleep(rng.uniform(0, 0.3))
        else:
            await order
        if stage == STAGES[2]:
            order = tasks.start(send_order(runtime, worker.instance, 0))
            await asyncio.sleep(rng.uniform(0, 0.1))
        os.kill(worker.pid, signal.SIGKILL)
        await order


def case_kills(args: argparse.Namespace) -> Targets:
    """Kill workers at each stage of their sleep."""

    async def kill(runtime: DistributedRuntime, server: Server, result: dict[str, Any]) -> None:
        rng, deployed = random.Random(0), deployment_of(server)
        for number in range(args.kills):
            stage = STAGES[number % len(STAGES)]
            await asyncio.to_thread(wait_ready, deployed, "worker", 2)
            victim = rng.choice(ready(deployed, "worker"))
            try:
                await kill_at(stage, runtime, victim, rng)
            except DynamoError:
                result["lost_orders"] += 1
            await asyncio.sleep(1.0)

    result = measure_streams(args, kill)
    targets = Targets()
    targets.at_most("failed streams", result["failed"], 0)
    targets.at_most("altered texts", result["altered"], 0)
    targets.print_report(result, f"{args.kills} kills")
    return targets


Disturb = Callable[[DistributedRuntime, Server, dict[str, Any]], Coroutine[Any, Any, None]]


def measure_streams(args: argparse.Namespace, disturb: Disturb) -> dict[str, Any]:
    """Compare the texts of streams at two workers, while `disturb` runs, with those before."""

    async def run(server: Server) -> dict[str, Any]:
        client = StreamClient(server.url, vocabulary(args.model))
        requests = [client.encode_request(key, PROMPT, TOKENS) for key in range(2 * STREAMS)]
        reference = [(await client.send(key, each)).text for key, each in enumerate(requests)]
        times: dict[str, Any] = {"sleep_s": [], "wake_s": [], "lost_orders": 0}
        counts = {"requests": 0, "failed": 0, "altered": 0}

        async def run_streams(key: int) -> None:
            while not disturbing.done():
                stream = await client.send(key, requests[key])
                counts["requests"] += 1
                counts["failed"] += not stream.is_complete(TOKENS)
                counts["altered"] += not stream.error and stream.text != reference[key]
                key = (key + 1) % len(requests)

        url = deployment_of(server).discovery_url
        async with open_command_runtime(Settings(), url) as runtime, asyncio.TaskGroup() as group:
            disturbing = group.create_task(disturb(runtime, server, times))
            for number in range(STREAMS):
                group.create_task(run_streams(number))
        seconds = {
            name: {
                key: round(quantile(values, share), 3)
                for key, share in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))
            }
            for name, values in times.items()
            if isinstance(values, list) and values
        }
        return {**counts, **seconds, "lost_orders": times["lost_orders"]}

    with deployment(args.model, 2) as server:
        wait_ready(deployment_of(server), "worker", 2)
        return uvloop.run(run(server))


CASES = {"memory": case_memory, "cycles": case_cycles, "kills": case_kills}


def main() -> int:
    """Run the cases and print their results."""
    parser = case_parser(__doc__, CASES)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--kills", type=int, default=12)
    return run_cases(parser.parse_args(), CASES)


if __name__ == "__main__":
    sys.exit(main())

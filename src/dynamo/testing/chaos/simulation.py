"""Runs a day."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count, cycle
from pathlib import Path
from random import Random

import msgspec

from dynamo.core.context import Context
from dynamo.core.reply import Reply, SendRequest
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo, GenerateRequest
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.inference.mock.timing import LinearTiming, StepTiming
from dynamo.operations.latency_summary import LatencySummary, summarize_latencies
from dynamo.testing.chaos.faults import FaultSchedule, SimulatedWorkers, drop_events_repeatedly
from dynamo.testing.chaos.leaks import find_leaked_records, find_leaks, find_open_planes
from dynamo.testing.chaos.processes import SimulatedFrontend, SimulatedNetwork
from dynamo.testing.chaos.requests import SimulatedClients, SimulatedOutcome, SimulatedPrompts


class ChaosResult(msgspec.Struct, frozen=True):
    """`right`: answered within the deadline, every token as it should be; `failed`: the others by
    what was wrong; `hit_gap_ms`: the longest pause of each answer that had one over half a second;
    `leaks`: what was left over at the end; `resident_mb`: of the process, hour by hour."""

    hours: float
    workers: int
    requests: int
    correct: int
    correct_share: float
    failed: Mapping[str, int]
    failure_messages: Sequence[str]
    stalled: int
    stall_ms: LatencySummary
    duration_ms: LatencySummary
    crashes: int
    partitions: int
    partitioned_workers: int
    counters: Mapping[str, float]
    leaks: Sequence[str]
    resident_mb: Sequence[float]
    wall_s: float
    cpu_s: float


def resident_mb() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 1e6, 1)


def parse_counters(rendered: str, names: Sequence[str]) -> dict[str, float]:
    """The samples of those counters that are not 0, of a page of metrics."""
    found = {}
    for line in rendered.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in names and float(value):
            found[name] = float(value)
    return found


SETTLE_S = 90.0
"""After the last fault; longer than any probe, lease or repair takes."""
DELIVERY_INTERVAL_S = 0.05
REPORTED_COUNTERS = (
    "dynamo_migrations_total",
    "dynamo_migrations_failed_total",
    "dynamo_workers_frozen_total",
    "dynamo_requests_moved_total",
    "dynamo_workers_ejected_total",
    "dynamo_router_retries_total",
)
_network_numbers = count()

ChaosProgressCallback = Callable[[float, SimulatedOutcome, SimulatedWorkers], bool]
"""Called every virtual hour with the hours that have gone; False: that was enough."""


class ChaosScenario(msgspec.Struct, frozen=True):
    """What is lived through. `rate`: requests a second; `hang_up`: beside them, clients a second
    that leave before their answer is complete."""

    hours: float = 24.0
    workers: int = 100
    frontends: int = 1
    rate: float = 2.0
    prompt_tokens: int = 1024
    answer_tokens: int = 128
    deadline_s: float = 10.0
    num_blocks: int = 1024
    block_tokens: int = 16
    mode: str = "kv"
    timing: StepTiming = LinearTiming(c0=10.0, c1=0.1)
    faults: FaultSchedule = FaultSchedule()
    disconnect_rate: float = 0.0
    seed: int = 0


def run_chaos(day: ChaosScenario, progress: ChaosProgressCallback | None = None) -> ChaosResult:
    """Hours in minutes. Raises `Deadlock`."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run_in_virtual_time(lambda clock: _run_scenario(day, clock, progress))
    took = {
        "wall_s": round(time.perf_counter() - wall, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }
    return msgspec.structs.replace(result, leaks=[*result.leaks, *find_open_planes()], **took)


async def _run_scenario(
    day: ChaosScenario, clock: VirtualClock, progress: ChaosProgressCallback | None
) -> ChaosResult:
    engine = EngineInfo(
        engine="mock",
        block_tokens=day.block_tokens,
        num_blocks=day.num_blocks,
        context_tokens=day.num_blocks * day.block_tokens,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
    )
    ground = SimulatedNetwork(
        f"memory:day-{next(_network_numbers)}", clock, engine, day.timing, day.mode, set()
    )
    rng, tally = Random(day.seed), SimulatedOutcome()
    fleet = SimulatedWorkers(ground, day.faults, Random(rng.random()), day.workers)
    await fleet.start()
    frontends = [
        await SimulatedFrontend.start(ground, f"frontend-{number}", day.seed + number)
        for number in range(day.frontends)
    ]
    clock.on_time_advanced(FastForwardDelivery(ground).on_clock_jump)
    async with BackgroundTasks() as troubles:
        if day.faults.event_loss_every_s:
            deafening = drop_events_repeatedly(ground, day.faults, Random(rng.random()), frontends)
            troubles.start(deafening, "deafen frontends")
        memory = await _run_workload(
            day, clock, rng, tally, fleet, RoundRobinFrontends(frontends).send, progress
        )
    hours = clock.now() / 3600.0
    await fleet.stop_faults()
    await clock.sleep(SETTLE_S)
    left = [leak for one in frontends for leak in find_leaks(one, fleet.workers.values())]
    left += await find_leaked_records(frontends, fleet.workers.values())
    if tally.in_flight:
        left.append(f"{tally.in_flight} requests under way")
    counted = Counter[str]()
    for frontend in frontends:
        counted.update(parse_counters(frontend.runtime.metrics.render(), REPORTED_COUNTERS))
        await frontend.shutdown()
    await fleet.shutdown()
    left += [f"task left: {name}" for name in _leaked_tasks()]
    return _make_result(day, hours, tally, fleet, counted, left, memory)


async def _run_workload(
    day: ChaosScenario,
    clock: VirtualClock,
    rng: Random,
    tally: SimulatedOutcome,
    fleet: SimulatedWorkers,
    send: SendRequest,
    progress: ChaosProgressCallback | None,
) -> list[float]:
    """Requests come by chance until the day is over, and are answered. Resident memory by hour."""
    asking = SimulatedClients(send, clock, tally, day.answer_tokens, day.deadline_s)
    prompts = SimulatedPrompts(day.prompt_tokens, Random(rng.random()))
    memory: list[float] = []
    begin = clock.now()
    end, told = begin + day.hours * 3600.0, begin
    async with BackgroundTasks() as tasks, BackgroundTasks() as leavers:
        fleet.start_faults()
        if day.disconnect_rate:
            leavers.start(
                _run_disconnecting_clients(day, clock, Random(rng.random()), asking),
                "clients that leave",
            )
        while clock.now() < end:
            await clock.sleep(rng.expovariate(day.rate))
            tasks.start(asking.send_and_check(prompts.make()))
            if clock.now() >= told:
                memory.append(resident_mb())
                told += 3600.0
                if progress and not progress((clock.now() - begin) / 3600.0, tally, fleet):
                    break
        await tasks.join()
    return memory


async def _run_disconnecting_clients(
    day: ChaosScenario, clock: VirtualClock, rng: Random, asking: SimulatedClients
) -> None:
    """Without end: one leaves after the other, at any moment of its answer."""
    prompts = SimulatedPrompts(day.prompt_tokens, Random(rng.random()))
    while True:
        await clock.sleep(rng.expovariate(day.disconnect_rate))
        await asking.send_and_disconnect(prompts.make(), rng.uniform(0.0, 3.0))


class RoundRobinFrontends:
    """Sends requests by one frontend after the other."""

    def __init__(self, frontends: Sequence[SimulatedFrontend]) -> None:
        self._next = cycle(frontends)

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """A `Send`."""
        await next(self._next).send(request, context, reply)


class FastForwardDelivery:
    """Hands out the tokens of engines that take many steps at once, in small portions."""

    def __init__(self, ground: SimulatedNetwork) -> None:
        self._network = ground
        self._next_delivery_s = 0.0

    def on_clock_jump(self) -> None:
        """It is later."""
        now = self._network.clock.now()
        if now >= self._next_delivery_s:
            self._next_delivery_s = now + DELIVERY_INTERVAL_S
            for leaper in tuple(self._network.fast_forwarding):
                leaper.catch_up()


def _leaked_tasks() -> list[str]:
    mine = asyncio.current_task()
    return sorted(task.get_name() for task in asyncio.all_tasks() if task is not mine)


def _make_result(
    day: ChaosScenario,
    hours: float,
    tally: SimulatedOutcome,
    fleet: SimulatedWorkers,
    counted: Mapping[str, float],
    left: list[str],
    memory: list[float],
) -> ChaosResult:
    return ChaosResult(
        hours=round(hours, 3),
        workers=day.workers,
        requests=tally.requests,
        correct=tally.correct,
        correct_share=tally.correct / max(1, tally.requests),
        failed=dict(tally.failed),
        failure_messages=tally.failure_messages,
        stalled=len(tally.stalls_s),
        stall_ms=summarize_latencies(tally.stalls_s),
        duration_ms=summarize_latencies(tally.durations_s),
        crashes=fleet.crashes,
        partitions=fleet.partitions,
        partitioned_workers=fleet.partitioned_workers,
        counters=counted,
        leaks=left,
        resident_mb=memory,
        wall_s=0.0,
        cpu_s=0.0,
    )

"""Runs a chaos scenario and collects its result."""

from __future__ import annotations

import asyncio
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from random import Random

import msgspec
from tests.simulation.chaos.faults import FaultSchedule, SimulatedWorkers, drop_events_repeatedly
from tests.simulation.chaos.leaks import (
    PlaceCount,
    find_leaked_records,
    find_leaks,
    open_planes,
)
from tests.simulation.chaos.processes import FlakyTiers, SimulatedFrontend, SimulatedNetwork
from tests.simulation.chaos.requests import SimulatedClients, SimulatedOutcome, SimulatedPrompts

from dynamo.core.reply import SendRequest
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.model import StepTiming, Timing
from dynamo.core.values import EngineInfo
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.operations.latency_summary import LatencySummary, summarize_latencies
from dynamo.operations.replay.workers import SimulatedTier


class ChaosResult(msgspec.Struct, frozen=True):
    """The result of a run. `correct` answers arrived within the deadline with exactly the right
    tokens; `failed` counts the others by fault. `stall_ms` summarizes the longest gap of each
    answer with a gap over half a second. `leaks` is what was left over at the end. `resident_mb`
    is measured every virtual hour. `tier_loads`: tier -> blocks loaded. `remote_prefills` counts the prompts that a worker wanted from
    another one, `prefill_fallbacks` those that it computed itself in the end, by reason."""

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
    remote_prefills: int
    tier_loads: Mapping[str, int]
    prefill_fallbacks: Mapping[str, int]
    counters: Mapping[str, float]
    leaks: Sequence[str]
    resident_mb: Sequence[float]
    wall_s: float = 0.0
    cpu_s: float = 0.0


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 1e6, 1)


def parse_counters(rendered: str, names: Sequence[str]) -> dict[str, float]:
    """Return the non-zero samples of the counters `names` from a metrics page of one model."""
    samples = {}
    for line in re.sub(r'\{model="[^"]*"(\}|,)', "{", rendered).replace("{ ", " ").splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in names and float(value):
            samples[name] = float(value)
    return samples


SETTLE_S = 90.0
"""Time after the last fault. Probes, leases and repairs take less."""
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
"""Called every virtual hour with the hours so far. False ends the run."""


class ChaosScenario(msgspec.Struct, frozen=True):
    """The settings of a run. `rate` is in requests a second. In addition `disconnect_rate` clients
    a second leave before their answer is complete. Each of a worker's `data_parallel` ranks has
    `num_blocks` and `max_num_seqs`. `prefill_workers` of the workers only compute prompts for the
    others; `disaggregation` is the mode of the router. `tiers` lie below the blocks of
    each engine; a share of their loads and stores fails."""

    hours: float = 24.0
    workers: int = 100
    frontends: int = 1
    rate: float = 2.0
    prompt_tokens: int = 1024
    answer_tokens: int = 128
    deadline_s: float = 10.0
    num_blocks: int = 1024
    max_num_seqs: int = 256
    data_parallel: int = 1
    block_tokens: int = 16
    mode: str = "kv"
    prefill_workers: int = 0
    disaggregation: str = "off"
    timing: StepTiming = Timing(c0=10.0, c1=0.1)
    faults: FaultSchedule = FaultSchedule()
    disconnect_rate: float = 0.0
    tiers: tuple[SimulatedTier, ...] = ()
    tier_fault_share: float = 0.0
    seed: int = 0


def run_chaos(
    scenario: ChaosScenario, progress: ChaosProgressCallback | None = None
) -> ChaosResult:
    """Run the scenario in virtual time. Raises `Deadlock`."""
    wall, cpu = time.perf_counter(), time.process_time()
    planes = open_planes()
    result = run_in_virtual_time(lambda clock: _run_scenario(scenario, clock, progress))
    durations = {
        "wall_s": round(time.perf_counter() - wall, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }
    left = [f"{count} {name} left open" for name, count in (open_planes() - planes).items()]
    return msgspec.structs.replace(result, leaks=[*result.leaks, *left], **durations)


def _make_network(scenario: ChaosScenario, clock: VirtualClock) -> SimulatedNetwork:
    engine = EngineInfo(
        engine="mock",
        block_tokens=scenario.block_tokens,
        num_blocks=scenario.num_blocks,
        context_tokens=scenario.num_blocks * scenario.block_tokens,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=8_192,
    )
    return SimulatedNetwork(
        f"memory:day-{next(_network_numbers)}",
        clock,
        engine,
        scenario.timing,
        scenario.mode,
        data_parallel=scenario.data_parallel,
        disaggregation=scenario.disaggregation,
        tiers=FlakyTiers(scenario.tiers, clock, scenario.tier_fault_share, Random(scenario.seed))
        if scenario.tiers
        else None,
    )


async def _run_scenario(
    scenario: ChaosScenario, clock: VirtualClock, progress: ChaosProgressCallback | None
) -> ChaosResult:
    network = _make_network(scenario, clock)
    rng, outcome = Random(scenario.seed), SimulatedOutcome()
    workers = SimulatedWorkers(network, scenario.faults, Random(rng.random()), scenario.workers)
    workers.prefill_workers = scenario.prefill_workers
    await workers.start()
    frontends = [
        SimulatedFrontend(network, f"frontend-{number}") for number in range(scenario.frontends)
    ]
    for seed, frontend in enumerate(frontends, scenario.seed):
        await frontend.start(seed)
    places = PlaceCount(frontends)

    def on_time_advanced() -> None:
        places.check()
        network.deliver_tokens()

    clock.on_time_advanced(on_time_advanced)
    async with BackgroundTasks() as event_faults:
        if scenario.faults.event_loss_every_s:
            rng_of_loss = Random(rng.random())
            event_loss = drop_events_repeatedly(network, scenario.faults, rng_of_loss, frontends)
            event_faults.start(event_loss, "event loss")
        memory = await _run_workload(scenario, clock, rng, outcome, workers, places.send, progress)
    hours = clock.now() / 3600.0
    await workers.stop_faults()
    await clock.sleep(SETTLE_S)
    last_workers = workers.workers.values()
    leaks = [leak for frontend in frontends for leak in find_leaks(frontend, last_workers)]
    if places.excess:
        leaks.append(f"admission counted {places.excess} requests more than there were")
    leaks += await find_leaked_records(frontends, last_workers)
    if outcome.in_flight:
        leaks.append(f"{outcome.in_flight} requests in progress")
    counters = Counter[str]()
    for frontend in frontends:
        counters.update(parse_counters(frontend.runtime.metrics.render(), REPORTED_COUNTERS))
        await frontend.shutdown()
    await workers.shutdown()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    leaks += sorted(f"task left: {task.get_name()}" for task in tasks)
    return _make_result(scenario, hours, outcome, workers, network, counters, leaks, memory)


async def _run_workload(
    scenario: ChaosScenario,
    clock: VirtualClock,
    rng: Random,
    outcome: SimulatedOutcome,
    workers: SimulatedWorkers,
    send: SendRequest,
    progress: ChaosProgressCallback | None,
) -> list[float]:
    """Send requests at random times until the run ends. Returns the resident memory by hour."""
    clients = SimulatedClients(send, clock, outcome, scenario.answer_tokens, scenario.deadline_s)
    prompts = SimulatedPrompts(scenario.prompt_tokens, Random(rng.random()))
    memory: list[float] = []
    begin = clock.now()
    end, next_report = begin + scenario.hours * 3600.0, begin
    async with BackgroundTasks() as tasks, BackgroundTasks() as disconnecting:
        workers.start_faults()
        if scenario.disconnect_rate:
            disconnecting.start(
                _run_disconnecting_clients(scenario, clock, Random(rng.random()), clients),
                "disconnecting clients",
            )
        while clock.now() < end:
            await clock.sleep(rng.expovariate(scenario.rate))
            tasks.start(clients.send_and_check(prompts.make()))
            if clock.now() >= next_report:
                memory.append(resident_mb())
                next_report += 3600.0
                if progress and not progress((clock.now() - begin) / 3600.0, outcome, workers):
                    break
        await tasks.join()
    return memory


async def _run_disconnecting_clients(
    scenario: ChaosScenario, clock: VirtualClock, rng: Random, clients: SimulatedClients
) -> None:
    """Run one disconnecting client after the other. Runs until cancelled."""
    prompts = SimulatedPrompts(scenario.prompt_tokens, Random(rng.random()))
    while True:
        await clock.sleep(rng.expovariate(scenario.disconnect_rate))
        await clients.send_and_disconnect(prompts.make(), rng.uniform(0.0, 3.0))


def _make_result(
    scenario: ChaosScenario,
    hours: float,
    outcome: SimulatedOutcome,
    workers: SimulatedWorkers,
    network: SimulatedNetwork,
    counters: Mapping[str, float],
    leaks: list[str],
    memory: list[float],
) -> ChaosResult:
    return ChaosResult(
        hours=round(hours, 3),
        workers=scenario.workers,
        requests=outcome.requests,
        correct=outcome.correct,
        correct_share=outcome.correct / max(1, outcome.requests),
        failed=dict(outcome.failed),
        failure_messages=outcome.failure_messages,
        stalled=len(outcome.stalls_s),
        stall_ms=summarize_latencies(outcome.stalls_s),
        duration_ms=summarize_latencies(outcome.durations_s),
        crashes=workers.crashes,
        partitions=workers.partitions,
        partitioned_workers=workers.partitioned_workers,
        remote_prefills=sum(arrivals.prompts for arrivals in network.arrivals),
        prefill_fallbacks=sum((each.fallbacks for each in network.arrivals), Counter[str]()),
        tier_loads=dict(network.tiers.loaded_blocks) if network.tiers else {},
        counters=counters,
        leaks=leaks,
        resident_mb=memory,
    )

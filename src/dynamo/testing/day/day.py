"""Runs a day."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count, cycle
from random import Random

import msgspec

from dynamo.core.context import Context
from dynamo.core.reply import Reply, Send
from dynamo.core.tasks import Tasks
from dynamo.core.values import EngineInfo, GenerateRequest
from dynamo.core.virtual_time import VirtualClock, run_virtually
from dynamo.inference.mock.timing import Linear, Timing
from dynamo.operations.replay.figures import spread
from dynamo.testing.day.books import leaks, places_left, records_left
from dynamo.testing.day.faults import Faults, Fleet, deafen
from dynamo.testing.day.figures import DayResult, counters, resident_mb
from dynamo.testing.day.processes import Ground, SimulatedFrontend
from dynamo.testing.day.requests import Asking, Prompts, Tally

SETTLING_S = 90.0
"""After the last fault; longer than any probe, lease or repair takes."""
PORTION_S = 0.05
COUNTERS = (
    "dynamo_migrations_total",
    "dynamo_migrations_failed_total",
    "dynamo_workers_frozen_total",
    "dynamo_requests_moved_total",
    "dynamo_workers_ejected_total",
    "dynamo_router_retries_total",
)
_places = count()

Progress = Callable[[float, Tally, Fleet], bool]
"""Called every virtual hour with the hours that have gone; False: that was enough."""


class Day(msgspec.Struct, frozen=True):
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
    timing: Timing = Linear(c0=10.0, c1=0.1)
    faults: Faults = Faults()
    hang_up: float = 0.0
    seed: int = 0


def live_through(day: Day, progress: Progress | None = None) -> DayResult:
    """Hours in minutes. Raises `Deadlock`."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run_virtually(lambda clock: _live(day, clock, progress))
    took = {
        "wall_s": round(time.perf_counter() - wall, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }
    return msgspec.structs.replace(result, leaks=[*result.leaks, *places_left()], **took)


async def _live(day: Day, clock: VirtualClock, progress: Progress | None) -> DayResult:
    engine = EngineInfo(
        engine="mock",
        block_tokens=day.block_tokens,
        num_blocks=day.num_blocks,
        context_tokens=day.num_blocks * day.block_tokens,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
    )
    ground = Ground(f"memory:day-{next(_places)}", clock, engine, day.timing, day.mode, set())
    rng, tally = Random(day.seed), Tally()
    fleet = Fleet(ground, day.faults, Random(rng.random()), day.workers)
    await fleet.start()
    frontends = [
        await SimulatedFrontend.start(ground, f"frontend-{number}", day.seed + number)
        for number in range(day.frontends)
    ]
    clock.on_jump(Hands(ground).jumped)
    async with Tasks() as troubles:
        if day.faults.deaf_every_s:
            deafening = deafen(ground, day.faults, Random(rng.random()), frontends)
            troubles.start(deafening, "deafen frontends")
        memory = await _ask_all(day, clock, rng, tally, fleet, InTurn(frontends).send, progress)
    hours = clock.now() / 3600.0
    await fleet.calm()
    await clock.sleep(SETTLING_S)
    left = [leak for one in frontends for leak in leaks(one, fleet.workers.values())]
    left += await records_left(frontends, fleet.workers.values())
    if tally.under_way:
        left.append(f"{tally.under_way} requests under way")
    counted = Counter[str]()
    for frontend in frontends:
        counted.update(counters(frontend.runtime.metrics.render(), COUNTERS))
        await frontend.leave()
    await fleet.leave()
    left += [f"task left: {name}" for name in _tasks_left()]
    return _result(day, hours, tally, fleet, counted, left, memory)


async def _ask_all(
    day: Day,
    clock: VirtualClock,
    rng: Random,
    tally: Tally,
    fleet: Fleet,
    send: Send,
    progress: Progress | None,
) -> list[float]:
    """Requests come by chance until the day is over, and are answered. Resident memory by hour."""
    asking = Asking(send, clock, tally, day.answer_tokens, day.deadline_s)
    prompts = Prompts(day.prompt_tokens, Random(rng.random()))
    memory: list[float] = []
    begin = clock.now()
    end, told = begin + day.hours * 3600.0, begin
    async with Tasks() as tasks, Tasks() as leavers:
        fleet.unleash()
        if day.hang_up:
            leavers.start(_hang_up(day, clock, Random(rng.random()), asking), "clients that leave")
        while clock.now() < end:
            await clock.sleep(rng.expovariate(day.rate))
            tasks.start(asking.ask(prompts.make()))
            if clock.now() >= told:
                memory.append(resident_mb())
                told += 3600.0
                if progress and not progress((clock.now() - begin) / 3600.0, tally, fleet):
                    break
        await tasks.join()
    return memory


async def _hang_up(day: Day, clock: VirtualClock, rng: Random, asking: Asking) -> None:
    """Without end: one leaves after the other, at any moment of its answer."""
    prompts = Prompts(day.prompt_tokens, Random(rng.random()))
    while True:
        await clock.sleep(rng.expovariate(day.hang_up))
        await asking.hang_up(prompts.make(), rng.uniform(0.0, 3.0))


class InTurn:
    """Sends requests by one frontend after the other."""

    def __init__(self, frontends: Sequence[SimulatedFrontend]) -> None:
        self._next = cycle(frontends)

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """A `Send`."""
        await next(self._next).send(request, context, reply)


class Hands:
    """Hands out the tokens of engines that take many steps at once, in small portions."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._due_s = 0.0

    def jumped(self) -> None:
        """It is later."""
        now = self._ground.clock.now()
        if now >= self._due_s:
            self._due_s = now + PORTION_S
            for leaper in tuple(self._ground.leaping):
                leaper.catch_up()


def _tasks_left() -> list[str]:
    mine = asyncio.current_task()
    return sorted(task.get_name() for task in asyncio.all_tasks() if task is not mine)


def _result(
    day: Day,
    hours: float,
    tally: Tally,
    fleet: Fleet,
    counted: Mapping[str, float],
    left: list[str],
    memory: list[float],
) -> DayResult:
    return DayResult(
        hours=round(hours, 3),
        workers=day.workers,
        requests=tally.requests,
        right=tally.right,
        right_share=tally.right / max(1, tally.requests),
        failed=dict(tally.failed),
        told=tally.told,
        hit=len(tally.hit_s),
        hit_gap_ms=spread(tally.hit_s),
        took_ms=spread(tally.took_s),
        crashes=fleet.crashes,
        partitions=fleet.partitions,
        severed=fleet.severed,
        counters=counted,
        leaks=left,
        resident_mb=memory,
        wall_s=0.0,
        cpu_s=0.0,
    )

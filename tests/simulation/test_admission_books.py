"""Ranks, admission, queueing, migration and cancellation together: every request counts once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest
from tests.simulation.chaos import ChaosScenario, run_chaos
from tests.simulation.chaos.faults import FaultSchedule
from tests.simulation.chaos.leaks import PlaceCount, find_leaks
from tests.simulation.chaos.processes import SimulatedFrontend, SimulatedNetwork, SimulatedWorker
from tests.simulation.chaos.requests import SimulatedClients, SimulatedOutcome, SimulatedPrompts

from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.scheduling.workers.ledger import Ledger

BUSY = ChaosScenario(
    hours=0.015,
    workers=4,
    rate=8.0,
    num_blocks=256,
    max_num_seqs=2,
    data_parallel=2,
    faults=FaultSchedule(30.0, 25.0, (5.0, 15.0)),
    deadline_s=25.0,
    disconnect_rate=2.0,
)
_burst_numbers = count()


@pytest.mark.parametrize(
    ("mode", "seed"),
    [("round_robin", 1), ("least_loaded", 1), ("kv", 1), ("kv", 2), ("adaptive", 1)],
)
def test_all_books_are_empty_after_faults_at_full_queues(mode: str, seed: int) -> None:
    """Workers crash and freeze while requests queue for their ranks, and clients leave."""
    result = run_chaos(msgspec.structs.replace(BUSY, mode=mode, seed=seed))
    assert result.leaks == []
    assert set(result.failed) <= {"late", "overloaded"}, result.failure_messages
    assert result.correct > result.requests / 2 > 100
    assert result.crashes > 2


def test_a_request_that_admission_counts_twice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router sends a copy of the request to a rank, which admission must recognise."""
    place: Callable[..., Any] = Ledger.place

    def place_copies_apart(self: Ledger, key: str, worker: Any, *rest: Any, **named: Any) -> Any:
        apart = key if worker.rank is None else f"copy of {key}"
        return place(self, apart, worker, *rest, **named)

    monkeypatch.setattr(Ledger, "place", place_copies_apart)
    result = run_chaos(msgspec.structs.replace(BUSY, hours=0.003, faults=FaultSchedule(0.0, 0.0)))
    assert any("more than there were" in leak for leak in result.leaks)


def serve_burst(mode: str) -> float:
    """Return the seconds that 32 requests take at two workers of two ranks with two places."""
    engine = EngineInfo("mock", 16, 256, 4096, 2, 8192)

    async def main(clock: VirtualClock) -> float:
        name = f"memory:burst-{next(_burst_numbers)}"
        timing = Timing(c0=10.0, c1=0.1)
        network = SimulatedNetwork(name, clock, engine, timing, mode, data_parallel=2)
        clock.on_time_advanced(network.deliver_tokens)
        workers = [SimulatedWorker(network, f"worker-{number}") for number in range(2)]
        for number, worker in enumerate(workers):
            await worker.start(number)
        frontend = SimulatedFrontend(network, "frontend")
        await frontend.start(0)
        await frontend.pipeline.client.wait_for_instances(2)
        outcome = SimulatedOutcome()
        clients = SimulatedClients(PlaceCount([frontend]).send, clock, outcome, 100, 60.0)
        prompts, began = SimulatedPrompts(64, Random(0)), clock.now()
        async with BackgroundTasks() as tasks:
            for _ in range(32):
                tasks.start(clients.send_and_check(prompts.make()))
            await tasks.join()
        seconds = clock.now() - began
        assert outcome.correct == 32, outcome.failure_messages
        await clock.sleep(2.0)
        assert find_leaks(frontend, workers) == []
        await frontend.shutdown()
        for worker in workers:
            await worker.shutdown()
        return seconds

    return run_in_virtual_time(main)


@pytest.mark.parametrize("mode", ["kv", "adaptive"])
def test_all_places_of_all_ranks_are_used(mode: str) -> None:
    assert serve_burst(mode) < 1.1 * serve_burst("round_robin")

"""A program observes and changes the workers of a replay at virtual times, as a planner does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.simulation.conftest import BLOCK, chats, cluster, unique

from dynamo.core.errors import NotFound
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.fleet import FleetDemand, KindCounts, ReplayFleet, Startup
from dynamo.operations.replay.replay import Replay, ReplayPlan

PLAN = ReplayPlan("synthetic", cluster(2), RouterSettings(), BLOCK, startup=Startup(3.0, 3.0))


class Driver:
    """Calls the steps at their times, and keeps what it observes before and after each."""

    def __init__(self, *steps):
        self._steps = steps
        self.seen: list[KindCounts] = []
        self.demands: list[FleetDemand] = []

    def __call__(self, fleet: ReplayFleet) -> None:
        for time_s, act in self._steps:
            fleet.clock.call_at(time_s, lambda act=act: self._run(fleet, act))

    def _run(self, fleet, act):
        act(fleet)
        self.seen.append(fleet.observe()["worker"])
        self.demands.append(fleet.demand())


@pytest.mark.parametrize("kind", [Replay, FastReplay])
def test_workers_start_drain_and_come_back(kind):
    driver = Driver(
        (1.05, lambda fleet: fleet.start("worker")),
        (2.05, lambda fleet: None),
        (5.0, lambda fleet: fleet.drain(fleet.workers[0])),
        (5.01, lambda fleet: fleet.revive(fleet.workers[0])),
        (6.0, lambda fleet: fleet.kill(fleet.workers[1])),
        (7.0, lambda fleet: fleet.start("worker", 0.5)),
        (8.0, lambda fleet: fleet.kill(fleet.workers[2], restart=True)),
        (9.0, lambda fleet: fleet.drain(fleet.start("worker", 9.0))),
    )
    result, _ = kind(PLAN, drive=driver).run(unique(120, 10.0, answer=200))
    assert result.completed == 120
    assert driver.seen == [
        KindCounts(3, 1, 2, 0),
        KindCounts(3, 1, 2, 0),
        KindCounts(2, 0, 2, 1),
        KindCounts(3, 0, 3, 0),
        KindCounts(3, 0, 2, 0, failing=1),
        KindCounts(3, 1, 2, 0),
        KindCounts(3, 1, 2, 0),
        KindCounts(3, 1, 2, 0),
    ]
    assert [demand.requests for demand in driver.demands[:2]] == [11, 21]
    busy = driver.demands[2]
    assert busy.prompt_tokens == busy.requests * 40 * BLOCK
    assert 0 < busy.ended < busy.requests
    assert busy.output_tokens == busy.ended * 200
    assert busy.running > 0


@pytest.mark.parametrize("kind", [Replay, FastReplay])
def test_a_program_that_never_ends_does_not_keep_the_replay(kind):
    def drive(fleet: ReplayFleet) -> None:
        fleet.clock.call_at(fleet.clock.now() + 1.0, lambda: drive(fleet))

    result, _ = kind(PLAN, drive=drive).run(chats(5))
    assert result.completed == result.requests
    assert not result.timeline


def test_the_wrong_kind_is_an_error():
    with pytest.raises(NotFound, match="wroker") as caught:
        FastReplay(PLAN, drive=lambda fleet: fleet.start("wroker")).run(chats(2))
    assert "worker" in str(caught.value.hint)


def test_a_role_changes_the_kind():
    both = cluster(2).groups[0]
    groups = [
        replace(both, count=count, engine=replace(both.engine, roles=roles))
        for count, roles in ((2, ("prefill",)), (1, ("decode",)))
    ]
    workers = replace(cluster(1), groups=groups, transfer=1e10)
    plan = replace(PLAN, workers=workers, router_settings=RouterSettings(mode="kv"))
    for kind in (Replay, FastReplay):
        seen = []

        def drive(fleet: ReplayFleet, seen=seen) -> None:
            fleet.clock.call_at(2.0, lambda: fleet.set_role(fleet.workers[0], "decode"))
            fleet.clock.call_at(3.0, lambda: seen.append(fleet.observe()))

        result, _ = kind(plan, drive=drive).run(chats(30, per_s=6.0))
        assert result.completed == result.requests
        assert [seen[0][name].ready for name in ("prefill-worker", "decode-worker")] == [1, 2]

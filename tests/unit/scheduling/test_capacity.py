"""Capacity and its predictions: durations, foreign requests and the dequeue rate."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.scheduling.fake_cluster import FakeCluster, run_scenario

from dynamo.core.context import Context
from dynamo.core.values import (
    EngineInfo,
    GenerateRequest,
    Load,
    SamplingParams,
    StopConditions,
    sum_loads,
)
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.durations import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_TPOT_S,
    DequeueRate,
    DurationHistogram,
    DurationModel,
)
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.slots import ClusterCapacity, Reservation
from dynamo.scheduling.workers.workers import WorkerStates
from dynamo.testing.fakes import CollectedReply


def test_the_remaining_duration_by_age() -> None:
    histogram = DurationHistogram()
    for _ in range(100):
        histogram.observe(1.4)
    assert histogram.estimate_remaining_s(0.0) == pytest.approx(1.4)
    assert histogram.estimate_remaining_s(1.0) == pytest.approx(0.4)
    assert 0.0 < histogram.estimate_remaining_s(1.41) < 0.3
    assert histogram.estimate_remaining_s(4.0) == pytest.approx(1.0)  # longer than all observations


def test_an_old_request_is_predicted_to_be_a_long_one() -> None:
    histogram = DurationHistogram()
    for _ in range(50):
        histogram.observe(0.1)
        histogram.observe(10.0)
    assert histogram.estimate_remaining_s(0.0) == pytest.approx(5.05, rel=0.05)
    assert histogram.estimate_remaining_s(1.0) == pytest.approx(9.0)


def test_old_observations_lose_weight() -> None:
    histogram = DurationHistogram()
    for seconds in [1.0] * 300 + [3.0] * 300:
        histogram.observe(seconds)
    assert histogram.estimate_remaining_s(0.0) == pytest.approx(3.0, rel=0.05)
    for _ in range(30_000):
        histogram.observe(3.0)
    assert histogram.estimate_remaining_s(0.0) == pytest.approx(3.0)


def test_durations_are_learnt_by_max_tokens() -> None:
    durations = DurationModel()
    assert durations.predict_remaining_s(100, 0.0) == pytest.approx(
        1.0
    )  # half of the tokens, 20 ms each
    assert durations.predict_remaining_s(100, 8.0) == pytest.approx(2.0)
    for _ in range(10):
        durations.observe(60, 1.4)
        durations.observe(1000, 9.0)
        durations.observe_output(60, 60, 1.4)
    assert durations.predict_remaining_s(60, 0.0) == pytest.approx(1.4)
    assert durations.predict_remaining_s(1000, 0.0) == pytest.approx(9.0)
    assert 8.0 < durations.predict_remaining_s(10_000, 0.0) < 10.0  # capped at 512 tokens
    assert durations.predict_output_tokens(60) == pytest.approx(60)
    assert durations.predict_output_tokens(9) == 9


def make_worker(name: str, seqs: int = 4, blocks: int = 64, ranks: int = 1) -> Instance:
    info = EngineInfo("mock", 64, blocks, 4096, seqs, 8192, data_parallel=ranks)
    capabilities = {"engine": msgspec.to_builtins(info)}
    return Instance(
        id=name,
        address="memory://a",
        namespace="n",
        component="worker",
        endpoint="generate",
        capabilities=capabilities,
    )


@pytest.mark.parametrize("left", [32_000, 20_000, 9_000, 1_500])
def test_the_free_context_is_no_expected_length(left: int) -> None:
    """Answers without max_tokens may fill the context. Their lengths are those of earlier ones,
    whose prompts left other sizes."""
    durations = DurationModel()
    assert durations.predict_output_tokens(left) <= DEFAULT_OUTPUT_TOKENS
    assert durations.predict_remaining_s(left, 0.0) <= DEFAULT_OUTPUT_TOKENS * DEFAULT_TPOT_S
    for _ in range(50):
        durations.observe_output(32_000, 300, 299 * DEFAULT_TPOT_S)
        durations.observe(32_000, 300 * DEFAULT_TPOT_S)
    assert durations.predict_output_tokens(left) == pytest.approx(300)
    assert durations.predict_remaining_s(left, 0.0) == pytest.approx(300 * DEFAULT_TPOT_S, rel=0.05)
    assert durations.predict_mean_s() == pytest.approx(300 * DEFAULT_TPOT_S)


def test_answers_that_may_fill_the_context_take_no_more_room_than_answers_took() -> None:
    """A worker with room for two whole contexts takes all requests that have places."""

    async def scenario(cluster: FakeCluster) -> None:
        info = EngineInfo("mock", 16, 2 * 32_768 // 16, 32_768, 20, 8192)
        capabilities = {"engine": msgspec.to_builtins(info)}
        cluster.set_instances(a=replace(cluster.instances["a"], capabilities=capabilities))
        for number in range(24):
            request = GenerateRequest(
                str(number), "m", bytes(4 * 300), SamplingParams(), StopConditions(32_468)
            )
            call = cluster.admission.send(
                request, Context(str(number)), CollectedReply(), cluster.route
            )
            cluster.tasks.start(call)
        await cluster.clock.sleep(0.5)
        assert len(cluster.served) == 20

    run_scenario(scenario, 1)


def test_requests_of_other_frontends_last_as_long_as_ours() -> None:
    now = [0.0]
    capacity = ClusterCapacity(0, lambda: now[0])
    capacity.update_workers({"a": make_worker("a")}, {})
    for _ in range(9):
        capacity.durations.observe(32_000, 3.0)
    for at_s in (0.1, 0.2):
        capacity.on_load_report("a", Load(running=4, waiting=3), at_s)
    now[0] = 0.2
    waits = [capacity.predict_wait_s(ahead, 32_000) for ahead in range(7)]
    assert waits == pytest.approx([3.0 * rank / 7 for rank in range(1, 8)])


def test_requests_of_other_frontends_occupy_slots() -> None:
    now = [0.0]
    capacity = ClusterCapacity(0, lambda: now[0])
    capacity.update_workers({"a": make_worker("a")}, {})
    reservations = [Reservation(60, 300.0, 0.0) for _ in range(2)]
    for reservation in reservations:
        capacity.reserve("a", reservation, 0.0)
    assert (capacity.free_slots, capacity.has_foreign_requests) == (2, False)
    capacity.release("a", reservations[0], 0.05)
    capacity.on_load_report("a", Load(running=2, active_blocks=10, total_blocks=64), 0.1)
    assert (capacity.free_slots, capacity.has_foreign_requests) == (
        3,
        False,
    )  # our released request may be in the report
    capacity.on_load_report("a", Load(running=4, active_blocks=20, total_blocks=64), 0.2)
    assert (capacity.free_slots, capacity.has_foreign_requests) == (1, True)
    capacity.on_load_report("a", Load(running=4, waiting=3), 0.3)
    capacity.on_load_report("a", Load(running=4, waiting=3), 0.4)
    assert (capacity.free_slots, capacity.full_workers) == (0, frozenset({"a"}))
    now[0] = 2.0  # no report since 0.4 s
    capacity.refresh()
    assert (capacity.free_slots, capacity.full_workers, capacity.has_foreign_requests) == (
        3,
        frozenset(),
        False,
    )


def test_a_worker_that_computes_a_prompt_for_another_is_not_idle() -> None:
    capacity, states = ClusterCapacity(0, lambda: 0.0), WorkerStates()
    workers = {"a": make_worker("a"), "b": make_worker("b")}
    states.update_instances(workers)
    capacity.update_workers(workers, {state.name: state for state in states.workers})
    assert capacity.count_idle() == 2

    states["a"].place(PlacedRequest("1", states["a"], Prompt(1_000, ()), 1_000, 0.0), 0.0)
    assert capacity.count_idle() == 1
    assert capacity.count_idle(frozenset({"b"})) == 0


def test_each_rank_has_its_share_of_the_slots() -> None:
    """An instance is full when all its ranks are, and labels exclude all of them."""
    capacity = ClusterCapacity(0, lambda: 0.0)
    workers = {"a": make_worker("a", ranks=2), "b": make_worker("b")}
    capacity.update_workers(workers, {})
    assert [*capacity.workers] == ["a/0", "a/1", "b"]
    assert (capacity.free_slots, capacity.count_suitable_slots(frozenset({"a"}))) == (8, 4)
    assert (capacity.count_idle(), capacity.count_idle(frozenset({"a"}))) == (3, 1)

    reservations = [Reservation(60, 300.0, 0.0) for _ in range(2)]
    for reservation in reservations:
        capacity.reserve("a/0", reservation, 0.0)
    assert (capacity.free_slots, capacity.full_workers) == (6, {"a/0"})
    busy = Load(running=2)
    for _ in range(3):
        capacity.on_load_report("a", replace(sum_loads([busy, busy]), ranks=(busy, busy)), 0.0)
    assert (capacity.free_slots, capacity.full_workers) == (4, {"a/0", "a/1", "a"})
    capacity.release("a/0", reservations[0], 0.0)
    assert capacity.full_workers == {"a/1"}
    capacity.max_worker_requests = 2
    capacity.update_workers(workers, {})
    assert (capacity.free_slots, capacity.full_workers) == (2, {"a/0", "a/1", "a"})
    capacity.update_workers({"b": workers["b"]}, {})
    assert (capacity.free_slots, capacity.full_workers) == (2, frozenset())


def test_a_removed_worker_has_no_slots() -> None:
    capacity = ClusterCapacity(0, lambda: 0.0)
    capacity.update_workers({"a": make_worker("a"), "b": make_worker("b", seqs=1)}, {})
    reservation = Reservation(60, 300.0, 0.0)
    capacity.reserve("b", reservation, 0.0)
    assert (capacity.free_slots, capacity.count_idle(), capacity.full_workers) == (
        4,
        1,
        frozenset({"b"}),
    )
    capacity.update_workers({"a": make_worker("a")}, {})
    assert (capacity.free_slots, capacity.count_idle(), capacity.full_workers) == (
        4,
        1,
        frozenset(),
    )
    capacity.release("b", reservation, 1.0)
    assert [*capacity.workers] == ["a"]
    capacity.on_load_report("b", Load(), 1.0)
    capacity.reserve("c", reservation, 1.0)  # not announced yet
    assert capacity.free_slots == 4


def test_the_predicted_wait_for_a_slot() -> None:
    now = [0.0]
    capacity = ClusterCapacity(0, lambda: now[0])
    capacity.update_workers({"a": make_worker("a", seqs=2)}, {})
    for _ in range(5):
        capacity.durations.observe(60, 1.0)
    capacity.reserve("a", Reservation(60, 300.0, 0.0), 0.0)
    now[0] = 0.5
    capacity.reserve("a", Reservation(60, 300.0, 0.5), 0.5)
    waits = [capacity.predict_wait_s(ahead, 60) for ahead in range(4)]
    assert waits == pytest.approx([0.5, 1.0, 1.5, 2.0])
    capacity.assign_next_slot(60)
    assert capacity.predict_wait_s(0, 60) == pytest.approx(1.0)


def test_the_dequeue_rate() -> None:
    rate = DequeueRate()
    assert rate.predict_wait_s(3) == 0.0
    rate.record_dequeue(0.0, 5)
    rate.record_dequeue(0.5, 4)
    rate.record_dequeue(1.0, 0)
    rate.record_dequeue(60.0, 1)  # no request waited in between
    rate.record_dequeue(60.5, 1)
    assert rate.predict_wait_s(3) == pytest.approx(2.0)


def test_a_worker_with_full_memory_has_no_slot() -> None:
    now = [0.0]
    capacity = ClusterCapacity(0, lambda: now[0])
    capacity.update_workers({"a": make_worker("a")}, {})
    capacity.reserve("a", Reservation(60, 300.0, 0.0), 0.0)
    full = Load(running=1, waiting=1, active_blocks=60, total_blocks=64)
    capacity.on_load_report("a", full, 0.1)
    assert (capacity.free_slots, capacity.full_workers) == (0, frozenset({"a"}))
    capacity.on_load_report("a", Load(running=1, active_blocks=60, total_blocks=64), 0.2)
    assert capacity.free_slots > 0  # no request waits for memory there
    capacity.on_load_report("a", full, 0.3)
    now[0] = 2.0  # no report since 0.4 s
    capacity.refresh()
    assert capacity.free_slots > 0

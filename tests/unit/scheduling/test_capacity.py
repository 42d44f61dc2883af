"""Capacity and its predictions: durations and foreign requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.invariants import check_ledger
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
from dynamo.scheduling.admission.capacity import ClusterCapacity
from dynamo.scheduling.workers.durations import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_TPOT_S,
    DurationHistogram,
    DurationModel,
)
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
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


class FakeLedger(Ledger):
    """A ledger with the given workers, whose requests reserve slots of `capacity`."""

    def __init__(self, **workers: Instance) -> None:
        self.now = 0.0
        clock: Any = SimpleNamespace(now=lambda: self.now)
        super().__init__(clock)
        self.capacity = ClusterCapacity(self.workers, 0, clock.now)
        self.on_placed.append(lambda placed: self.capacity.reserve(placed, self.now))
        self.on_ended.append(lambda placed, _: self.capacity.release(placed, self.now))
        self.set_workers(**workers)

    def set_workers(self, **workers: Instance) -> None:
        self.workers.update_instances(workers)
        self.capacity.update_workers()

    def send(self, name: str, tokens: int = 270) -> PlacedRequest:
        worker, key = self.workers[name], f"r{len(self.requests)}/{self.now}"
        return self.place(key, worker, Prompt(tokens, ()), new_tokens=tokens, max_tokens=60)

    def report(self, instance: str, load: Load, at_s: float) -> None:
        self.on_load_report(instance, load, at_s)
        self.capacity.recount(instance, at_s)


def test_requests_of_other_frontends_last_as_long_as_ours() -> None:
    ledger = FakeLedger(a=make_worker("a"))
    capacity = ledger.capacity
    for _ in range(9):
        capacity.durations.observe(32_000, 3.0)
    for at_s in (0.1, 0.2):
        ledger.report("a", Load(running=4, waiting=3), at_s)
    ledger.now = 0.2
    waits = [capacity.predict_wait_s(ahead, 32_000) for ahead in range(7)]
    assert waits == pytest.approx([3.0 * rank / 7 for rank in range(1, 8)])


def test_requests_of_other_frontends_occupy_slots() -> None:
    ledger = FakeLedger(a=make_worker("a"))
    capacity = ledger.capacity
    first, _ = ledger.send("a"), ledger.send("a")
    assert (capacity.free_slots, capacity.has_foreign_requests) == (2, False)
    ledger.end(first, None)
    ledger.report("a", Load(running=2, active_blocks=10, total_blocks=64), 0.1)
    assert (capacity.free_slots, capacity.has_foreign_requests) == (
        3,
        False,
    )  # our released request may be in the report
    ledger.report("a", Load(running=4, active_blocks=20, total_blocks=64), 0.2)
    assert (capacity.free_slots, capacity.has_foreign_requests) == (1, True)
    ledger.report("a", Load(running=4, waiting=3), 0.3)
    ledger.report("a", Load(running=4, waiting=3), 0.4)
    assert (capacity.free_slots, capacity.full_workers) == (0, frozenset({"a"}))
    ledger.now = 2.0  # no report since 0.4 s
    capacity.refresh()
    assert (capacity.free_slots, capacity.full_workers, capacity.has_foreign_requests) == (
        3,
        frozenset(),
        False,
    )


def test_a_worker_that_computes_a_prompt_for_another_is_not_idle() -> None:
    ledger = FakeLedger(a=make_worker("a"), b=make_worker("b"), c=make_worker("c"))
    ledger.models_prompts = True
    capacity, workers = ledger.capacity, ledger.workers
    assert capacity.count_idle() == 3

    ledger.place("1", workers["c"], Prompt(1_000, ()), workers["a"], new_tokens=1_000)
    check_ledger(ledger)
    assert capacity.count_idle() == 1
    assert capacity.count_idle(frozenset({"b"})) == 0


def test_each_rank_has_its_share_of_the_slots() -> None:
    """An instance is full when all its ranks are, and labels exclude all of them."""
    workers = {"a": make_worker("a", ranks=2), "b": make_worker("b")}
    ledger = FakeLedger(**workers)
    capacity = ledger.capacity
    assert [worker.name for worker in capacity.workers] == ["a/0", "a/1", "b"]
    assert (capacity.free_slots, capacity.count_suitable_slots(frozenset({"a"}))) == (8, 4)
    assert (capacity.count_idle(), capacity.count_idle(frozenset({"a"}))) == (3, 1)

    first, _ = ledger.send("a/0"), ledger.send("a/0")
    assert (capacity.free_slots, capacity.full_workers) == (6, {"a/0"})
    busy = Load(running=2)
    for _ in range(3):
        ledger.report("a", replace(sum_loads([busy, busy]), ranks=(busy, busy)), 0.0)
    assert (capacity.free_slots, capacity.full_workers) == (4, {"a/0", "a/1", "a"})
    ledger.end(first, None)
    assert capacity.full_workers == {"a/1"}
    capacity.max_worker_requests = 2
    capacity.update_workers()
    assert (capacity.free_slots, capacity.full_workers) == (2, {"a/0", "a/1", "a"})
    ledger.set_workers(b=workers["b"])
    assert (capacity.free_slots, capacity.full_workers) == (2, frozenset())
    check_ledger(ledger)


def test_a_removed_worker_has_no_slots() -> None:
    workers = {"a": make_worker("a"), "b": make_worker("b", seqs=1)}
    ledger = FakeLedger(**workers)
    capacity, worker = ledger.capacity, ledger.workers["b"]
    placed = ledger.send("b")
    assert (capacity.free_slots, capacity.count_idle(), capacity.full_workers) == (
        4,
        1,
        frozenset({"b"}),
    )
    ledger.set_workers(a=workers["a"])
    assert (capacity.free_slots, capacity.count_idle(), capacity.full_workers) == (
        4,
        1,
        frozenset(),
    )
    ledger.set_workers(**workers)  # the worker comes back with its request
    assert capacity.full_workers == {"b"}
    assert ledger.workers["b"] is worker
    ledger.set_workers(a=workers["a"])
    ledger.end(placed, None)
    assert [worker.name for worker in ledger.workers.all()] == ["a"]
    ledger.report("b", Load(), 1.0)
    unknown = ledger.workers.at(make_worker("c"), None)  # not announced yet
    placed = ledger.place("c", unknown, Prompt(5, ()), new_tokens=5)
    assert capacity.free_slots == 4
    check_ledger(ledger)
    ledger.end(placed, None)
    assert [worker.name for worker in ledger.workers.all()] == ["a"]


def test_the_predicted_wait_for_a_slot() -> None:
    ledger = FakeLedger(a=make_worker("a", seqs=2))
    capacity = ledger.capacity
    for _ in range(5):
        capacity.durations.observe(60, 1.0)
    ledger.send("a")
    ledger.now = 0.5
    ledger.send("a")
    waits = [capacity.predict_wait_s(ahead, 60) for ahead in range(4)]
    assert waits == pytest.approx([0.5, 1.0, 1.5, 2.0])
    capacity.assign_next_slot(60)
    assert capacity.predict_wait_s(0, 60) == pytest.approx(1.0)


def test_a_worker_with_full_memory_has_no_slot() -> None:
    ledger = FakeLedger(a=make_worker("a"))
    capacity = ledger.capacity
    ledger.send("a")
    full = Load(running=1, waiting=1, active_blocks=60, total_blocks=64)
    ledger.report("a", full, 0.1)
    assert (capacity.free_slots, capacity.full_workers) == (0, frozenset({"a"}))
    ledger.report("a", Load(running=1, active_blocks=60, total_blocks=64), 0.2)
    assert capacity.free_slots > 0  # no request waits for memory there
    ledger.report("a", full, 0.3)
    ledger.now = 2.0  # no report since 0.4 s
    capacity.refresh()
    assert capacity.free_slots > 0

"""What admission learns: how long places are kept, and what others have of a worker's."""

from __future__ import annotations

import msgspec
import pytest

from dynamo.core.values import EngineInfo, Load
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission.capacity import ClusterCapacity, Reservation
from dynamo.scheduling.admission.durations import DequeueRate, DurationHistogram, DurationModel


def test_what_is_left_of_a_duration() -> None:
    spread = DurationHistogram()
    for _ in range(100):
        spread.observe(1.4)
    assert spread.estimate_remaining_s(0.0) == pytest.approx(1.4)
    assert spread.estimate_remaining_s(1.0) == pytest.approx(0.4)
    assert 0.0 < spread.estimate_remaining_s(1.41) < 0.3
    assert spread.estimate_remaining_s(4.0) == pytest.approx(1.0)  # longer than anything before


def test_the_longer_it_lasts_the_longer_it_will() -> None:
    spread = DurationHistogram()
    for _ in range(50):
        spread.observe(0.1)
        spread.observe(10.0)
    assert spread.estimate_remaining_s(0.0) == pytest.approx(5.05, rel=0.05)
    assert spread.estimate_remaining_s(1.0) == pytest.approx(9.0)


def test_the_old_is_forgotten() -> None:
    spread = DurationHistogram()
    for seconds in [1.0] * 300 + [3.0] * 300:
        spread.observe(seconds)
    assert spread.estimate_remaining_s(0.0) == pytest.approx(3.0, rel=0.05)
    for _ in range(30_000):
        spread.observe(3.0)
    assert spread.estimate_remaining_s(0.0) == pytest.approx(3.0)


def test_a_bound_is_a_kind_of_its_own() -> None:
    durations = DurationModel()
    assert durations.predict_remaining_s(100, 0.0) == pytest.approx(1.0)  # half of it, 20 ms each
    assert durations.predict_remaining_s(100, 8.0) == pytest.approx(2.0)
    for _ in range(10):
        durations.observe(60, 1.4)
        durations.observe(1000, 9.0)
        durations.observe_output(60, 60, 1.4)
    assert durations.predict_remaining_s(60, 0.0) == pytest.approx(1.4)
    assert durations.predict_remaining_s(1000, 0.0) == pytest.approx(9.0)
    assert (
        8.0 < durations.predict_remaining_s(10_000, 0.0) < 10.0
    )  # they filled their bounds; 512 at most
    assert durations.predict_output_tokens(60) == pytest.approx(60)
    assert durations.predict_output_tokens(9) == 9


def worker(name: str, seqs: int = 4, blocks: int = 64) -> Instance:
    info = EngineInfo("mock", 64, blocks, 4096, seqs, 8192)
    capabilities = {"engine": msgspec.to_builtins(info)}
    return Instance(
        id=name,
        address="memory://a",
        namespace="n",
        component="worker",
        endpoint="generate",
        capabilities=capabilities,
    )


def test_places_that_others_have() -> None:
    now = [0.0]
    places = ClusterCapacity(0, lambda: now[0])
    places.update_workers({"a": worker("a")}, {})
    mine = [Reservation(60, 300.0, 0.0) for _ in range(2)]
    for held in mine:
        places.reserve("a", held, 0.0)
    assert (places.free_slots, places.has_foreign_requests) == (2, False)
    places.release("a", mine[0], 0.05)
    places.on_load_report("a", Load(running=2, active_blocks=10, total_blocks=64), 0.1)
    assert (places.free_slots, places.has_foreign_requests) == (
        3,
        False,
    )  # one of the two has left since
    places.on_load_report("a", Load(running=4, active_blocks=20, total_blocks=64), 0.2)
    assert (places.free_slots, places.has_foreign_requests) == (1, True)
    places.on_load_report("a", Load(running=4, waiting=3), 0.3)
    places.on_load_report("a", Load(running=4, waiting=3), 0.4)
    assert (places.free_slots, places.full_workers) == (0, frozenset({"a"}))
    now[0] = 2.0  # it has said nothing since
    places.refresh()
    assert (places.free_slots, places.full_workers, places.has_foreign_requests) == (
        3,
        frozenset(),
        False,
    )


def test_a_worker_that_left_has_no_places() -> None:
    places = ClusterCapacity(0, lambda: 0.0)
    places.update_workers({"a": worker("a"), "b": worker("b", seqs=1)}, {})
    held = Reservation(60, 300.0, 0.0)
    places.reserve("b", held, 0.0)
    assert (places.free_slots, places.idle_workers, places.full_workers) == (4, 1, frozenset({"b"}))
    places.update_workers({"a": worker("a")}, {})
    assert (places.free_slots, places.idle_workers, places.full_workers) == (4, 1, frozenset())
    places.release("b", held, 1.0)
    assert [*places.workers] == ["a"]
    places.on_load_report("b", Load(), 1.0)
    places.reserve("c", held, 1.0)  # who is not announced yet
    assert places.free_slots == 4


def test_when_a_place_will_be_free() -> None:
    now = [0.0]
    places = ClusterCapacity(0, lambda: now[0])
    places.update_workers({"a": worker("a", seqs=2)}, {})
    for _ in range(5):
        places.durations.observe(60, 1.0)
    places.reserve("a", Reservation(60, 300.0, 0.0), 0.0)
    now[0] = 0.5
    places.reserve("a", Reservation(60, 300.0, 0.5), 0.5)
    waits = [places.predict_wait_s(ahead, 60) for ahead in range(4)]
    assert waits == pytest.approx([0.5, 1.0, 1.5, 2.0])
    places.assign_next_slot(60)
    assert places.predict_wait_s(0, 60) == pytest.approx(1.0)


def test_the_pace_of_turns() -> None:
    turns = DequeueRate()
    assert turns.predict_wait_s(3) == 0.0
    turns.record_dequeue(0.0, 5)
    turns.record_dequeue(0.5, 4)
    turns.record_dequeue(1.0, 0)
    turns.record_dequeue(60.0, 1)  # nobody waited in between
    turns.record_dequeue(60.5, 1)
    assert turns.predict_wait_s(3) == pytest.approx(2.0)


def test_a_worker_whose_memory_is_full_has_no_place() -> None:
    now = [0.0]
    places = ClusterCapacity(0, lambda: now[0])
    places.update_workers({"a": worker("a")}, {})
    places.reserve("a", Reservation(60, 300.0, 0.0), 0.0)
    full = Load(running=1, waiting=1, active_blocks=60, total_blocks=64)
    places.on_load_report("a", full, 0.1)
    assert (places.free_slots, places.full_workers) == (0, frozenset({"a"}))
    places.on_load_report("a", Load(running=1, active_blocks=60, total_blocks=64), 0.2)
    assert places.free_slots > 0  # nobody waits there for memory
    places.on_load_report("a", full, 0.3)
    now[0] = 2.0  # it has said nothing since
    places.refresh()
    assert places.free_slots > 0

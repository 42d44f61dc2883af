"""The router's model of one worker: pending prompts, tokens, memory and sequence slots."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.router.fake_cluster import ENGINE, FakeCluster, instance

from dynamo.core.values import Load
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import REFRESH_INTERVAL_S, STALL_HALVING_TOKENS, WorkerState

CAPACITY = int(str(ENGINE["num_blocks"])) * int(str(ENGINE["block_tokens"]))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(1)


@pytest.fixture
def worker(cluster: FakeCluster) -> WorkerState:
    return cluster.worker_states["a"]


def place(
    cluster: FakeCluster, worker: WorkerState, tokens: int, name: str = "one"
) -> PlacedRequest:
    return cluster.ledger.place(name, worker, Prompt(tokens, ()), new_tokens=tokens)


def pending_load(worker: WorkerState) -> tuple[int, int, int]:
    return worker.pending_prefills, worker.pending_prefill_tokens, len(worker.active)


def test_a_prompt_is_pending_until_its_first_token_and_active_until_its_end(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    first, other = place(cluster, worker, 100), place(cluster, worker, 300, "other")
    assert pending_load(worker) == (2, 400, 2)
    for _ in range(2):
        cluster.first_token(first)
        assert pending_load(worker) == (1, 300, 2)
    for request in (first, other, first, other):
        cluster.end(request)
        cluster.first_token(request)
    assert pending_load(worker) == (0, 0, 0)
    assert worker.decode_context_tokens == 0
    assert worker.stall_sensitivity == pytest.approx(0.0)


def test_prefill_free_s_is_the_expected_first_token_of_the_last_prompt(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    took_s = worker.predict_prefill_ms(1_000) / 1e3
    first = place(cluster, worker, 1_000)
    assert worker.prefill_free_s == pytest.approx(cluster.now + took_s)
    assert first.expected_first_token_s == pytest.approx(worker.prefill_free_s)
    last = place(cluster, worker, 1_000, "last")
    assert worker.prefill_free_s == pytest.approx(cluster.now + 2 * took_s)
    assert worker.backlog_ms(cluster.now) == pytest.approx(2e3 * took_s)
    cluster.end(first)
    cluster.first_token(last)
    assert (worker.prefill_free_s, worker.backlog_ms(cluster.now)) == (cluster.now, 0.0)


def test_a_late_prefill_counts_for_as_long_again_as_it_is_late(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    place(cluster, worker, 1_000)
    assert worker.backlog_ms(worker.prefill_free_s + 2.0) == pytest.approx(2_000.0)


def test_a_late_first_token_moves_the_expected_time_of_the_others(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    first, _ = place(cluster, worker, 1_000), place(cluster, worker, 500, "other")
    late = worker.prefill_free_s + 5.0
    cluster.first_token(first, late)
    assert worker.prefill_free_s == pytest.approx(late + worker.predict_prefill_ms(500) / 1e3)


def test_steps_shared_with_pending_prompts_are_counted_once(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    for number in range(4):
        place(cluster, worker, 100, f"before{number}")
    last = place(cluster, worker, 100, "last")
    together_ms = worker.predict_prefill_ms(400) + worker.predict_prefill_ms(100)
    assert last.expected_first_token_s == pytest.approx(cluster.now + together_ms / 1e3)
    assert last.expected_first_token_s < worker.prefill_free_s


def test_context_and_stall_sensitivity_follow_the_answers(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    decodes, waits = place(cluster, worker, 100), place(cluster, worker, 300, "waits")
    cluster.first_token(decodes)
    assert worker.decode_context_tokens == 100
    decodes.emitted = 30
    cluster.now += 1
    worker.refresh(cluster.now)
    assert worker.decode_context_tokens == 130
    assert worker.stall_sensitivity == pytest.approx(
        1 / (30 + STALL_HALVING_TOKENS) + 1 / STALL_HALVING_TOKENS
    )
    decodes.emitted = 60
    worker.refresh(cluster.now + REFRESH_INTERVAL_S / 2)
    assert worker.decode_context_tokens == 130
    worker.refresh(cluster.now + 1.01 * REFRESH_INTERVAL_S)
    assert worker.decode_context_tokens == 160
    cluster.end(decodes)
    assert worker.decode_context_tokens == 0
    assert worker.stall_sensitivity == pytest.approx(1 / STALL_HALVING_TOKENS)
    cluster.end(waits)
    assert worker.stall_sensitivity == pytest.approx(0.0)


def test_tokens_found_in_the_cache_are_not_pending(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    first, other = place(cluster, worker, 1_000), place(cluster, worker, 100, "other")
    worker.on_cached_tokens(first, 600)
    assert (first.new_tokens, worker.pending_prefill_tokens) == (400, 500)
    worker.on_cached_tokens(first, 600)
    assert (first.new_tokens, worker.pending_prefill_tokens) == (1, 101)
    cluster.first_token(other)
    worker.on_cached_tokens(other, 50)
    cluster.end(first)
    worker.on_cached_tokens(first, 1)
    assert worker.pending_prefill_tokens == 0


def test_external_load_is_the_report_less_own_requests(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    place(cluster, worker, 1_000)
    worker.on_load_report(Load(running=3, waiting=2, prefill_tokens=1_700))
    assert worker.external_prefill_tokens == 700
    worker.on_load_report(Load(running=0, waiting=0, prefill_tokens=300))
    assert worker.external_prefill_tokens == 0


def test_kv_usage_is_the_report_plus_pending_prompts(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    first = place(cluster, worker, CAPACITY // 4)
    assert worker.kv_cache_usage() == pytest.approx(0.25)
    cluster.first_token(first)
    assert worker.kv_cache_usage() == pytest.approx(0.25)
    worker.on_load_report(Load(active_blocks=50, total_blocks=100))
    assert worker.kv_cache_usage() == pytest.approx(0.5)
    place(cluster, worker, CAPACITY // 8, "other")
    assert worker.kv_cache_usage() == pytest.approx(0.625)
    place(cluster, worker, CAPACITY, "third")
    assert worker.kv_cache_usage() == 1.0


def test_load_factor_is_the_larger_share_of_step_tokens_or_slots(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    assert worker.load_factor() == 0.0
    first = place(cluster, worker, worker.token_budget // 2)
    assert worker.load_factor() == pytest.approx(0.5)
    cluster.first_token(first)
    assert worker.load_factor() == pytest.approx(0.01)
    for number in range(74):
        place(cluster, worker, 1, f"r{number}")
    assert worker.load_factor() == pytest.approx(0.75)
    place(cluster, worker, 3 * worker.token_budget, "long")
    assert worker.load_factor() == 1.0


def test_a_peers_request_counts_and_does_not_update_the_model(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    before = (
        worker.latency_model.prefill.observation_count,
        worker.latency_model.decode.observation_count,
    )
    cluster.ledger.place(
        "foreign", worker, Prompt(100, ()), new_tokens=100, peer="peer", emitted=40
    )
    foreign = cluster.ledger.peers["peer"]["foreign"]
    worker.refresh(cluster.now)
    assert (worker.decode_context_tokens, worker.pending_prefills) == (140, 0)
    foreign.emitted = 100
    cluster.now += 3
    cluster.end(foreign)
    assert (worker.decode_context_tokens, len(worker.active)) == (0, 0)
    assert (
        worker.latency_model.prefill.observation_count,
        worker.latency_model.decode.observation_count,
    ) == before


def test_a_worker_without_engine_info_has_default_limits() -> None:
    silent: Any = instance("a", engine=None)
    cluster = FakeCluster(1)
    cluster.worker_states.update_instances({"quiet": silent})
    worker = cluster.worker_states["quiet"]
    request = place(cluster, worker, 10_000)
    assert worker.prefill_free_s > cluster.now
    assert worker.kv_cache_usage() == 0.0
    assert worker.load_factor() == 1.0
    cluster.first_token(request, cluster.now + 1)
    cluster.end(request, cluster.now + 2)
    assert pending_load(worker) == (0, 0, 0)


def run_answer(
    cluster: FakeCluster,
    worker: WorkerState,
    tokens: int,
    step_s: float,
    pause_s: float = 0.0,
    name: str = "one",
) -> None:
    """Run a short prompt with `tokens` output tokens, one each `step_s`, and an optional pause."""
    request = place(cluster, worker, 16, name)
    cluster.now += 0.02
    cluster.first_token(request)
    if pause_s:
        other = place(cluster, worker, 4_000, "between")
        before = worker.total_prefill_ms
        cluster.now += pause_s
        cluster.first_token(other)
        cluster.end(other)
        pause_s = (worker.total_prefill_ms - before) / 1e3
    cluster.now = (request.first_token_s or 0.0) + pause_s + (tokens - 1) * step_s
    request.emitted = tokens
    cluster.end(request)


def test_decode_time_is_learnt_from_whole_answers(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    for number in range(40):
        run_answer(cluster, worker, 101, 0.03, name=f"r{number}")
    assert worker.latency_model.decode.predict(1.0, 117) == pytest.approx(30.0, rel=0.02)


def test_prefills_meanwhile_are_not_decode_time(cluster: FakeCluster, worker: WorkerState) -> None:
    for number in range(10):
        run_answer(cluster, worker, 101, 0.03, pause_s=0.5, name=f"r{number}")
    decode_ms = worker.latency_model.decode.predict(1.0, 117) * worker.slowdown.factor
    assert decode_ms == pytest.approx(30.0, rel=0.05)


def test_fewer_than_eight_tokens_do_not_update_the_model(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    run_answer(cluster, worker, 7, 3.0)
    assert worker.latency_model.decode.observation_count == 0
    run_answer(cluster, worker, 8, 3.0)
    assert worker.latency_model.decode.observation_count == 1


def test_simultaneous_first_tokens_are_one_observation(
    cluster: FakeCluster, worker: WorkerState
) -> None:
    pair = [place(cluster, worker, 1_000, name) for name in ("one", "two")]
    cluster.now += 0.5
    for request in pair:
        cluster.first_token(request)
        cluster.now += 0.0005
    assert worker.latency_model.prefill.observation_count == 1
    assert worker.latency_model.prefill.predict(1.0, 2_000) == pytest.approx(500.0, rel=0.02)
    alone = place(cluster, worker, 2_000, "three")
    cluster.now += 0.5
    cluster.first_token(alone)
    assert worker.latency_model.prefill.observation_count == 2


def test_published_step_times_count_until_answers_tell_them() -> None:
    cluster = FakeCluster(2)
    worker, other = (cluster.worker_states[name] for name in "ab")
    cluster.ledger.on_load_report("a", Load(timing=(10.0, 0.05, 0.2, 1e-4, 1e-6)), cluster.now)
    assert worker.predict_prefill_ms(1_000) == pytest.approx(10 + 50.5)
    assert worker.latency_model.decode.predict(1.0, 2_000) == pytest.approx(10 + 2_000 * 3e-4)
    assert other.latency_model is worker.latency_model, "both are of one kind"

    cluster.ledger.on_load_report("b", Load(timing=(20.0, 0.1, 0.0, 0.0, 0.0)), cluster.now)
    assert other.predict_prefill_ms(1_000) == pytest.approx(20 + 100)
    for number in range(40):
        run_answer(cluster, worker, 101, 0.03, name=f"r{number}")
    learnt_ms = worker.latency_model.decode.predict(1.0, 117)
    assert learnt_ms == pytest.approx(30.0, rel=0.02)
    cluster.ledger.on_load_report("a", Load(timing=(90.0, 9.0, 0.0, 0.0, 0.0)), cluster.now)
    assert worker.latency_model.decode.predict(1.0, 117) == learnt_ms

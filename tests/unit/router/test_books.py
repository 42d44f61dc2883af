"""What a router's book of one worker promises: open prompts, tokens, memory, places."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.router.fake_cluster import ENGINE, FakeCluster, instance

from dynamo.core.values import Load
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.worker_state import (
    REFRESH_INTERVAL_S,
    STALL_HALVING_TOKENS,
    PlacedRequest,
    WorkerState,
)

CAPACITY = int(str(ENGINE["num_blocks"])) * int(str(ENGINE["block_tokens"]))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(1)


@pytest.fixture
def book(cluster: FakeCluster) -> WorkerState:
    return cluster.worker_states["a"]


def placed(
    cluster: FakeCluster, book: WorkerState, tokens: int, name: str = "one"
) -> PlacedRequest:
    active = PlacedRequest(name, book, Prompt(tokens, ()), tokens, cluster.now)
    book.place(active, cluster.now)
    return active


def still_open(book: WorkerState) -> tuple[int, int, int]:
    return book.pending_prefills, book.pending_prefill_tokens, len(book.active)


def test_a_prompt_is_open_until_its_first_token_and_counts_until_its_end(
    cluster: FakeCluster, book: WorkerState
) -> None:
    one, other = placed(cluster, book, 100), placed(cluster, book, 300, "other")
    assert still_open(book) == (2, 400, 2)
    for _ in range(2):
        book.on_first_token(one, cluster.now)
        assert still_open(book) == (1, 300, 2)
    for active in (one, other, one, other):
        book.remove(active, cluster.now)
        book.on_first_token(active, cluster.now)
    assert still_open(book) == (0, 0, 0)
    assert book.decode_context_tokens == 0
    assert book.stall_sensitivity == pytest.approx(0.0)


def test_it_is_free_when_the_last_of_its_prompts_is_expected(
    cluster: FakeCluster, book: WorkerState
) -> None:
    took_s = book.predict_prefill_ms(1_000) / 1e3
    first = placed(cluster, book, 1_000)
    assert book.prefill_free_s == pytest.approx(cluster.now + took_s)
    assert first.expected_first_token_s == pytest.approx(book.prefill_free_s)
    last = placed(cluster, book, 1_000, "last")
    assert book.prefill_free_s == pytest.approx(cluster.now + 2 * took_s)
    assert book.backlog_ms(cluster.now) == pytest.approx(2e3 * took_s)
    book.remove(first, cluster.now)
    book.on_first_token(last, cluster.now)
    assert (book.prefill_free_s, book.backlog_ms(cluster.now)) == (cluster.now, 0.0)


def test_one_that_is_late_takes_as_long_again(cluster: FakeCluster, book: WorkerState) -> None:
    placed(cluster, book, 1_000)
    assert book.backlog_ms(book.prefill_free_s + 2.0) == pytest.approx(2_000.0)


def test_once_one_of_several_came_late_the_others_are_expected_anew(
    cluster: FakeCluster, book: WorkerState
) -> None:
    first, _ = placed(cluster, book, 1_000), placed(cluster, book, 500, "other")
    late = book.prefill_free_s + 5.0
    book.on_first_token(first, late)
    assert book.prefill_free_s == pytest.approx(late + book.predict_prefill_ms(500) / 1e3)


def test_the_steps_that_a_prompt_shares_are_not_waited_for_twice(
    cluster: FakeCluster, book: WorkerState
) -> None:
    for number in range(4):
        placed(cluster, book, 100, f"before{number}")
    last = placed(cluster, book, 100, "last")
    together_ms = book.predict_prefill_ms(400) + book.predict_prefill_ms(100)
    assert last.expected_first_token_s == pytest.approx(cluster.now + together_ms / 1e3)
    assert last.expected_first_token_s < book.prefill_free_s


def test_context_and_youth_follow_the_answers(cluster: FakeCluster, book: WorkerState) -> None:
    decodes, waits = placed(cluster, book, 100), placed(cluster, book, 300, "waits")
    book.on_first_token(decodes, cluster.now)
    assert book.decode_context_tokens == 100
    decodes.emitted = 30
    cluster.now += 1
    book.refresh(cluster.now)
    assert book.decode_context_tokens == 130
    assert book.stall_sensitivity == pytest.approx(
        1 / (30 + STALL_HALVING_TOKENS) + 1 / STALL_HALVING_TOKENS
    )
    decodes.emitted = 60
    book.refresh(cluster.now + REFRESH_INTERVAL_S / 2)
    assert book.decode_context_tokens == 130
    book.refresh(cluster.now + 1.01 * REFRESH_INTERVAL_S)
    assert book.decode_context_tokens == 160
    book.remove(decodes, cluster.now)
    assert book.decode_context_tokens == 0
    assert book.stall_sensitivity == pytest.approx(1 / STALL_HALVING_TOKENS)
    book.remove(waits, cluster.now)
    assert book.stall_sensitivity == pytest.approx(0.0)


def test_what_the_worker_found_in_its_cache_is_not_waited_for(
    cluster: FakeCluster, book: WorkerState
) -> None:
    one, other = placed(cluster, book, 1_000), placed(cluster, book, 100, "other")
    book.on_cached_tokens(one, 600)
    assert (one.new_tokens, book.pending_prefill_tokens) == (400, 500)
    book.on_cached_tokens(one, 600)
    assert (one.new_tokens, book.pending_prefill_tokens) == (1, 101)
    book.on_first_token(other, cluster.now)
    book.on_cached_tokens(other, 50)
    book.remove(one, cluster.now)
    book.on_cached_tokens(one, 1)
    assert book.pending_prefill_tokens == 0


def test_of_a_report_only_what_others_sent_is_new(cluster: FakeCluster, book: WorkerState) -> None:
    placed(cluster, book, 1_000)
    book.on_load_report(Load(running=3, waiting=2, prefill_tokens=1_700))
    assert (book.external_prefill_tokens, book.external_requests) == (700, 4)
    book.on_load_report(Load(running=0, waiting=0, prefill_tokens=300))
    assert (book.external_prefill_tokens, book.external_requests) == (0, 0)


def test_memory_is_the_workers_word_and_what_is_still_to_come(
    cluster: FakeCluster, book: WorkerState
) -> None:
    one = placed(cluster, book, CAPACITY // 4)
    assert book.kv_cache_usage() == pytest.approx(0.25)
    book.on_first_token(one, cluster.now)
    assert book.kv_cache_usage() == pytest.approx(0.25)
    book.on_load_report(Load(active_blocks=50, total_blocks=100))
    assert book.kv_cache_usage() == pytest.approx(0.5)
    placed(cluster, book, CAPACITY // 8, "other")
    assert book.kv_cache_usage() == pytest.approx(0.625)
    placed(cluster, book, CAPACITY, "third")
    assert book.kv_cache_usage() == 1.0


def test_load_is_a_steps_tokens_or_the_places_taken(
    cluster: FakeCluster, book: WorkerState
) -> None:
    assert book.load_factor() == 0.0
    first = placed(cluster, book, book.token_budget // 2)
    assert book.load_factor() == pytest.approx(0.5)
    book.on_first_token(first, cluster.now)
    assert book.load_factor() == pytest.approx(0.01)
    for number in range(74):
        placed(cluster, book, 1, f"r{number}")
    assert book.load_factor() == pytest.approx(0.75)
    placed(cluster, book, 3 * book.token_budget, "long")
    assert book.load_factor() == 1.0


def test_what_another_router_sent_counts_and_teaches_nothing(
    cluster: FakeCluster, book: WorkerState
) -> None:
    before = (
        book.latency_model.prefill.observation_count,
        book.latency_model.decode.observation_count,
    )
    theirs = PlacedRequest("theirs", book, Prompt(100, ()), 100, cluster.now)
    book.add_decoding(theirs, 40, cluster.now)
    book.refresh(cluster.now)
    assert (book.decode_context_tokens, book.pending_prefills) == (140, 0)
    theirs.emitted = 100
    cluster.now += 3
    book.remove(theirs, cluster.now)
    assert (book.decode_context_tokens, len(book.active)) == (0, 0)
    assert (
        book.latency_model.prefill.observation_count,
        book.latency_model.decode.observation_count,
    ) == before


def test_a_worker_that_tells_nothing_of_itself_is_reckoned_with() -> None:
    silent: Any = instance("a", engine=None)
    cluster = FakeCluster(1)
    cluster.worker_states.update_instances({"quiet": silent})
    book = cluster.worker_states["quiet"]
    active = placed(cluster, book, 10_000)
    assert book.prefill_free_s > cluster.now
    assert book.kv_cache_usage() == 0.0
    assert book.load_factor() == 1.0
    book.on_first_token(active, cluster.now + 1)
    book.remove(active, cluster.now + 2)
    assert still_open(book) == (0, 0, 0)


def answered(
    cluster: FakeCluster,
    book: WorkerState,
    tokens: int,
    step_s: float,
    pause_s: float = 0.0,
    name: str = "one",
) -> None:
    """A short prompt, then `tokens` at one each `step_s`, with a pause between."""
    active = placed(cluster, book, 16, name)
    cluster.now += 0.02
    book.on_first_token(active, cluster.now)
    if pause_s:
        other = placed(cluster, book, 4_000, "between")
        before = book.total_prefill_ms
        cluster.now += pause_s
        book.on_first_token(other, cluster.now)
        book.remove(other, cluster.now)
        pause_s = (book.total_prefill_ms - before) / 1e3
    cluster.now = (active.first_token_s or 0.0) + pause_s + (tokens - 1) * step_s
    active.emitted = tokens
    book.remove(active, cluster.now)


def test_a_step_of_decoding_is_learnt_from_whole_answers(
    cluster: FakeCluster, book: WorkerState
) -> None:
    for number in range(40):
        answered(cluster, book, 101, 0.03, name=f"r{number}")
    assert book.latency_model.decode.predict(1.0, 117) == pytest.approx(30.0, rel=0.02)


def test_what_prefills_took_meanwhile_is_not_its_own(
    cluster: FakeCluster, book: WorkerState
) -> None:
    for number in range(10):
        answered(cluster, book, 101, 0.03, pause_s=0.5, name=f"r{number}")
    found = book.latency_model.decode.predict(1.0, 117) * book.slowdown.factor
    assert found == pytest.approx(30.0, rel=0.05)


def test_a_few_tokens_teach_nothing(cluster: FakeCluster, book: WorkerState) -> None:
    answered(cluster, book, 7, 3.0)
    assert book.latency_model.decode.observation_count == 0
    answered(cluster, book, 8, 3.0)
    assert book.latency_model.decode.observation_count == 1


def test_first_tokens_that_come_together_are_one_observation(
    cluster: FakeCluster, book: WorkerState
) -> None:
    pair = [placed(cluster, book, 1_000, name) for name in ("one", "two")]
    cluster.now += 0.5
    for active in pair:
        book.on_first_token(active, cluster.now)
        cluster.now += 0.0005
    assert book.latency_model.prefill.observation_count == 1
    assert book.latency_model.prefill.predict(1.0, 2_000) == pytest.approx(500.0, rel=0.02)
    alone = placed(cluster, book, 2_000, "three")
    cluster.now += 0.5
    book.on_first_token(alone, cluster.now)
    assert book.latency_model.prefill.observation_count == 2

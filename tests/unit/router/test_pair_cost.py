"""The cost of pairs: who computes a prompt, and who its answer."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import pytest
from tests.support.invariants import check_ledger
from tests.unit.router.fake_cluster import BLOCK, ENGINE, FakeCluster, instance

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.core.values import Load
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.router.costs.pair_price import HarmPrice, answer_cost, answer_price
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.prompt import Prompt

ROLES = {"p": ["prefill"], "d": ["decode"], "b": ["prefill", "decode"]}


def make_cluster(names: list[str], **settings: Any) -> FakeCluster:
    """A cluster whose workers have the roles that their names begin with."""
    cluster = FakeCluster(1, cost=PairCost(DisaggregationSettings(**settings)))
    engines = {name: ENGINE | {"roles": ROLES[name[0]]} for name in names}
    cluster.worker_states.update_instances(
        {name: instance(name, engine=engine) for name, engine in engines.items()}
    )
    return cluster


def pair_of(cluster: FakeCluster, request: PendingRequest) -> tuple[str, str]:
    workers = cluster.worker_states.workers
    matrix = cluster.solver.cost.build_matrix(workers, cluster.now)
    row = matrix.row(request)
    best = row.index(min(row))
    return workers[best].name, workers[matrix.decode_index(request, best)].name


def test_with_always_every_prompt_is_computed_by_a_prefill_worker() -> None:
    cluster = make_cluster(["p1", "d1", "d2"], mode="always")

    assert pair_of(cluster, cluster.make_request(10))[0] == "p1"
    assert pair_of(cluster, cluster.make_request(9_000))[0] == "p1"


def test_without_a_prefill_worker_decode_workers_compute_prompts() -> None:
    cluster = make_cluster(["d1", "d2"], mode="always")
    prefill, decode = pair_of(cluster, cluster.make_request(5_000))

    assert prefill == decode


def test_without_a_decode_worker_every_pair_is_impossible() -> None:
    cluster = make_cluster(["p1", "p2"], mode="always")
    matrix = cluster.solver.cost.build_matrix(cluster.worker_states.workers, cluster.now)

    assert matrix.row(cluster.make_request(100)) == [inf, inf]


@pytest.mark.parametrize(
    ("tokens", "cached_blocks", "pending", "remote"),
    [(513, 0, 9, True), (512, 0, 0, False), (544, 2, 0, False), (5_000, 0, 10, False)],
)
def test_thresholds_compare_uncached_tokens_and_pending_prompts(
    tokens: int, cached_blocks: int, pending: int, remote: bool
) -> None:
    cluster = make_cluster(["p1", "d1"], mode="thresholds")
    for _ in range(pending):
        cluster.add_prefill("p1", 100)
    request = cluster.make_request(tokens, range(tokens // BLOCK))
    request.overlaps = {"d1": cached_blocks}

    assert pair_of(cluster, request) == (("p1", "d1") if remote else ("d1", "d1"))


def test_predicted_computes_a_cached_prompt_where_it_is_cached() -> None:
    cluster = make_cluster(["p1", "d1", "d2"], mode="predicted")
    hashes = range(4_000 // BLOCK)
    request = cluster.make_request(4_010, hashes)
    request.overlaps = {"d2": len(hashes)}
    cluster.add_prefill("p1", 8_000)

    assert pair_of(cluster, request) == ("d2", "d2")


def test_predicted_spares_answers_that_are_written() -> None:
    cluster = make_cluster(["p1", "d1"], mode="predicted")
    for _ in range(4):
        placed = cluster.add_prefill("d1", 100)
        cluster.first_token(placed, cluster.now + 0.02)

    assert pair_of(cluster, cluster.make_request(4_000)) == ("p1", "d1")


def test_flexible_workers_split_only_where_that_costs_less() -> None:
    cluster = make_cluster(["b1", "b2"], mode="flexible")
    idle = pair_of(cluster, cluster.make_request(1_000))
    assert idle[0] == idle[1]

    for name in ("b1", "b2"):
        placed = cluster.add_prefill(name, 200)
        cluster.first_token(placed, cluster.now + 0.02)
    cluster.add_prefill("b1", 8_000)
    assert pair_of(cluster, cluster.make_request(4_000))[1] == "b2"


def test_a_prompt_harms_answers_only_at_workers_that_write_some() -> None:
    cluster = make_cluster(["p1", "b1", "d1"], mode="flexible")
    for name in ("p1", "b1"):
        cluster.add_prefill(name, 100)
    request = cluster.make_request(4_000)
    matrix = cluster.solver.cost.build_matrix(cluster.worker_states.workers, cluster.now)
    table = matrix.candidate_table(request, matrix.row(request), 0)()
    harms = {candidate.worker: candidate.terms["harm"] for candidate in table}

    assert harms["p1"] == 0
    assert harms["b1"] > 0


def test_decode_workers_with_full_memory_get_no_answers() -> None:
    cluster = make_cluster(["p1", "d1", "d2"], mode="always")
    full = cluster.worker_states["d1"]
    full.decode_context_tokens = int(full.kv_capacity_tokens)

    assert pair_of(cluster, cluster.make_request(2_000)) == ("p1", "d2")


def test_decode_workers_with_a_full_batch_get_no_answers() -> None:
    cluster = make_cluster(["p1", "d1", "d2"], mode="always")
    full, long = cluster.worker_states["d1"], cluster.worker_states["d2"]
    long.decode_context_tokens = 50_000
    full.max_sequences = 2
    full.arriving["a"] = full.active["b"] = cluster.add_prefill("p1", 100)
    assert pair_of(cluster, cluster.make_request(100)) == ("p1", "d2")

    del full.active["b"]
    assert pair_of(cluster, cluster.make_request(100)) == ("p1", "d1")


def test_a_request_moves_to_its_decode_worker_with_the_first_token() -> None:
    cluster = make_cluster(["p1", "d1"], mode="always")
    prefill, decode = cluster.worker_states["p1"], cluster.worker_states["d1"]
    placed = cluster.ledger.place("r/0/0", decode, Prompt(500, ()), prefill, new_tokens=500)
    assert (list(prefill.active), list(decode.active)) == ([placed.key], [])
    assert decode.arriving_tokens == placed.prompt_tokens
    check_ledger(cluster.ledger)

    cluster.first_token(placed, cluster.now + 0.05)
    assert (list(prefill.active), list(decode.active)) == ([], [placed.key])
    assert decode.arriving_tokens == prefill.decode_context_tokens == 0
    assert placed.worker is decode
    check_ledger(cluster.ledger)

    cluster.end(placed, cluster.now + 0.1)
    assert (prefill.stall_sensitivity, decode.stall_sensitivity) == (0.0, 0.0)
    assert prefill.pending_prefills == decode.pending_prefills == 0


def test_a_pair_that_ends_before_its_first_token_leaves_nothing() -> None:
    cluster = make_cluster(["p1", "d1"], mode="always")
    prefill, decode = cluster.worker_states["p1"], cluster.worker_states["d1"]
    placed = cluster.ledger.place("r/0/0", decode, Prompt(500, ()), prefill, new_tokens=500)

    cluster.end(placed)
    assert prefill.pending_prefill_tokens == decode.arriving_tokens == 0
    assert not prefill.active
    check_ledger(cluster.ledger)


def test_the_solver_places_both_halves_and_forgets_them() -> None:
    cluster = make_cluster(["p1", "p2", "d1", "d2"], mode="always")
    requests = [cluster.submit(3_000, range(100 * n, 100 * n + 187)) for n in range(6)]
    placed = cluster.place()
    pairs = {
        (each.worker.name, str(each.decode_worker and each.decode_worker.name))
        for each in placed.values()
    }

    assert {prefill for prefill, _ in pairs} == {"p1", "p2"}
    assert {decode for _, decode in pairs} == {"d1", "d2"}
    assert cluster.view.open_prefills == 2 * len(placed)

    for number, each in enumerate(placed.values()):
        if number % 2:
            cluster.first_token(each, cluster.now + 0.1)
        cluster.end(each, cluster.now + 0.2)
    for request in requests:
        cluster.solver.cancel(request)
    states = cluster.worker_states.workers
    assert cluster.view.open_prefills == 0
    assert not any(state.active or state.arriving_tokens for state in states)
    assert not any(state.pending_prefills or state.pending_prefill_tokens for state in states)


def test_a_request_that_may_use_no_decode_worker_is_unplaceable() -> None:
    cluster = make_cluster(["p1", "d1"], mode="predicted")
    request = cluster.submit(100, excluded=frozenset({"d1"}))

    assert cluster.solver.pop_unplaceable() == [request]


def test_answers_of_a_dead_decode_worker_are_spread_over_the_others() -> None:
    cluster = make_cluster(["p1", "p2", "p3", "d1", "d2", "d3"], mode="always")
    for number in range(6):
        cluster.submit(700, range(100 * number, 100 * number + 43), excluded=frozenset({"d1"}))
    placed = cluster.place().values()
    counts = Counter(each.decode_worker.name for each in placed if each.decode_worker)

    assert counts == {"d2": 3, "d3": 3}


@pytest.mark.parametrize(("waiting", "interrupts_answers"), [(1, False), (30, True)])
def test_a_long_queue_makes_a_worker_with_answers_compute_prompts(
    waiting: int, interrupts_answers: bool
) -> None:
    cluster = make_cluster(["b1", "b2"], mode="flexible")
    for _ in range(20):
        placed = cluster.add_prefill("b1", 10)
        cluster.first_token(placed, cluster.now + 0.02)
    cluster.add_prefill("b2", 8_000)
    for number in range(waiting):
        cluster.submit(4_000, range(1_000 * number, 1_000 * number + 250))
    placements = cluster.place().values()

    assert ("b1" in {placed.worker.name for placed in placements}) == interrupts_answers
    assert len(placements) < waiting + interrupts_answers  # the others wait for b2


def test_with_a_target_answers_gather_on_fewer_workers() -> None:
    def cost_of_a_longer_step(itl_slo: float) -> float:
        cluster = make_cluster(["b1"], mode="flexible", itl_slo=itl_slo)
        worker = cluster.worker_states["b1"]
        harm = HarmPrice(1.0, itl_slo)
        short = answer_price(harm, worker, cluster.now)[1]
        worker.decode_context_tokens = 100_000
        return answer_price(harm, worker, cluster.now)[1] - short

    assert 0.0 < cost_of_a_longer_step(25.0) < 0.5 * cost_of_a_longer_step(0.0)


def test_a_transfer_is_priced_by_block_size_and_learnt_rate() -> None:
    """Sixteen tokens a block: 2 MiB blocks are 128 KiB a token, the size without a region."""
    cluster = make_cluster(["p1", "d1"], mode="always")
    request = cluster.make_request(4_000)

    def transfer_ms() -> float:
        matrix = cluster.solver.cost.build_matrix(cluster.worker_states.workers, cluster.now)
        return matrix.candidate_table(request, matrix.row(request), 0)()[0].terms["transfer"]

    unknown = transfer_ms()
    engine = ENGINE | {"roles": ["decode"]}
    worker = cluster.worker_states["d1"]
    worker.update_instance(instance("d1", engine=engine, transfer=[{"slot_bytes": 2 << 20}]))
    assert transfer_ms() == pytest.approx(unknown)

    cluster.worker_states.on_load_report("d1", Load(transfer_bytes_per_s=64e9), cluster.now)
    assert transfer_ms() == pytest.approx(unknown / 8)

    worker.update_instance(instance("d1", engine=engine, transfer=[{"slot_bytes": 1 << 20}]))
    assert transfer_ms() == pytest.approx(unknown / 16)


def test_answers_go_to_the_worker_with_the_faster_link() -> None:
    cluster = make_cluster(["p1", "d1", "d2"], mode="always")
    cluster.worker_states.on_load_report("d2", Load(transfer_bytes_per_s=100e9), cluster.now)

    assert pair_of(cluster, cluster.make_request(8_000)) == ("p1", "d2")


@pytest.mark.parametrize(("tokens", "prefill_worker"), [(400, "d1"), (8_000, "p1")])
def test_decode_workers_compute_short_prompts_while_prefill_workers_are_busy(
    tokens: int, prefill_worker: str
) -> None:
    """A long pause costs answers more than several short ones of the same sum."""
    cluster = make_cluster(["p1", "d1"], mode="predicted")
    cluster.add_prefill("p1", 15_000)
    for _ in range(4):
        placed = cluster.add_prefill("d1", 100)
        cluster.first_token(placed, cluster.now + 0.02)

    assert pair_of(cluster, cluster.make_request(tokens))[0] == prefill_worker


def test_an_idle_decode_worker_is_kept_free_for_answers() -> None:
    cluster = make_cluster(["p1", "d1"], mode="predicted")
    cluster.add_prefill("p1", 8_000)

    assert pair_of(cluster, cluster.make_request(8_000)) == ("p1", "d1")


def test_the_terms_of_a_pair_add_up_to_its_cost() -> None:
    cluster = make_cluster(["p1", "d1"], mode="predicted")
    placed = cluster.add_prefill("d1", 100)
    cluster.first_token(placed, cluster.now + 0.02)
    request = cluster.make_request(3_000)
    matrix = cluster.solver.cost.build_matrix(cluster.worker_states.workers, cluster.now)
    row = matrix.row(request)

    for candidate in matrix.candidate_table(request, row, 0)():
        assert sum(candidate.terms.values()) == pytest.approx(candidate.cost)


def test_a_copied_token_costs_what_the_displaced_one_costs_to_compute_again() -> None:
    cluster = make_cluster(["b1"], mode="flexible")
    worker = cluster.worker_states["b1"]

    def copied(asked_share: float) -> float:
        return answer_price(HarmPrice(30.0, asked_share=asked_share), worker, cluster.now)[4]

    idle = copied(0.5) - copied(0.0)
    assert idle > 0.5 * worker.token_ms
    worker.stall_sensitivity = 0.1  # computing it again harms answers
    more = 0.5 * worker.token_ms * 30.0 * 0.1
    assert copied(0.5) - copied(0.0) == pytest.approx(idle + more)


@pytest.mark.parametrize(("mode", "priced"), [("flexible", True), ("predicted", False)])
def test_prompts_that_find_cached_blocks_raise_the_price_of_copies_in_mode_flexible(
    mode: str, priced: bool
) -> None:
    cluster = make_cluster(["b1", "b2"], mode=mode)
    cluster.view.caches["b1"] = set(range(250))
    cluster.submit(4_000, range(250))
    cluster.place()
    cost = cluster.solver.cost
    assert isinstance(cost, PairCost)
    cost.begin_round([], cluster.worker_states.workers, cluster.now)
    cost.build_matrix(cluster.worker_states.workers, cluster.now)

    assert (cost.harm.asked_share > 0.9) == priced
    assert (cost.removed_blocks is not None) == priced


def test_answers_share_the_memory_of_their_common_prefix() -> None:
    cluster = make_cluster(["b1"], mode="flexible")
    worker, harm = cluster.worker_states["b1"], HarmPrice(30.0)
    free = answer_price(harm, worker, cluster.now)[3]
    for number in range(3):
        cluster.submit(
            BLOCK * 110, [*range(100), *range(1_000 * number + 500, 1_000 * number + 510)]
        )
    placed = list(cluster.place().values())
    for each in placed:
        cluster.first_token(each)

    tokens = BLOCK * (100 + 3 * 10)
    assert answer_price(harm, worker, cluster.now)[3] == pytest.approx(free - tokens, abs=10)
    for each in placed:
        cluster.end(each)
    assert worker.shared_tokens == 0


def test_a_full_worker_charges_only_for_blocks_that_it_lacks() -> None:
    price = ("full", 0.0, 0.0, -50_000.0, 0.0)

    assert answer_cost(price, 7_000, 1) == 1.0
    assert answer_cost(price, 7_000, 7_000) == 7_000.0
    assert answer_cost(("free", 0.0, 0.0, 8_000.0, 0.0), 7_000, 7_000) == 0.0

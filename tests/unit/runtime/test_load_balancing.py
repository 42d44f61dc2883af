"""Load balancing: shares, fairness, filters, errors."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from dynamo.core.errors import ConfigError
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.load_balancing import MODES, InstanceLoad, LoadBalancer

requests: Counter[str] = Counter()
"""Requests by instance."""


def balancer_of(*weights: float) -> tuple[LoadBalancer, list[InstanceLoad]]:
    loads = [
        InstanceLoad(
            Instance(
                str(number), f"memory://{number}", "ns", "worker", "generate", {"weight": weight}
            )
        )
        for number, weight in enumerate(weights)
    ]
    requests.clear()
    balancer = LoadBalancer(Random(7), requests.__getitem__)
    balancer.set_candidates(loads)
    return balancer, loads


def pick_counts(
    balancer: LoadBalancer, mode: str, times: int, allowed: set[str] | None = None
) -> Counter[str]:
    return Counter(balancer.pick(mode, allowed).instance.id for _ in range(times))


def test_round_robin_takes_turns() -> None:
    balancer, _ = balancer_of(1, 1, 1)
    order = [balancer.pick("round_robin").instance.id for _ in range(6)]
    assert order[:3] == order[3:]
    assert len(set(order)) == 3


def test_random_spreads_evenly() -> None:
    balancer, _ = balancer_of(1, 1, 1, 1)
    assert all(800 < count < 1200 for count in pick_counts(balancer, "random", 4000).values())


def test_least_loaded_follows_the_calls_in_flight() -> None:
    balancer, loads = balancer_of(1, 1, 1)
    for load in loads[:2]:
        requests[load.instance.id] += 1
    assert pick_counts(balancer, "least_loaded", 5) == {"2": 5}
    requests["2"] += 1
    requests["2"] += 1
    requests["0"] -= 1
    assert pick_counts(balancer, "least_loaded", 5) == {"0": 5}


def test_least_loaded_alternates_between_equals() -> None:
    balancer, _ = balancer_of(1, 1, 1)
    assert pick_counts(balancer, "least_loaded", 9) == {"0": 3, "1": 3, "2": 3}


def test_power_of_two_avoids_the_busiest() -> None:
    balancer, _ = balancer_of(1, 1, 1, 1)
    for _ in range(50):
        requests["1"] += 1
    counts = pick_counts(balancer, "power_of_two", 3000)
    assert counts["1"] == 0
    assert all(count > 700 for name, count in counts.items() if name != "1")


@pytest.mark.parametrize("mode", MODES)
def test_a_single_candidate_is_always_picked(mode: str) -> None:
    balancer, _ = balancer_of(1)
    assert pick_counts(balancer, mode, 3) == {"0": 3}


def test_weights_are_shares_and_picks_are_spread() -> None:
    balancer, _ = balancer_of(5, 1, 1)
    order = [balancer.pick("weighted").instance.id for _ in range(7)]
    assert Counter(order) == {"0": 5, "1": 1, "2": 1}
    assert "0000" not in "".join(order)


@pytest.mark.parametrize("mode", MODES)
def test_only_allowed_candidates_are_picked(mode: str) -> None:
    balancer, _ = balancer_of(1, 1, 1)
    assert set(pick_counts(balancer, mode, 50, {"1", "2"})) == {"1", "2"}


def test_hyphens_aliases_and_unknown_modes() -> None:
    balancer, _ = balancer_of(1)
    for mode in ("round-robin", "basic", "weighted", "power-of-two", "least-loaded"):
        assert balancer.pick(mode).instance.id == "0"
    with pytest.raises(ConfigError) as caught:
        balancer.pick("raund_robin")
    assert "round_robin" in caught.value.hint


def test_a_pick_without_candidates_raises() -> None:
    balancer, _ = balancer_of()
    with pytest.raises(LookupError):
        balancer.pick("random")
    balancer, _ = balancer_of(1)
    with pytest.raises(LookupError):
        balancer.pick("random", allowed=set())


def test_counts_survive_a_change_of_candidates() -> None:
    balancer, loads = balancer_of(1, 1)
    requests["0"] += 1
    balancer.set_candidates(loads[:1])
    balancer.set_candidates(loads)
    assert balancer.pick("least_loaded") is loads[1]
    requests["0"] -= 1
    assert balancer.pick("least_loaded") is not balancer.pick("least_loaded")

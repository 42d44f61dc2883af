"""The picks: shares, fairness, filters, errors."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from dynamo.core.errors import ConfigError
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.load_balancing import MODES, InstanceLoad, LoadBalancer


def picks_of(*weights: float) -> tuple[LoadBalancer, list[InstanceLoad]]:
    slots = [
        InstanceLoad(
            Instance(str(at), f"memory://{at}", "ns", "worker", "generate", {"weight": weight})
        )
        for at, weight in enumerate(weights)
    ]
    picks = LoadBalancer(Random(7))
    picks.set_candidates(slots)
    return picks, slots


def drawn(
    picks: LoadBalancer, mode: str, times: int, allowed: set[str] | None = None
) -> Counter[str]:
    return Counter(picks.pick(mode, allowed).instance.id for _ in range(times))


def test_round_robin_takes_turns() -> None:
    picks, _ = picks_of(1, 1, 1)
    turn = [picks.pick("round_robin").instance.id for _ in range(6)]
    assert turn[:3] == turn[3:]
    assert len(set(turn)) == 3


def test_random_spreads_evenly() -> None:
    picks, _ = picks_of(1, 1, 1, 1)
    assert all(800 < count < 1200 for count in drawn(picks, "random", 4000).values())


def test_least_loaded_follows_what_is_in_flight() -> None:
    picks, slots = picks_of(1, 1, 1)
    for slot in slots[:2]:
        slot.in_flight += 1
    assert drawn(picks, "least_loaded", 5) == {"2": 5}
    slots[2].in_flight += 1
    slots[2].in_flight += 1
    slots[0].in_flight -= 1
    assert drawn(picks, "least_loaded", 5) == {"0": 5}


def test_least_loaded_turns_among_equals() -> None:
    picks, _ = picks_of(1, 1, 1)
    assert drawn(picks, "least_loaded", 9) == {"0": 3, "1": 3, "2": 3}


def test_power_of_two_avoids_the_busiest() -> None:
    picks, slots = picks_of(1, 1, 1, 1)
    for _ in range(50):
        slots[1].in_flight += 1
    counts = drawn(picks, "power_of_two", 3000)
    assert counts["1"] == 0
    assert all(count > 700 for name, count in counts.items() if name != "1")


@pytest.mark.parametrize("mode", MODES)
def test_one_candidate_is_always_taken(mode: str) -> None:
    picks, _ = picks_of(1)
    assert drawn(picks, mode, 3) == {"0": 3}


def test_weights_are_shares_and_turns_are_spread() -> None:
    picks, _ = picks_of(5, 1, 1)
    turn = [picks.pick("weighted").instance.id for _ in range(7)]
    assert Counter(turn) == {"0": 5, "1": 1, "2": 1}
    assert "0000" not in "".join(turn)


@pytest.mark.parametrize("mode", MODES)
def test_only_allowed_ones_are_taken(mode: str) -> None:
    picks, _ = picks_of(1, 1, 1)
    assert set(drawn(picks, mode, 50, {"1", "2"})) == {"1", "2"}


def test_hyphens_aliases_and_unknown_modes() -> None:
    picks, _ = picks_of(1)
    for mode in ("round-robin", "basic", "weighted", "power-of-two", "least-loaded"):
        assert picks.pick(mode).instance.id == "0"
    with pytest.raises(ConfigError) as caught:
        picks.pick("raund_robin")
    assert "round_robin" in caught.value.hint


def test_nobody_to_pick() -> None:
    picks, _ = picks_of()
    with pytest.raises(LookupError):
        picks.pick("random")
    picks, _ = picks_of(1)
    with pytest.raises(LookupError):
        picks.pick("random", allowed=set())


def test_counts_survive_a_change_of_candidates() -> None:
    picks, slots = picks_of(1, 1)
    slots[0].in_flight += 1
    picks.set_candidates(slots[:1])
    picks.set_candidates(slots)
    assert picks.pick("least_loaded") is slots[1]
    slots[0].in_flight -= 1
    assert slots[0].in_flight == 0

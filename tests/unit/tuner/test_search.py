"""The search for settings: few replays, an order that prefers what is safe, and its interruption."""

import numpy as np
import pytest

from dynamo.operations.planner.values import Promise
from dynamo.operations.tuner.outcome import MOST_LOSS, SettingOutcome, compare
from dynamo.operations.tuner.search import SettingSearch, Values

RANGES = {
    "engine.max_num_seqs": (16, 32, 64, 128, 256, 512),
    "engine.max_num_batched_tokens": (512, 1024, 2048, 4096, 8192, 16384),
    "router.policy": ("predicted", "block_cost"),
}
START = {
    "engine.max_num_seqs": 16,
    "engine.max_num_batched_tokens": 512,
    "router.policy": "predicted",
}
BEST = {"engine.max_num_seqs": 256, "engine.max_num_batched_tokens": 2048}
PROMISE = Promise(1.0, 50.0)


def outcome(
    ttft_s: float, itl_ms: float = 20.0, failed: int = 0, promise: Promise = PROMISE
) -> SettingOutcome:
    """Return the outcome of 400 requests that differ by a few percent."""
    noise = np.random.default_rng(1).uniform(0.95, 1.05, 400)
    ttft = ttft_s * noise
    arrived = np.arange(400.0)
    e2e = ttft + itl_ms * 99 / 1e3
    return SettingOutcome(
        promise, arrived, ttft, itl_ms * noise, e2e, arrived[: 40 * failed : 40], 100.0
    )


class Valley:
    """A record on which the time grows with each step away from `BEST`."""

    def __init__(self, most: int = 1000) -> None:
        self.played: list[Values] = []
        self._most = most

    def play(self, values: Values) -> SettingOutcome:
        if len(self.played) == self._most:
            raise KeyboardInterrupt
        self.played.append(values)
        chosen = dict(values)
        steps = sum(abs(np.log2(chosen[key] / best)) for key, best in BEST.items())
        return outcome(0.1 * (1 + steps + (chosen["router.policy"] != "predicted")))


def search(valley: Valley) -> SettingSearch:
    return SettingSearch(RANGES, START, [valley.play] * 3, 0.9)


def test_the_best_of_a_grid_is_found_by_32_replays() -> None:
    valley = Valley()
    tried = search(valley)
    tried.run()
    assert tried.replays == len(valley.played) <= 32
    best = tried.recommendations(0.05)[0]
    assert best.after == BEST
    assert best.before == {key: START[key] for key in BEST}
    assert best.safety_score == 1.0
    assert best.comparison.low <= best.comparison.gain <= best.comparison.high


def test_an_interrupted_search_keeps_what_it_found() -> None:
    tried = search(Valley(most=8))
    with pytest.raises(KeyboardInterrupt):
        tried.run()
    assert tried.replays == 8
    assert tried.recommendations(0.05)[0].comparison.gain > 0.05
    first = search(Valley(most=1))
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert first.recommendations(0.05) == []


def test_settings_that_are_the_best_stay() -> None:
    start = {**BEST, "router.policy": "predicted"}
    tried = SettingSearch(RANGES, start, [Valley().play] * 3, 0.9)
    tried.run()
    assert tried.recommendations(0.05) == []


@pytest.mark.parametrize(
    ("after", "safe"),
    [
        (outcome(0.5), True),
        (outcome(0.5, itl_ms=25.0), True),  # slower, and within the promise
        (outcome(0.5, itl_ms=60.0), False),
        (outcome(0.5, failed=10), False),
    ],
)
def test_what_breaks_a_promise_is_not_safe(after: SettingOutcome, safe: bool) -> None:
    assert compare(outcome(0.6), after).safety_score == float(safe)


def test_without_a_promise_nothing_may_get_slower() -> None:
    before = outcome(0.6, promise=Promise())
    assert compare(before, outcome(0.5, promise=Promise())).safety_score == 1.0
    assert compare(before, outcome(0.5, 21.0, promise=Promise())).safety_score == 0.0


def test_requests_that_all_fail_are_the_greatest_loss() -> None:
    empty = np.zeros(0)
    lost = SettingOutcome(PROMISE, empty, empty, empty, empty, np.arange(9.0), 0.0)
    assert compare(lost, outcome(0.5)).gain == 1.0
    assert compare(outcome(0.5), lost).gain == -MOST_LOSS

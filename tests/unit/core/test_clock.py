from random import Random

import pytest

from dynamo.core.clock import Backoff


def test_delays_double_up_to_the_limit_until_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_a_raised_limit_lets_the_delay_grow_on_and_a_lower_one_cuts_it() -> None:
    backoff = Backoff(1.0, 2.0)
    assert [backoff.next_s() for _ in range(3)] == [1.0, 2.0, 2.0]
    backoff.max_s = 8.0
    assert [backoff.next_s() for _ in range(3)] == [2.0, 4.0, 8.0]
    backoff.max_s = 1.5
    assert backoff.next_s() == 1.5


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_jitter_is_a_random_share_below_the_delay(jitter: float) -> None:
    backoff, drawn = Backoff(4.0, 4.0, jitter), Random(3)
    delays = [backoff.next_s(drawn) for _ in range(50)]
    assert delays == [4.0 * (1 - jitter + jitter * value) for value in _draw(3, 50)]
    assert max(delays) <= 4.0
    assert min(delays) >= 4.0 * (1 - jitter)


def _draw(seed: int, count: int) -> list[float]:
    rng = Random(seed)
    return [rng.random() for _ in range(count)]

"""The waiting queue: orders, starvation and the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError, Overloaded
from dynamo.scheduling.router.queue import QUEUE_ORDERS, QueueOrderKey, WaitingQueue


def queue_of(order: str, **keys: QueueOrderKey) -> WaitingQueue[str]:
    queue: WaitingQueue[str] = WaitingQueue(order, starvation_s=10)
    for name, key in keys.items():
        queue.push(name, name, key)
    return queue


def test_each_order_puts_another_item_first() -> None:
    keys = {
        "old": QueueOrderKey(1.0, prefill_tokens=900, deadline_s=50),
        "short": QueueOrderKey(2.0, prefill_tokens=10, deadline_s=40),
        "urgent": QueueOrderKey(3.0, prefill_tokens=500, deadline_s=5),
    }
    assert {order: queue_of(order, **keys).ordered(3.0)[0] for order in QUEUE_ORDERS} == {
        "fcfs": "old",
        "shortest": "short",
        "deadline": "urgent",
    }


def test_priority_counts_in_every_order() -> None:
    fcfs = queue_of("fcfs", first=QueueOrderKey(1.0), later=QueueOrderKey(2.5, priority=2))
    assert fcfs.ordered(3.0) == ["later", "first"]
    weighted = queue_of(
        "shortest",
        light=QueueOrderKey(1, prefill_tokens=100),
        dear=QueueOrderKey(1, prefill_tokens=150, priority=1),
    )
    assert weighted.ordered(1.0) == ["dear", "light"]
    humble = queue_of(
        "shortest",
        low=QueueOrderKey(1, prefill_tokens=60, priority=-1),
        plain=QueueOrderKey(1, prefill_tokens=100),
    )
    assert humble.ordered(1.0) == ["plain", "low"]


def test_a_starving_item_goes_first() -> None:
    queue = queue_of(
        "shortest",
        big=QueueOrderKey(0.0, prefill_tokens=9_000),
        small=QueueOrderKey(9.0, prefill_tokens=1),
    )
    assert queue.ordered(9.5) == ["small", "big"]
    assert queue.ordered(10.0) == ["big", "small"]


def test_beyond_the_bound_the_error_has_a_retry_time() -> None:
    queue: WaitingQueue[int] = WaitingQueue(bound=20)
    for at in range(20):
        queue.push(str(at), at, QueueOrderKey(float(at)))
    for at in range(4):
        assert queue.pop(str(at), now=100.0 + 2 * at) == at
        queue.push(f"again {at}", at, QueueOrderKey(100.0 + at))
    with pytest.raises(Overloaded) as rejected:
        queue.push("excess", 99, QueueOrderKey(200.0))
    assert rejected.value.retry_after_s == pytest.approx(40.0)
    assert rejected.value.code == "overloaded"


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(ConfigError, match="sjf"):
        WaitingQueue("sjf")


@given(
    st.sampled_from(sorted(QUEUE_ORDERS)),
    st.lists(
        st.builds(
            QueueOrderKey,
            arrived_s=st.floats(0, 9),
            prefill_tokens=st.integers(0, 5),
            priority=st.integers(-2, 2),
            deadline_s=st.floats(0, 30),
        ),
        max_size=20,
    ),
    st.sets(st.integers(0, 19)),
)
def test_the_remaining_items_are_complete_and_in_order(
    order: str, keys: list[QueueOrderKey], removed: set[int]
) -> None:
    queue: WaitingQueue[int] = WaitingQueue(order)
    for at, key in enumerate(keys):
        queue.push(str(at), at, key)
    for at in removed:
        assert queue.pop(str(at), 1.0) == (at if at < len(keys) else None)
    remaining = [at for at in range(len(keys)) if at not in removed]
    assert queue.ordered(10.0) == sorted(
        remaining, key=lambda at: (QUEUE_ORDERS[order](keys[at]), keys[at].arrived_s, at)
    )
    assert len(queue) == len(remaining)


def test_similar_requests_leave_a_queue_of_clusters_together() -> None:
    keys = {
        "short": QueueOrderKey(0.0, prefill_tokens=100),
        "long": QueueOrderKey(0.1, prefill_tokens=4000),
        "short too": QueueOrderKey(0.2, prefill_tokens=110),
        "long too": QueueOrderKey(0.3, prefill_tokens=4100, max_tokens=0),
        "later": QueueOrderKey(5.0, prefill_tokens=100),
        "dear": QueueOrderKey(5.0, prefill_tokens=9, priority=9),
    }
    queue = queue_of("clusters", **keys)
    assert queue.count_ahead(keys["short too"]) == 3  # before those that arrive at its place
    assert queue.ordered(5.0) == ["dear", "short", "short too", "long", "long too", "later"]
    with pytest.raises(ConfigError, match="unknown queue order 'none'"):
        WaitingQueue("none")

"""The queue of requests that no worker can take yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError, Overloaded
from dynamo.scheduling.router.placement.queue import QUEUE_ORDERS, QueueOrderKey, WaitingQueue


def queue_of(order: str, **ranks: QueueOrderKey) -> WaitingQueue[str]:
    queue: WaitingQueue[str] = WaitingQueue(order, starvation_s=10)
    for name, rank in ranks.items():
        queue.push(name, name, rank)
    return queue


def test_each_order_puts_another_first() -> None:
    ranks = {
        "old": QueueOrderKey(1.0, prefill_tokens=900, deadline_s=50),
        "short": QueueOrderKey(2.0, prefill_tokens=10, deadline_s=40),
        "urgent": QueueOrderKey(3.0, prefill_tokens=500, deadline_s=5),
    }
    assert {order: queue_of(order, **ranks).ordered(3.0)[0] for order in QUEUE_ORDERS} == {
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


def test_nobody_starves() -> None:
    queue = queue_of(
        "shortest",
        big=QueueOrderKey(0.0, prefill_tokens=9_000),
        small=QueueOrderKey(9.0, prefill_tokens=1),
    )
    assert queue.ordered(9.5) == ["small", "big"]
    assert queue.ordered(10.0) == ["big", "small"]


def test_past_the_bound_a_request_is_told_when_to_come_again() -> None:
    queue: WaitingQueue[int] = WaitingQueue(bound=20)
    for at in range(20):
        queue.push(str(at), at, QueueOrderKey(float(at)))
    for at in range(4):
        assert queue.pop(str(at), now=100.0 + 2 * at) == at
        queue.push(f"again {at}", at, QueueOrderKey(100.0 + at))
    with pytest.raises(Overloaded) as refused:
        queue.push("one too many", 99, QueueOrderKey(200.0))
    assert refused.value.retry_after_s == pytest.approx(40.0)
    assert refused.value.code == "overloaded"


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
def test_what_stays_is_in_order_and_whole(
    order: str, ranks: list[QueueOrderKey], gone: set[int]
) -> None:
    queue: WaitingQueue[int] = WaitingQueue(order)
    for at, rank in enumerate(ranks):
        queue.push(str(at), at, rank)
    for at in gone:
        assert queue.pop(str(at), 1.0) == (at if at < len(ranks) else None)
    left = [at for at in range(len(ranks)) if at not in gone]
    assert queue.ordered(10.0) == sorted(
        left, key=lambda at: (QUEUE_ORDERS[order](ranks[at]), ranks[at].arrived_s, at)
    )
    assert len(queue) == len(left)

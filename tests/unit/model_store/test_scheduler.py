"""The scheduler of pieces, in virtual time."""

from __future__ import annotations

from random import Random

import pytest
from tests.unit.model_store.swarm import LINK, Swarm

from dynamo.models.shelf.manifest import PIECE_BYTES
from dynamo.services.model_store.scheduler import (
    HANG_S,
    MAX_OPEN_REQUESTS,
    MIN_SLOW_S,
    SOURCE,
    PieceScheduler,
)


def test_sixteen_at_once_need_at_most_twice_the_time_of_one() -> None:
    pieces = 60
    swarm = Swarm(16, pieces, PIECE_BYTES)
    alone_s = pieces * PIECE_BYTES / LINK
    assert swarm.run() <= 2 * alone_s
    assert swarm.source_bytes == pieces * PIECE_BYTES


def test_one_alone_is_as_fast_as_its_link() -> None:
    swarm = Swarm(1, 20, PIECE_BYTES)
    assert swarm.run() == pytest.approx(20 * PIECE_BYTES / LINK, rel=0.01)


@pytest.fixture
def scheduler() -> PieceScheduler:
    return PieceScheduler(range(6), Random(1))


def test_the_rarest_piece_is_asked_first(scheduler: PieceScheduler) -> None:
    scheduler.add_pieces("a", range(6))
    scheduler.add_pieces("b", range(5))
    requests = scheduler.next_requests(0.0)
    assert ("a", 5) in requests
    assert len({number for _, number in requests}) == len(requests) == 2 * MAX_OPEN_REQUESTS
    assert scheduler.next_requests(0.0) == []


def test_a_late_piece_is_asked_of_a_second_peer(scheduler: PieceScheduler) -> None:
    scheduler.add_pieces("a", range(2))
    first = {number for _, number in scheduler.next_requests(0.0)}
    scheduler.add_pieces("b", range(2))
    assert scheduler.next_requests(MIN_SLOW_S / 2) == []
    requests = scheduler.next_requests(2 * MIN_SLOW_S)
    assert {peer for peer, _ in requests} == {"b"}
    assert {number for _, number in requests} == first


def test_a_late_piece_that_has_come_is_not_asked_again(scheduler: PieceScheduler) -> None:
    scheduler.add_pieces("silent", [0])
    scheduler.next_requests(0.0)
    scheduler.add_pieces("sound", [0])
    assert scheduler.next_requests(1.0) == [("sound", 0)]
    scheduler.on_bytes("sound", 1.1)
    scheduler.on_received("sound", 0, 1.2)
    assert scheduler.next_requests(1.2) == []
    assert scheduler.silent(1.2) == ["silent"]


def test_requests_of_a_removed_peer_are_made_again(scheduler: PieceScheduler) -> None:
    scheduler.add_pieces("a", [3])
    assert scheduler.next_requests(0.0) == [("a", 3)]
    scheduler.add_pieces("b", [3])
    assert scheduler.next_requests(0.0) == []
    scheduler.remove_peer("a")
    assert scheduler.next_requests(0.0) == [("b", 3)]


def test_a_peer_that_does_not_answer_is_named(scheduler: PieceScheduler) -> None:
    scheduler.add_pieces("a", [0])
    scheduler.next_requests(0.0)
    assert scheduler.hanging(HANG_S / 2) == []
    assert scheduler.hanging(HANG_S + 1) == ["a"]
    scheduler.on_bytes("a", HANG_S)
    assert scheduler.hanging(HANG_S + 1) == []


def test_the_source_gives_what_no_peer_has(scheduler: PieceScheduler) -> None:
    scheduler.add_pieces("a", [0, 1, 2, 3])
    assert all(peer == "a" for peer, _ in scheduler.next_requests(0.0))
    scheduler.use_source(True)
    assert scheduler.next_requests(0.0) == [(SOURCE, 4), (SOURCE, 5)]
    scheduler.on_failed(SOURCE, 4)
    scheduler.use_source(False)
    scheduler.add_pieces("b", [5])
    assert scheduler.next_requests(0.0) == [("b", 5)]


def test_a_peer_gives_what_a_busy_source_owes(scheduler: PieceScheduler) -> None:
    scheduler.use_source(True)
    requests = scheduler.next_requests(0.0)
    scheduler.add_pieces("a", [number for _, number in requests])
    assert {peer for peer, _ in scheduler.next_requests(10.0)} == {"a"}


def test_a_busy_peer_is_asked_again_later(scheduler: PieceScheduler) -> None:
    scheduler.add_pieces("a", [0])
    scheduler.next_requests(0.0)
    scheduler.on_busy("a", 0, 0.0)
    assert scheduler.next_requests(0.0) == []
    assert scheduler.next_requests(1.0) == [("a", 0)]

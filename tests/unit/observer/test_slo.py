"""The books of the service level objective count each request once."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.observer.stories import make_story

from dynamo.application.http_errors import client_error_codes
from dynamo.core.clock import SystemClock
from dynamo.core.errors import StoreUnavailable
from dynamo.operations.observer.observer import USUAL, DeploymentObserver
from dynamo.operations.observer.slo_books import SloBooks
from dynamo.telemetry.slo import FAILED, GOOD, LATE_FIRST, LATE_GAP, SloCounts, judge_slo
from dynamo.telemetry.story import StoryBatch, decode_batch, encode_batch

HOUR_S = 3_600.0
PROMISE = (0.99, 5.0, 2.0)


class Wall:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def open_books(tmp_path: Path) -> tuple[SloBooks, Wall]:
    wall = Wall()
    return SloBooks(lambda: tmp_path / "slo.sqlite", wall), wall


def total(report: Any, window: int = 0) -> tuple[int, int, int]:
    shown = report["windows"][window]
    return shown["requests"], shown["failed"], shown["late"]


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({}, GOOD),
        ({"first_us": None}, GOOD),  # an embedding
        ({"first_us": 5_000_001}, LATE_FIRST),
        ({"gap_us": 2_000_001}, LATE_GAP),
        ({"first_us": 6_000_000, "gap_us": 3_000_000}, LATE_FIRST + LATE_GAP),
        ({"end": "worker_failed"}, FAILED),
        ({"end": "overloaded"}, FAILED),
        ({"end": "deadline_exceeded"}, FAILED),
        ({"end": "a code of a later version"}, FAILED),
        ({"end": "invalid_request"}, 0),
        ({"end": "context_length_exceeded"}, 0),
        ({"end": "model_not_found"}, 0),
        ({"end": "slow_reader"}, 0),
        ({"end": "request_timeout"}, FAILED),
        ({"end": "cancelled"}, 0),
        ({"end": "cancelled", "first_us": None}, 0),
        ({"end": "cancelled", "first_us": None, "ended_us": 6_000_000}, LATE_FIRST),
        ({"end": "cancelled", "gap_us": 3_000_000}, LATE_GAP),
    ],
)
def test_clients_errors_do_not_count_and_rejections_do(
    fields: dict[str, Any], outcome: int
) -> None:
    story = make_story(**fields)
    assert judge_slo(story, 5e6, 2e6, client_error_codes()) == outcome


def test_late_requests_are_counted_once_and_by_promise() -> None:
    counts = SloCounts()
    for outcome in (0, GOOD, FAILED, LATE_FIRST, LATE_GAP, LATE_FIRST + LATE_GAP):
        counts.count(outcome)
    assert counts == SloCounts(requests=5, failed=1, late_first=2, late_gap=2, late=3)


def test_books_survive_restarts_of_observers_and_their_outage(tmp_path: Path) -> None:
    books, wall = open_books(tmp_path)
    books.add("frontend-1", {"m": (10, 1, 0, 0, 0)})
    assert books.write()
    wall.now += 600
    again = SloBooks(lambda: tmp_path / "slo.sqlite", wall)
    again.add("frontend-1", {"m": (1_000, 1, 8, 2, 9)})
    again.add("frontend-2", {"m": (100, 0, 0, 0, 0), "other": (5, 5, 0, 0, 0)})
    report = again.report(*PROMISE)
    assert total(report) == (1_105, 6, 9)
    assert {name: windows[0]["requests"] for name, windows in report["models"].items()} == {
        "m": 1_100,
        "other": 5,
    }
    hour = report["windows"][0]
    assert hour["good_ratio"] == pytest.approx(1 - 15 / 1_105)
    assert hour["budget_left"] == pytest.approx(1 - 15 / 1_105 / 0.01)
    assert hour["in_time_ratio"] == pytest.approx(1 - 9 / 1_099)


def test_two_observers_with_one_file_count_a_request_once(tmp_path: Path) -> None:
    books, wall = open_books(tmp_path)
    other = SloBooks(lambda: tmp_path / "slo.sqlite", wall)
    for count in (10, 25, 40):
        for each in (books, other):
            each.add("frontend-1", {"m": (count, 1, 0, 0, 0)})
            each.write()
    assert total(other.report(*PROMISE)) == (40, 1, 0)


def test_old_requests_leave_the_windows_and_then_the_file(tmp_path: Path) -> None:
    books, wall = open_books(tmp_path)
    books.add("frontend-1", {"m": (10, 0, 0, 0, 0)})
    books.add_cause("m", "overload")
    books.write()
    seen = []
    for hours in (0.5, 2, 25, 24 * 40):
        wall.now = 1_700_000_000.0 + hours * HOUR_S
        seen.append([total(books.report(*PROMISE), window)[0] for window in range(3)])
    assert seen == [[10, 10, 10], [0, 10, 10], [0, 0, 10], [0, 0, 0]]
    books.add("frontend-2", {"m": (1, 0, 0, 0, 0)})
    books.write()
    with closing(sqlite3.connect(tmp_path / "slo.sqlite")) as file:
        assert file.execute("SELECT COUNT(*) FROM minutes").fetchone() == (1,)
        assert file.execute("SELECT COUNT(*) FROM causes").fetchone() == (0,)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    wall, broken = Wall(), [True]

    def path() -> Path:
        if broken[0]:
            raise OSError(28, "No space left on device")
        return tmp_path / "slo.sqlite"

    books = SloBooks(path, wall)
    books.add("frontend-1", {"m": (10, 1, 0, 0, 0)})
    books.add_cause("m", "overload")
    assert not books.write()
    assert books.failures == 1
    with pytest.raises(StoreUnavailable, match="No space left"):
        books.report(*PROMISE)
    broken[0] = False
    report = books.report(*PROMISE)
    assert total(report) == (10, 1, 0)
    assert report["windows"][0]["causes"] == {"overload": 1}


def test_a_file_of_another_version_is_left_alone(tmp_path: Path) -> None:
    books, _ = open_books(tmp_path)
    with closing(sqlite3.connect(tmp_path / "slo.sqlite")) as file:
        file.execute("PRAGMA user_version = 9")
    books.add("frontend-1", {"m": (10, 1, 0, 0, 0)})
    assert not books.write()
    with pytest.raises(StoreUnavailable, match="has version 9"):
        books.report(*PROMISE)


async def test_the_observer_names_what_spent_the_budget(tmp_path: Path) -> None:
    clock = SystemClock()
    now = clock.wall()
    books = SloBooks(lambda: tmp_path / "slo.sqlite", clock.wall)
    observer = DeploymentObserver(clock, books)
    stories = [
        make_story(request_id="bad", end="worker_failed", slo=FAILED, wall_s=now),
        make_story(request_id="late", slo=LATE_FIRST, wall_s=now),
        make_story(request_id="good", slo=GOOD, wall_s=now),
    ]
    batch = StoryBatch("frontend-1", now, stories, slo={"m": (3, 1, 1, 0, 1)})
    observer.on_batch(decode_batch(encode_batch(batch)))
    report = await observer.report_slo()
    assert total(report) == (3, 1, 1)
    assert report["windows"][0]["causes"] == {"ended: worker_failed": 1, USUAL: 1}


def test_a_process_that_ended_is_forgotten_once_it_is_written(tmp_path: Path) -> None:
    books, _ = open_books(tmp_path)
    books.add("frontend-1", {"m": (10, 1, 0, 0, 0)})
    books.forget("frontend-1")
    books.write()
    assert total(books.report(*PROMISE)) == (10, 1, 0)
    books.forget("frontend-1")
    assert total(books.report(*PROMISE)) == (10, 1, 0)

"""What the histograms of tokens are told, and the shortest way's own bounds."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dynamo.application.frontend_metrics import FrontendMetrics, ModelMetrics
from dynamo.application.generation.fast_path import EventTemplate, StreamFastPath
from dynamo.application.generation.token_timing import MAX_PENDING_TIMESTAMPS, TokenTiming
from dynamo.application.openai.response_encoder import MAX_TOKEN_TABLES, JsonStringCache
from dynamo.core.fast_path import TextTable
from dynamo.telemetry.metrics import Registry


class Hand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def metrics() -> ModelMetrics:
    return FrontendMetrics(Registry()).for_model("m")


def counted(histogram: Any) -> tuple[int, float]:
    return sum(histogram.counts), pytest.approx(histogram.sum)


def test_the_first_text_of_all_choices_is_the_first_token(
    hand: Hand, metrics: ModelMetrics
) -> None:
    pace = TokenTiming(metrics, hand, 99.0, 2)
    for hand.now, choice in ((101.0, 1), (102.0, 0), (103.0, 1)):
        pace.on_text(choice)
    pace.flush()
    assert counted(metrics.time_to_first_token) == (1, 2.0)
    assert pace.recorded_texts == 3


def test_times_between_texts_are_those_of_one_choice(hand: Hand, metrics: ModelMetrics) -> None:
    pace = TokenTiming(metrics, hand, 99.0, 2)
    for hand.now, choice in ((100.0, 0), (101.0, 1), (105.0, 0), (111.0, 1), (112.0, 1)):
        pace.on_text(choice)
    pace.flush()
    pace.flush()
    assert counted(metrics.inter_token_latency) == (3, 5.0 + 10.0 + 1.0)
    assert pace.recorded_texts == 5


def test_a_long_answer_keeps_few_times_and_loses_none(hand: Hand, metrics: ModelMetrics) -> None:
    pace = TokenTiming(metrics, hand, 99.0, 1)
    for _ in range(5 * MAX_PENDING_TIMESTAMPS + 7):
        hand.now += 0.5
        pace.on_text(0)
        assert len(pace.timestamps[0]) < MAX_PENDING_TIMESTAMPS
    assert pace.recorded_texts >= 5 * (MAX_PENDING_TIMESTAMPS - 1)
    pace.flush()
    assert counted(metrics.inter_token_latency) == (
        5 * MAX_PENDING_TIMESTAMPS + 6,
        0.5 * (5 * MAX_PENDING_TIMESTAMPS + 6),
    )
    assert counted(metrics.time_to_first_token) == (1, 1.5)
    assert pace.recorded_texts == 5 * MAX_PENDING_TIMESTAMPS + 7


class Outlet:
    """The connection's end of a stream."""

    def __init__(self) -> None:
        self.open = True
        self.congested = False
        self.events: list[bytes] = []
        self.armed = 0

    def get_event_buffer(self) -> tuple[list[bytes], Callable[[], None]]:
        return self.events, self.arm

    def arm(self) -> None:
        self.armed += 1


class Laid:
    """A lane of the tokens "a", none, 'c"'; of those "c" is risky."""

    def __init__(self, pace: TokenTiming, *, stops: bool = False) -> None:
        self.outlet = Outlet()
        self.kept = array("I")
        risky = (lambda text: True if "c" in text else None) if stops else None
        form = EventTemplate(b"<", JsonStringCache(), b">")
        words = TextTable(["a", None, 'c"'], risky)
        response: Any = self.outlet
        self.lane = StreamFastPath(0, response, form, pace, words, self.kept)


def test_texts_are_said_as_json_and_the_connection_is_woken_once(
    hand: Hand, metrics: ModelMetrics
) -> None:
    laid = Laid(TokenTiming(metrics, hand, 99.0, 1))
    assert [laid.lane.send_token(one) for one in (0, 2, 0)] == [True] * 3
    assert laid.outlet.events == [b'<"a">', b'<"c\\"">', b'<"a">']
    assert laid.outlet.armed == 1
    laid.outlet.events.clear()
    laid.lane.send_token(2)
    assert laid.outlet.armed == 2
    assert (laid.kept.tolist(), laid.lane.tokens_sent) == ([0, 2, 0, 2], 4)


@pytest.mark.parametrize("token", [1, 3])
def test_what_is_no_text_is_not_taken(hand: Hand, metrics: ModelMetrics, token: int) -> None:
    laid = Laid(TokenTiming(metrics, hand, 99.0, 1))
    assert laid.lane.send_token(token) is None
    assert (laid.outlet.events, laid.kept.tolist(), laid.lane.tokens_sent) == ([], [], 0)


def test_what_may_begin_a_stop_string_is_not_taken_however_often(
    hand: Hand, metrics: ModelMetrics
) -> None:
    laid = Laid(TokenTiming(metrics, hand, 99.0, 1), stops=True)
    assert [laid.lane.send_token(one) for one in (0, 2, 0, 2)] == [True, None, True, None]
    assert laid.kept.tolist() == [0, 0]


@pytest.mark.parametrize("state", [{"open": False}, {"congested": True}, {"buffer_empty": False}])
def test_the_long_way_is_taken_while_something_stands_in_the_way(
    hand: Hand, metrics: ModelMetrics, state: dict[str, bool]
) -> None:
    laid = Laid(TokenTiming(metrics, hand, 99.0, 1))
    for name, value in state.items():
        setattr(laid.lane if name == "buffer_empty" else laid.outlet, name, value)
    assert laid.lane.send_token(0) is None
    assert (laid.outlet.events, laid.kept.tolist()) == ([], [])


def test_the_short_way_counts_as_the_long_one(hand: Hand, metrics: ModelMetrics) -> None:
    pace = TokenTiming(metrics, hand, 99.0, 1)
    pace.on_text(0)
    laid = Laid(pace)
    for _ in range(3 * MAX_PENDING_TIMESTAMPS):
        hand.now += 0.5
        laid.lane.send_token(0)
        assert len(pace.timestamps[0]) < MAX_PENDING_TIMESTAMPS
    pace.flush()
    assert counted(metrics.inter_token_latency) == (
        3 * MAX_PENDING_TIMESTAMPS,
        1.5 * MAX_PENDING_TIMESTAMPS,
    )
    assert pace.recorded_texts == 3 * MAX_PENDING_TIMESTAMPS + 1


def test_remembered_texts_are_bounded_and_right() -> None:
    escapes = JsonStringCache(capacity=3, max_text_length=4)
    words = ["a", 'b"', "ü", "\n", "four", "fives"]
    for word in itertools.islice(itertools.cycle(words), 30):
        assert msgspec.json.decode(escapes[word]) == word
        assert len(escapes) <= 3
        assert word in escapes or len(word) > 4
    assert "fives" not in escapes


def test_each_vocabulary_has_a_table_of_its_own_and_few_are_kept() -> None:
    escapes = JsonStringCache()
    lists: list[list[str | None]] = [["x"] * (size + 1) for size in range(2 * MAX_TOKEN_TABLES)]
    first = escapes.token_table(lists[0])
    assert escapes.token_table(lists[0]) is first
    for texts in lists:
        table = escapes.token_table(texts)
        assert table == [None] * len(texts)
        assert escapes.token_table(texts) is table
        assert len(escapes._token_tables) <= MAX_TOKEN_TABLES

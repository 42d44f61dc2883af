"""Token timing, the token fast path of streams, and cached JSON strings."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dynamo.application.frontend_metrics import (
    MAX_PENDING_TIMESTAMPS,
    FrontendMetrics,
    ModelMetrics,
    TokenTiming,
)
from dynamo.application.generation.fast_path import JsonStringCache, StreamFastPath
from dynamo.core.fast_path import TextTable, TokenTexts
from dynamo.telemetry.metrics import Registry

FRAME = (b"<", b">")


class ManualClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def metrics() -> ModelMetrics:
    return FrontendMetrics(Registry()).for_model("m")


def counted(histogram: Any) -> tuple[int, float]:
    return sum(histogram.counts), pytest.approx(histogram.sum)


def test_the_first_text_of_any_choice_is_the_first_token(
    clock: ManualClock, metrics: ModelMetrics
) -> None:
    timing = TokenTiming(metrics, clock, 99.0, 2)
    for clock.now, choice in ((101.0, 1), (102.0, 0), (103.0, 1)):
        timing.on_text(choice)
    timing.flush()
    assert counted(metrics.time_to_first_token) == (1, 2.0)
    assert timing.recorded_texts == 3


def test_intervals_are_measured_between_texts_of_one_choice(
    clock: ManualClock, metrics: ModelMetrics
) -> None:
    timing = TokenTiming(metrics, clock, 99.0, 2)
    for clock.now, choice in ((100.0, 0), (101.0, 1), (105.0, 0), (111.0, 1), (112.0, 1)):
        timing.on_text(choice)
    timing.flush()
    timing.flush()
    assert counted(metrics.inter_token_latency) == (3, 5.0 + 10.0 + 1.0)
    assert timing.recorded_texts == 5


def test_a_long_answer_keeps_few_timestamps_and_loses_none(
    clock: ManualClock, metrics: ModelMetrics
) -> None:
    timing = TokenTiming(metrics, clock, 99.0, 1)
    for _ in range(5 * MAX_PENDING_TIMESTAMPS + 7):
        clock.now += 0.5
        timing.on_text(0)
        assert len(timing.timestamps[0]) < MAX_PENDING_TIMESTAMPS
    assert timing.recorded_texts >= 5 * (MAX_PENDING_TIMESTAMPS - 1)
    timing.flush()
    assert counted(metrics.inter_token_latency) == (
        5 * MAX_PENDING_TIMESTAMPS + 6,
        0.5 * (5 * MAX_PENDING_TIMESTAMPS + 6),
    )
    assert counted(metrics.time_to_first_token) == (1, 1.5)
    assert timing.recorded_texts == 5 * MAX_PENDING_TIMESTAMPS + 7


class FakeResponse:
    """The part of a Response that the fast path uses; counts scheduled flushes."""

    def __init__(self) -> None:
        self.open = True
        self.congested = False
        self.events: list[bytes] = []
        self.flushes = 0

    def get_event_buffer(self) -> tuple[list[bytes], Callable[[], None]]:
        return self.events, self.schedule_flush

    def schedule_flush(self) -> None:
        self.flushes += 1


class OpenFastPath:
    """A fast path over the texts "a", None and 'c"'. With `stops`, a "c" may begin a stop string."""

    def __init__(self, timing: TokenTiming, *, stops: bool = False) -> None:
        self.response = FakeResponse()
        self.token_log = array("I")
        may_begin_stop = (lambda text: True if "c" in text else None) if stops else None
        self.token_texts = TokenTexts(["a", None, 'c"'])
        text_table = TextTable(self.token_texts, may_begin_stop)
        response: Any = self.response
        self.fast_path = StreamFastPath(0, response, FRAME, timing, text_table, self.token_log)


def test_texts_are_written_as_json_with_one_flush(
    clock: ManualClock, metrics: ModelMetrics
) -> None:
    opened = OpenFastPath(TokenTiming(metrics, clock, 99.0, 1))
    assert [opened.fast_path.send_token(token) for token in (0, 2, 0)] == [True] * 3
    assert opened.response.events == [b'<"a">', b'<"c\\"">', b'<"a">']
    assert opened.response.flushes == 1
    opened.response.events.clear()
    opened.fast_path.send_token(2)
    assert opened.response.flushes == 2
    assert (opened.token_log.tolist(), opened.fast_path.tokens_sent) == ([0, 2, 0, 2], 4)


@pytest.mark.parametrize("token", [1, 3])
def test_tokens_without_a_text_are_not_taken(
    clock: ManualClock, metrics: ModelMetrics, token: int
) -> None:
    opened = OpenFastPath(TokenTiming(metrics, clock, 99.0, 1))
    assert opened.fast_path.send_token(token) is None
    assert (opened.response.events, opened.token_log.tolist(), opened.fast_path.tokens_sent) == (
        [],
        [],
        0,
    )


def test_texts_that_may_begin_a_stop_string_are_never_taken(
    clock: ManualClock, metrics: ModelMetrics
) -> None:
    opened = OpenFastPath(TokenTiming(metrics, clock, 99.0, 1), stops=True)
    assert [opened.fast_path.send_token(token) for token in (0, 2, 0, 2)] == [
        True,
        None,
        True,
        None,
    ]
    assert opened.token_log.tolist() == [0, 0]


@pytest.mark.parametrize("state", [{"open": False}, {"congested": True}, {"buffer_empty": False}])
def test_nothing_is_taken_while_the_response_or_the_buffer_is_blocked(
    clock: ManualClock, metrics: ModelMetrics, state: dict[str, bool]
) -> None:
    opened = OpenFastPath(TokenTiming(metrics, clock, 99.0, 1))
    for name, value in state.items():
        setattr(opened.fast_path if name == "buffer_empty" else opened.response, name, value)
    assert opened.fast_path.send_token(0) is None
    assert (opened.response.events, opened.token_log.tolist()) == ([], [])


def test_the_fast_path_records_the_same_intervals(
    clock: ManualClock, metrics: ModelMetrics
) -> None:
    timing = TokenTiming(metrics, clock, 99.0, 1)
    timing.on_text(0)
    opened = OpenFastPath(timing)
    for _ in range(3 * MAX_PENDING_TIMESTAMPS):
        clock.now += 0.5
        opened.fast_path.send_token(0)
        assert len(timing.timestamps[0]) < MAX_PENDING_TIMESTAMPS
    timing.flush()
    assert counted(metrics.inter_token_latency) == (
        3 * MAX_PENDING_TIMESTAMPS,
        1.5 * MAX_PENDING_TIMESTAMPS,
    )
    assert timing.recorded_texts == 3 * MAX_PENDING_TIMESTAMPS + 1


def test_the_json_string_cache_is_bounded_and_correct() -> None:
    json_strings = JsonStringCache(capacity=3, max_text_length=4)
    words = ["a", 'b"', "ü", "\n", "four", "fives"]
    for word in itertools.islice(itertools.cycle(words), 30):
        assert msgspec.json.decode(json_strings[word]) == word
        assert len(json_strings) <= 3
        assert word in json_strings or len(word) > 4
    assert "fives" not in json_strings


def test_the_requests_of_a_vocabulary_share_the_json_of_its_texts(
    clock: ManualClock, metrics: ModelMetrics
) -> None:
    first = OpenFastPath(TokenTiming(metrics, clock, 99.0, 1))
    first.fast_path.send_token(0)
    table = TextTable(first.token_texts)
    assert table.token_texts.json_texts == [b'"a"', None, None]
    response: Any = first.response
    timing = TokenTiming(metrics, clock, 99.0, 1)
    second = StreamFastPath(0, response, FRAME, timing, table, array("I"))
    second.send_token(2)
    assert first.token_texts.json_texts == [b'"a"', None, b'"c\\""']
    assert OpenFastPath(timing).token_texts.json_texts == [None, None, None]

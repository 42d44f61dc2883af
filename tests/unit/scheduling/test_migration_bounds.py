"""When and how often a request goes on elsewhere: pauses, deadlines, who is avoided, who is guilty."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import (
    ContextLengthExceeded,
    DynamoError,
    InstanceGone,
    NoWorkers,
    PoisonedRequest,
    WorkerFailed,
)
from dynamo.core.reply import Reply
from dynamo.core.values import Finish, GenerateRequest, SamplingParams, Started, StopConditions
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.scheduling.migration import (
    ATTEMPT_STRIDE,
    INITIAL_BACKOFF_S,
    MAX_BACKOFF_S,
    REPLACEMENT_TIMEOUT_S,
    Migration,
)
from dynamo.telemetry import Registry
from dynamo.testing.fakes import CollectedReply

REQUEST = GenerateRequest("r", "m", pack_ids([5, 6, 7]), SamplingParams(), StopConditions(20))
BEGAN_S = 1000.0
Life = tuple[Sequence[Sequence[int]], DynamoError]
"""What a worker says, call by call, and what it fails with."""


class Longest(Random):
    """The largest of all chances, or nearly."""

    def random(self) -> float:
        return 1.0


class Shortest(Random):
    """The smallest."""

    def random(self) -> float:
        return 0.0


class Fleet:
    """Plays one life a call; the last call is answered in full. Notes when it was asked what."""

    def __init__(self, *lives: Life, begins: bool = True, metrics: Registry | None = None) -> None:
        self.lives = list(lives)
        self.begins = begins
        self.metrics = metrics or Registry()
        self.times: list[float] = []
        self.contexts: list[Context] = []
        self.requests: list[GenerateRequest] = []
        self.read = CollectedReply()

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.times.append(self.clock.now() - BEGAN_S)
        self.contexts.append(context)
        self.requests.append(request)
        said, error = self.lives.pop(0) if self.lives else ((), None)
        if isinstance(error, NoWorkers):
            raise error
        if self.begins:
            reply.begin(Started("w", prompt_tokens=3))
        if error is not None:
            for ids in said:
                reply.tokens(ids)
            raise error
        reply.finish(Finish("stop"))

    def play(self, rng: Random | None = None, timeout_s: float | None = None) -> Fleet:
        async def main(clock: VirtualClock) -> None:
            self.clock = clock
            await clock.sleep(BEGAN_S)
            operator = Migration(clock, rng or Random(1), self.metrics)
            await operator.send(REQUEST, Context("r", timeout_s=timeout_s), self.read, self.send)

        run_in_virtual_time(main)
        return self

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


def gone(*said: Sequence[int], name: str = "") -> Life:
    """It leaves; no fault of the request's."""
    error = InstanceGone("gone")
    error.instance = name
    return said, error


def died(*said: Sequence[int]) -> Life:
    return said, WorkerFailed("died")


def test_who_brought_tokens_is_followed_at_once() -> None:
    assert Fleet(died([1]), died([2], [3]), died([4])).play(Longest()).pauses == [0.0] * 3


def test_without_progress_pauses_double_to_a_bound_and_tokens_begin_them_anew() -> None:
    pauses = Fleet(*[gone()] * 7, gone([1]), gone()).play(Longest()).pauses
    assert 0 < pauses[0] < 3 * INITIAL_BACKOFF_S
    for before, after in pairwise(pauses[:7]):
        assert after == pytest.approx(min(2 * before, MAX_BACKOFF_S))
    assert pauses[6] == pytest.approx(MAX_BACKOFF_S)
    assert pauses[7] == 0.0
    assert pauses[8] == pytest.approx(pauses[0])


def test_pauses_have_full_jitter() -> None:
    assert Fleet(*[gone()] * 5).play(Shortest()).pauses == [0.0] * 5


def test_every_attempt_has_what_is_left_of_the_time() -> None:
    fleet = Fleet(*[gone()] * 5).play(Longest(), timeout_s=1.0)
    assert fleet.times[-1] > 1.0
    for now, context in zip(fleet.times, fleet.contexts, strict=True):
        assert context.timeout_s == pytest.approx(max(0.0, 1.0 - now))


def test_who_gave_no_time_is_given_none() -> None:
    assert {one.timeout_s for one in Fleet(gone(), gone()).play().contexts} == {None}


def test_attempts_are_numbered_upwards_with_room_between() -> None:
    attempts = [one.attempt for one in Fleet(gone(), gone(), gone()).play().contexts]
    assert attempts == [0, ATTEMPT_STRIDE, 2 * ATTEMPT_STRIDE, 3 * ATTEMPT_STRIDE]


def test_the_last_three_that_failed_are_avoided_each_told_once() -> None:
    names = ["a", "a", "", "b", "c", "d"]
    fleet = Fleet(*(gone(name=name) for name in names)).play()
    assert [one.avoid for one in fleet.contexts] == [
        (),
        ("a",),
        ("a",),
        ("a",),
        ("a", "b"),
        ("a", "b", "c"),
        ("b", "c", "d"),
    ]


def test_tokens_between_deaths_show_that_they_were_chance() -> None:
    fleet = Fleet(died(), died(), died([1]), died(), died([2]), died()).play()
    assert (fleet.read.ids, fleet.read.end) == ([1, 2], Finish("stop", completion_tokens=2))


def test_a_first_worker_that_died_without_a_word_may_have_died_of_it() -> None:
    fleet = Fleet(died(), died(), died(), begins=False)
    with pytest.raises(PoisonedRequest):
        play_begun_later(fleet)
    assert len(fleet.times) == 3


def play_begun_later(fleet: Fleet) -> None:
    """All but its first worker say when they begin."""
    whole = fleet.send

    async def send(request: GenerateRequest, context: Context, reply: Reply) -> None:
        fleet.begins = bool(fleet.times)
        await whole(request, context, reply)

    fleet.send = send  # type: ignore[method-assign]
    fleet.play()


def test_all_tokens_of_one_call_are_kept_for_the_next_worker() -> None:
    fleet = Fleet(died([1, 2, 3], [4])).play()
    assert fleet.requests[1].token_ids == pack_ids([5, 6, 7, 1, 2, 3, 4])
    assert fleet.requests[1].stops.max_tokens == 16


def test_what_fails_after_the_end_of_the_answer_is_over() -> None:
    class Ended(Fleet):
        async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
            await super().send(request, context, reply)
            raise WorkerFailed("died")

    fleet = Ended().play()
    assert (len(fleet.times), fleet.read.end) == (1, Finish("stop"))


def test_a_prompt_that_fits_no_other_engine_is_told() -> None:
    with pytest.raises(ContextLengthExceeded):
        Fleet(died(), ((), ContextLengthExceeded("too long"))).play()


def test_while_nobody_is_there_it_is_looked_again_after_short_pauses() -> None:
    nobody: Life = ((), NoWorkers("nobody"))
    pauses = Fleet(died([1]), *[nobody] * 30).play().pauses[1:]
    assert len(set(pauses)) > 20
    assert all(0.99 * INITIAL_BACKOFF_S < pause < 2.01 * INITIAL_BACKOFF_S for pause in pauses)


@pytest.mark.parametrize(
    ("lives", "reason"),
    [
        ([died()] * 3, "poisoned_request"),
        ([gone()] * 17, "limit"),
        ([died([1]), *[((), NoWorkers("nobody"))] * 1000], "no_workers"),
    ],
)
def test_why_requests_could_not_go_on_is_counted(lives: list[Any], reason: str) -> None:
    fleet = Fleet(*lives)
    with pytest.raises(DynamoError):
        fleet.play()
    told = f'dynamo_migrations_failed_total{{reason="{reason}"}} 1'
    assert told in fleet.metrics.render()


def test_for_another_worker_it_is_waited_so_long_and_once() -> None:
    fleet = Fleet(died([1]), *[((), NoWorkers("nobody"))] * 1000)
    with pytest.raises(WorkerFailed):
        fleet.play()
    assert REPLACEMENT_TIMEOUT_S <= fleet.times[-1] + 1e-6 < REPLACEMENT_TIMEOUT_S + 1.0

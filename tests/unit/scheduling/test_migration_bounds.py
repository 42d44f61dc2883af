"""Bounds of migration: pauses, deadlines, avoided workers, poisoned requests, limits."""

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
    Unsupported,
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
"""The tokens that a worker sends, call by call, and the error that it raises."""


class LargestRandom(Random):
    """Always draws the largest value."""

    def random(self) -> float:
        return 1.0


class SmallestRandom(Random):
    """Always draws the smallest value."""

    def random(self) -> float:
        return 0.0


class ScriptedWorkers:
    """Workers that play one life for each call and then answer. Records all calls."""

    end = Finish("stop")

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
        calls, error = self.lives.pop(0) if self.lives else ((), None)
        if isinstance(error, NoWorkers):
            raise error
        if self.begins:
            reply.begin(Started("w", prompt_tokens=3))
        if error is not None:
            for ids in calls:
                reply.tokens(ids)
            raise error
        reply.finish(self.end)

    def play(self, rng: Random | None = None, timeout_s: float | None = None) -> ScriptedWorkers:
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


def gone(*calls: Sequence[int], name: str = "") -> Life:
    """A worker that leaves without the request being at fault."""
    error = InstanceGone("gone")
    error.instance = name
    return calls, error


def died(*calls: Sequence[int]) -> Life:
    return calls, WorkerFailed("died")


def test_after_progress_there_is_no_pause() -> None:
    assert (
        ScriptedWorkers(died([1]), died([2], [3]), died([4])).play(LargestRandom()).pauses
        == [0.0] * 3
    )


def test_pauses_without_progress_double_up_to_a_bound_until_a_token_resets_them() -> None:
    pauses = ScriptedWorkers(*[gone()] * 7, gone([1]), gone()).play(LargestRandom()).pauses
    assert 0 < pauses[0] < 3 * INITIAL_BACKOFF_S
    for before, after in pairwise(pauses[:7]):
        assert after == pytest.approx(min(2 * before, MAX_BACKOFF_S))
    assert pauses[6] == pytest.approx(MAX_BACKOFF_S)
    assert pauses[7] == 0.0
    assert pauses[8] == pytest.approx(pauses[0])


def test_pauses_have_full_jitter() -> None:
    assert ScriptedWorkers(*[gone()] * 5).play(SmallestRandom()).pauses == [0.0] * 5


def test_every_attempt_gets_the_remaining_timeout() -> None:
    workers = ScriptedWorkers(*[gone()] * 5).play(LargestRandom(), timeout_s=1.0)
    assert workers.times[-1] > 1.0
    for now, context in zip(workers.times, workers.contexts, strict=True):
        assert context.timeout_s == pytest.approx(max(0.0, 1.0 - now))


def test_a_request_without_a_timeout_stays_without() -> None:
    assert {context.timeout_s for context in ScriptedWorkers(gone(), gone()).play().contexts} == {
        None
    }


def test_attempts_are_numbered_upwards_with_room_between() -> None:
    attempts = [
        context.attempt for context in ScriptedWorkers(gone(), gone(), gone()).play().contexts
    ]
    assert attempts == [0, ATTEMPT_STRIDE, 2 * ATTEMPT_STRIDE, 3 * ATTEMPT_STRIDE]


def test_the_last_three_failed_workers_are_avoided() -> None:
    names = ["a", "a", "", "b", "c", "d"]
    workers = ScriptedWorkers(*(gone(name=name) for name in names)).play()
    assert [context.avoid for context in workers.contexts] == [
        (),
        ("a",),
        ("a",),
        ("a",),
        ("a", "b"),
        ("a", "b", "c"),
        ("b", "c", "d"),
    ]


def test_tokens_between_deaths_reset_the_count_of_deaths() -> None:
    workers = ScriptedWorkers(died(), died(), died([1]), died(), died([2]), died()).play()
    assert (workers.read.ids, workers.read.end) == ([1, 2], Finish("stop", completion_tokens=2))


def test_the_stop_token_of_a_resumed_answer_is_counted_once() -> None:
    workers = ScriptedWorkers(died([1, 2]), died([3]))
    workers.end = Finish("stop", completion_tokens=1, stop_token=9)
    assert workers.play().read.end == Finish("stop", completion_tokens=4, stop_token=9)


def test_a_silent_death_of_the_first_worker_counts() -> None:
    workers = ScriptedWorkers(died(), died(), died(), begins=False)
    with pytest.raises(PoisonedRequest):
        play_begun_later(workers)
    assert len(workers.times) == 3


def play_begun_later(workers: ScriptedWorkers) -> None:
    """Play with workers that send `begin`, except for the first."""
    original = workers.send

    async def send(request: GenerateRequest, context: Context, reply: Reply) -> None:
        workers.begins = bool(workers.times)
        await original(request, context, reply)

    workers.send = send  # type: ignore[method-assign]
    workers.play()


def test_all_tokens_of_a_call_are_passed_to_the_next_worker() -> None:
    workers = ScriptedWorkers(died([1, 2, 3], [4])).play()
    assert workers.requests[1].token_ids == pack_ids([5, 6, 7, 1, 2, 3, 4])
    assert workers.requests[1].stops.max_tokens == 16


def test_a_failure_after_the_finish_is_ignored() -> None:
    class Ended(ScriptedWorkers):
        async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
            await super().send(request, context, reply)
            raise WorkerFailed("died")

    workers = Ended().play()
    assert (len(workers.times), workers.read.end) == (1, Finish("stop"))


def test_a_prompt_beyond_the_next_context_raises() -> None:
    with pytest.raises(ContextLengthExceeded):
        ScriptedWorkers(died(), ((), ContextLengthExceeded("too long"))).play()


def test_an_answer_that_no_other_worker_can_go_on_with_fails_at_once() -> None:
    workers = ScriptedWorkers(died([1]), ((), Unsupported("no worker has grammars")))
    with pytest.raises(WorkerFailed, match="continue the answer: no worker has grammars"):
        workers.play()
    assert len(workers.times) == 2


def test_without_workers_the_router_is_retried_after_short_pauses() -> None:
    absent: Life = ((), NoWorkers("no worker"))
    pauses = ScriptedWorkers(died([1]), *[absent] * 30).play().pauses[1:]
    assert len(set(pauses)) > 20
    assert all(0.99 * INITIAL_BACKOFF_S < pause < 2.01 * INITIAL_BACKOFF_S for pause in pauses)


@pytest.mark.parametrize(
    ("lives", "reason"),
    [
        ([died()] * 3, "poisoned_request"),
        ([gone()] * 17, "limit"),
        ([died([1]), *[((), NoWorkers("no worker"))] * 1000], "no_workers"),
    ],
)
def test_failed_migrations_are_counted_by_reason(lives: list[Any], reason: str) -> None:
    workers = ScriptedWorkers(*lives)
    with pytest.raises(DynamoError):
        workers.play()
    line = f'dynamo_migrations_failed_total{{reason="{reason}"}} 1'
    assert line in workers.metrics.render()


def test_the_replacement_timeout_applies_once() -> None:
    workers = ScriptedWorkers(died([1]), *[((), NoWorkers("no worker"))] * 1000)
    with pytest.raises(WorkerFailed):
        workers.play()
    assert REPLACEMENT_TIMEOUT_S <= workers.times[-1] + 1e-6 < REPLACEMENT_TIMEOUT_S + 1.0

"""Migration when workers die: the reader gets the same tokens once, and right counts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dynamo.core.codec import pack_ids, unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import (
    ContextLengthExceeded,
    DynamoError,
    InstanceGone,
    InvalidRequest,
    MalformedAnswer,
    NoWorkers,
    Overloaded,
    PoisonedRequest,
    UpstreamFailed,
    WorkerDraining,
    WorkerFailed,
)
from dynamo.core.reply import Reply
from dynamo.core.text import TextDelta
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
    TextParameters,
)
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.migration import REPLACEMENT_TIMEOUT_S, Migration
from dynamo.scheduling.router import Decision, Policy, WorkerRouter
from dynamo.telemetry import Registry
from dynamo.testing.fakes import CollectedReply

CONTEXT = Context(request_id="r", timeout_s=100.0)
NEVER = 1 << 30


def request(max_tokens: int = 20, **stops: Any) -> GenerateRequest:
    return GenerateRequest(
        "r", "m", pack_ids([5, 6, 7]), SamplingParams(), StopConditions(max_tokens, **stops)
    )


class Worker:
    """A worker whose tokens are a function of all before them. Each call of `send` takes the next
    of `lives`: the number of tokens that it sends before it raises `error`."""

    def __init__(self, lives: Iterable[int], error: type[DynamoError] = WorkerFailed) -> None:
        self.lives = iter(lives)
        self.error = error
        self.requests: list[GenerateRequest] = []
        self.contexts: list[Context] = []
        self.names = "worker-1"

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.requests.append(request)
        self.contexts.append(context)
        left = next(self.lives, NEVER)
        known = list(unpack_ids(request.token_ids))
        if left >= 0:
            reply.begin(Started(self.names, prompt_tokens=len(known)))
        for _ in range(min(left, request.stops.max_tokens)):
            known.append(hash(tuple(known)) % 1000)
            if not reply.tokens((known[-1],)):
                return
        if left <= request.stops.max_tokens:
            error = self.error("died")
            if isinstance(error, WorkerFailed):
                error.instance = f"i{len(self.requests)}"
            raise error
        reply.finish(Finish("length", request.stops.max_tokens))


def expected(count: int) -> list[int]:
    known = [5, 6, 7]
    for _ in range(count):
        known.append(hash(tuple(known)) % 1000)
    return known[3:]


def migrate(
    worker: Any,
    token_request: GenerateRequest | None = None,
    reply: CollectedReply | None = None,
    *,
    limit: int = 16,
    metrics: Registry | None = None,
) -> CollectedReply:
    read = reply or CollectedReply()

    async def main(clock: VirtualClock) -> None:
        operator = Migration(clock, Random(1), metrics or Registry(), limit=limit)
        await operator.send(token_request or request(), CONTEXT, read, worker.send)

    run_in_virtual_time(main)
    return read


@given(st.lists(st.integers(1, 20), max_size=8))
def test_the_answer_does_not_depend_on_worker_deaths(lives: list[int]) -> None:
    read = migrate(Worker(lives))
    assert read.ids == expected(20)
    assert read.end == Finish("length", 20)


def test_the_next_worker_gets_the_sent_tokens_and_the_remaining_limits() -> None:
    worker = Worker([4, 3])
    migrate(worker, request(min_tokens=5))
    first, second, third = worker.requests
    assert second.token_ids == first.token_ids + pack_ids(expected(4))
    assert (second.resumed, second.stops.max_tokens, second.stops.min_tokens) == (4, 16, 1)
    assert (third.resumed, third.stops.max_tokens, third.stops.min_tokens) == (7, 13, 0)
    assert [resumed.priority for resumed in worker.requests] == [0, 1, 1]
    assert worker.contexts[2].avoid == ("i1", "i2")
    assert len({context.attempt for context in worker.contexts}) == 3


def test_a_reader_gets_one_begin() -> None:
    worker = Worker([4])
    read = migrate(worker)
    assert read.started == Started("worker-1", prompt_tokens=3)


def test_a_reader_that_wants_no_more_ends_the_request() -> None:
    worker = Worker([4])
    read = migrate(worker, reply=CollectedReply(token_limit=6))
    assert read.ids == expected(6)
    assert read.end is None


def test_a_complete_answer_without_a_finish_is_finished() -> None:
    worker = Worker([20])
    read = migrate(worker)
    assert len(worker.requests) == 1
    assert (read.ids, read.end) == (expected(20), Finish("length", 20))


def test_an_answer_that_fills_the_context_is_finished() -> None:
    class Full(Worker):
        async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
            if self.requests:
                raise ContextLengthExceeded("no room")
            await super().send(request, context, reply)

    read = migrate(Full([4]))
    assert (read.ids, read.end) == (expected(4), Finish("length", 4))


def test_a_request_that_kills_workers_is_stopped_at_the_third() -> None:
    worker = Worker([0] * 10)
    with pytest.raises(PoisonedRequest):
        migrate(worker)
    assert len(worker.requests) == 3


def test_three_deaths_at_the_same_token_are_poison() -> None:
    worker = Worker([7, 0, 0, 0])
    with pytest.raises(PoisonedRequest):
        migrate(worker)
    assert len(worker.requests) == 3


def test_a_request_that_was_not_admitted_is_not_poison() -> None:
    worker = Worker([0, -1, -1, -1, -1, 0])
    assert migrate(worker).ids == expected(20)


@pytest.mark.parametrize(("error", "attempts"), [(UpstreamFailed, 3), (MalformedAnswer, 2)])
def test_a_server_behind_a_worker_that_fails_is_no_death(
    error: type[DynamoError], attempts: int
) -> None:
    worker = Worker([0] * 10, error)
    with pytest.raises(error, match=r"^died$"):
        migrate(worker)
    assert len(worker.requests) == attempts
    assert migrate(Worker([3, 4, 1, 2], error)).ids == expected(20)


@pytest.mark.parametrize("error", [InstanceGone, WorkerDraining])
def test_a_worker_that_leaves_does_not_count_as_dead(error: type[DynamoError]) -> None:
    worker = Worker([0] * 6, error)
    assert migrate(worker).ids == expected(20)


def test_retries_are_bounded() -> None:
    worker = Worker([1] * 10)
    with pytest.raises(WorkerFailed, match="died"):
        migrate(worker, limit=4)
    assert len(worker.requests) == 5


def test_migration_can_be_turned_off() -> None:
    with pytest.raises(WorkerFailed):
        migrate(Worker([4]), limit=0)


def test_an_invalid_request_is_not_retried() -> None:
    worker = Worker([3], InvalidRequest)
    with pytest.raises(InvalidRequest):
        migrate(worker)
    assert len(worker.requests) == 1


class Absent(Worker):
    """A worker that is absent for `away` calls after its first failure."""

    def __init__(self, lives: Iterable[int], away: int) -> None:
        super().__init__(lives)
        self.away = away

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.requests and self.away > 0:
            self.away -= 1
            raise NoWorkers("no worker")
        await super().send(request, context, reply)


def test_a_request_waits_for_a_replacement_of_the_only_worker() -> None:
    assert migrate(Absent([4], away=40)).ids == expected(20)


def test_a_request_waits_while_its_replacement_has_too_many_unsent_bytes() -> None:
    class Stuffed(Worker):
        refusals = 5

        async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
            if self.requests and self.refusals:
                self.refusals -= 1
                raise Overloaded("70,000,000 bytes wait for the connection to the worker")
            await super().send(request, context, reply)

    assert migrate(Stuffed([4])).ids == expected(20)


def test_the_wait_for_a_replacement_is_bounded() -> None:
    with pytest.raises(WorkerFailed, match=f"{REPLACEMENT_TIMEOUT_S:g} s"):
        migrate(Absent([4], away=NEVER))


def test_without_workers_the_first_attempt_fails_at_once() -> None:
    class NoWorker:
        async def send(self, *_: Any) -> None:
            raise NoWorkers("no worker")

    with pytest.raises(NoWorkers):
        migrate(NoWorker())


def test_migrations_are_counted() -> None:
    metrics = Registry()
    migrate(Worker([4, 2]), metrics=metrics)
    assert 'dynamo_migrations_total{reason="worker_failed"} 2' in metrics.render()


def test_a_failed_worker_is_avoided_while_there_are_others() -> None:
    excluded: list[set[str]] = []

    class Two(Policy):
        async def choose(
            self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
        ) -> Decision:
            excluded.append(set(tried))
            names = [name for name in ("a", "b") if name not in tried]
            if not names:
                raise NoWorkers("none")
            return Decision(Instance(names[0], "x", "n", "c", "e"), "test", len(names))

    worker = Worker([4, 3])

    async def send(
        instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        try:
            await worker.send(request, context, reply)
        except WorkerFailed as error:
            error.instance = instance.id
            raise

    router = WorkerRouter(Two(), send)

    class Routed:
        async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
            await router.send(request, context, reply)

    assert migrate(Routed()).ids == expected(20)
    assert excluded == [set(), {"a"}, {"a", "b"}, set()]


class TextWorker:
    """Sends `lives` parts of text in a call, and dies."""

    def __init__(self, *lives: int) -> None:
        self.lives = [*lives]

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        del request, context
        reply.begin(Started())
        for number in range(self.lives.pop(0)):
            reply.text(TextDelta(f"{number}"))
        if self.lives:
            raise WorkerFailed("died")
        reply.finish(Finish("stop", 3, cached_tokens=16))


IN_TEXT = replace(request(), text=TextParameters(chat=True))


def test_an_answer_in_text_goes_to_another_worker_until_it_has_begun() -> None:
    read = migrate(TextWorker(0, 3), IN_TEXT)
    assert read.parts == [TextDelta("0"), TextDelta("1"), TextDelta("2")]
    assert read.end == Finish("stop", 3)
    with pytest.raises(WorkerFailed, match="died; an answer in text cannot continue"):
        migrate(TextWorker(2, 3), IN_TEXT)


class HeldText(CollectedReply):
    """A reply of whose text the client has nothing until it ends."""

    def restart(self) -> bool:
        self.parts.clear()
        return True


def test_an_answer_in_text_that_nobody_has_seen_begins_anew() -> None:
    read = migrate(TextWorker(2, 4, 3), IN_TEXT, HeldText())
    assert read.parts == [TextDelta("0"), TextDelta("1"), TextDelta("2")]
    assert read.end == Finish("stop", 3)
    with pytest.raises(PoisonedRequest):
        migrate(TextWorker(2, 2, 2, 3), IN_TEXT, HeldText())

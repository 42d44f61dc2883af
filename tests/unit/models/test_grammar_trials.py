"""Trials of new structured outputs: who waits for whom, and how long a trial may last."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event

import pytest

from dynamo.core.errors import Overloaded, SchemaTooComplex
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar import trial_lane
from dynamo.models.grammar.checker import (
    LARGE_NICENESS,
    SMALL_FORM_SIZE,
    SMALL_NICENESS,
    TRIAL_CPU_S,
    GrammarChecker,
    form_size,
)
from dynamo.models.grammar.trial_lane import MAX_WAITING, TrialLane
from dynamo.models.grammar.trial_process import Verdict

HOSTILE = StructuredOutput("regex", "(x{1000}){1000}")


def schema(name: str, words: int = 1) -> StructuredOutput:
    return StructuredOutput(
        "json_schema", json.dumps({"enum": [f"{name}{n}" for n in range(words)]})
    )


@pytest.fixture
async def checker(monkeypatch: pytest.MonkeyPatch) -> GrammarChecker:
    """A checker whose trials have time on a busy machine, too."""
    monkeypatch.setattr(trial_lane, "TRIAL_TIMEOUT_S", 60.0)
    return GrammarChecker()


@contextmanager
def stopped(lane: TrialLane) -> Iterator[None]:
    """Stop the process of a lane for a while."""
    assert lane.process is not None
    process = lane.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


class Trials:
    """Work in the thread of a lane, which waits until `free` is set. `order` has the names."""

    def __init__(self, lane: TrialLane, tasks: BackgroundTasks) -> None:
        self.lane = lane
        self.tasks = tasks
        self.begun, self.free = Event(), Event()
        self.order: list[str] = []

    async def occupy(self) -> asyncio.Task[Verdict]:
        """Start the first piece of work, of a caller of its own."""
        first = self.start("z", "z")
        await asyncio.to_thread(self.begun.wait)
        return first

    def start(self, caller: str, name: str) -> asyncio.Task[Verdict]:
        return self.tasks.start(self.lane.run(caller, partial(self._work, name)))

    def _work(self, name: str) -> Verdict:
        self.begun.set()
        self.free.wait()
        self.order.append(name)
        return Verdict(name)


async def test_small_forms_do_not_wait_for_large_ones(
    checker: GrammarChecker,
) -> None:
    await checker.check(schema("first", 1000))
    async with BackgroundTasks() as tasks:
        with stopped(checker._large):
            large = [tasks.start(checker.check(schema(f"l{n}", 1000))) for n in range(3)]
            hostile = tasks.start(checker.check(HOSTILE))
            for number in range(3):
                await checker.check(schema(f"s{number}"))
            assert not any(check.done() for check in (*large, hostile))
        for check in large:
            await check
        with pytest.raises(SchemaTooComplex):
            await hostile


@pytest.mark.parametrize(
    ("form", "small"),
    [
        (schema("a", 500), True),
        (schema("a", 1500), False),
        (StructuredOutput("regex", r"\d{4}-\d{2}-\d{2}|[a-z]{1,60}"), True),
        (HOSTILE, False),
        (StructuredOutput("regex", "(x{900000000000}){2}"), False),
        (StructuredOutput("json_schema", '{"type": "string", "pattern": "^(a{,900}b)*$"}'), False),
    ],
)
def test_repetitions_count_as_size(form: StructuredOutput, small: bool) -> None:
    assert (form_size(form.value) <= SMALL_FORM_SIZE) is small


async def test_a_small_form_that_takes_long_is_tried_again_as_a_large_one(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.models.grammar.checker.SMALL_FORM_SIZE", 1 << 20)
    checker._small = TrialLane(SMALL_NICENESS, 0.001)
    for _ in range(2):
        with pytest.raises(SchemaTooComplex) as caught:
            await checker.check(HOSTILE)
        assert "more than 1 ms" not in caught.value.message
    assert checker._large.process is not None


async def test_callers_take_turns() -> None:
    names = ["a0", "a1", "a2", "a3", "b0", "c0", "b1"]
    async with BackgroundTasks() as tasks:
        trials = Trials(TrialLane(LARGE_NICENESS, TRIAL_CPU_S), tasks)
        first = await trials.occupy()
        checks = [trials.start(name[0], name) for name in names]
        await asyncio.sleep(0)  # all of them wait now
        checks[1].cancel()
        await asyncio.wait([checks[1]])
        trials.free.set()
        assert await first == Verdict("z")
        verdicts = await asyncio.gather(*checks, return_exceptions=True)
    assert isinstance(verdicts.pop(1), asyncio.CancelledError)
    assert verdicts == [Verdict(name) for name in names if name != "a1"]
    assert trials.order == ["z", "a0", "b0", "c0", "b1", "a2", "a3"]


async def test_a_caller_with_too_many_forms_is_refused_alone() -> None:
    async with BackgroundTasks() as tasks:
        trials = Trials(TrialLane(LARGE_NICENESS, TRIAL_CPU_S), tasks)
        await trials.occupy()
        checks = [trials.start("a", str(number)) for number in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await trials.lane.run("a", Verdict)
        other = trials.start("b", "b")
        trials.free.set()
        assert await other == Verdict("b")
        await asyncio.gather(*checks)


async def test_a_trial_without_cpu_time_ends_and_the_next_one_goes_on(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(schema("a"))
    monkeypatch.setattr(trial_lane, "TRIAL_TIMEOUT_S", 0.05)
    assert checker._small.process is not None
    os.kill(checker._small.process.pid, signal.SIGSTOP)
    with pytest.raises(Overloaded, match="in time"):
        await checker.check(schema("b"))
    monkeypatch.setattr(trial_lane, "TRIAL_TIMEOUT_S", 60.0)
    await checker.check(schema("b"))


async def test_a_form_is_tried_beside_a_thousand_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        first = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, first)
        while (copy := os.dup(first)) < 1024:
            stack.callback(os.close, copy)
        stack.callback(os.close, copy)
        await GrammarChecker().check(schema("many"))


async def test_the_pipes_of_a_dead_process_are_closed(checker: GrammarChecker) -> None:
    await checker.check(schema("first"))
    process = checker._small.process
    assert process is not None
    assert process.stdin is not None
    process.kill()
    process.wait()
    await checker.check(schema("second"))
    assert process.stdin.closed

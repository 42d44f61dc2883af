"""The watchdog in virtual time, and with tiny real children."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from dynamo.core.host.pids import start_ticks
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.runtime.deployment import ChildStatus, Deployment, ProcessRecord
from dynamo.runtime.processes import watchdog as watchdog_module
from dynamo.runtime.processes.child import HUNG_EXIT_TEXT
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.runtime.processes.watchdog import (
    HUNG_AFTER_S,
    KILL_AFTER_S,
    MAX_LATENESS_S,
    PING_INTERVAL_S,
    Watchdog,
    watch_children,
)

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]


class FakeChild:
    """Answers pings with a delay until `hangs_at`. `events` are state changes with their times."""

    def __init__(self, clock: VirtualClock, hangs_at: float = 1e9, delay_s: float = 0.0) -> None:
        self._clock = clock
        self._hangs_at = hangs_at
        self._delay_s = delay_s
        self.watchdog = Watchdog()
        self.watchdog.on_answer()
        self.hung_at = self.expired_at = 0.0

    def check_event_loop(self) -> None:
        now = self._clock.now()
        if self.watchdog.tick(now) and now < self._hangs_at:
            self._clock.call_at(now + self._delay_s, self.watchdog.on_answer)
        if self.watchdog.hung:
            self.hung_at = self.hung_at or now
        if self.watchdog.expired:
            self.expired_at = self.expired_at or now


def watch(child: Callable[[VirtualClock], FakeChild], duration_s: float) -> FakeChild:
    async def main(clock: VirtualClock) -> FakeChild:
        watched = child(clock)
        async with BackgroundTasks() as tasks:
            tasks.start(watch_children([watched], clock))
            await clock.sleep(duration_s)
        return watched

    return run_in_virtual_time(main)


def test_a_loop_that_stops_answering_is_reported_and_killed() -> None:
    child = watch(lambda clock: FakeChild(clock, hangs_at=10.0), 30.0)
    assert 10.0 + HUNG_AFTER_S <= child.hung_at <= 10.0 + HUNG_AFTER_S + 2 * PING_INTERVAL_S
    assert 10.0 + KILL_AFTER_S <= child.expired_at <= 10.0 + KILL_AFTER_S + 2 * PING_INTERVAL_S


def test_a_busy_loop_that_answers_within_the_limit_is_never_killed() -> None:
    child = watch(lambda clock: FakeChild(clock, delay_s=KILL_AFTER_S - 0.1), 120.0)
    assert child.hung_at
    assert child.expired_at == 0.0


def test_a_process_is_not_watched_before_its_first_answer() -> None:
    watchdog = Watchdog()
    assert not any(watchdog.tick(number * PING_INTERVAL_S) for number in range(100))
    assert not watchdog.hung


def test_a_supervisor_that_did_not_run_does_not_count_the_time() -> None:
    """Everything is stopped by SIGSTOP for an hour, and the supervisor continues first."""
    watchdog = Watchdog()
    watchdog.on_answer()
    ticks = round(KILL_AFTER_S / PING_INTERVAL_S)
    for number in range(ticks):
        watchdog.tick(number * PING_INTERVAL_S)
    assert watchdog.hung
    assert not watchdog.expired
    resumed_at = ticks * PING_INTERVAL_S + 3600.0
    for number in range(ticks):
        watchdog.tick(resumed_at + number * PING_INTERVAL_S)
    assert not watchdog.expired
    watchdog.tick(resumed_at + ticks * PING_INTERVAL_S)
    assert watchdog.expired


def test_a_slow_supervisor_counts_ticks_instead_of_seconds() -> None:
    watchdog = Watchdog()
    watchdog.on_answer()
    step_s = PING_INTERVAL_S + MAX_LATENESS_S / 2
    for number in range(round(KILL_AFTER_S / PING_INTERVAL_S)):
        watchdog.tick(number * step_s)
    assert not watchdog.expired


ANSWER = """
tell(state="ready", key="/_processes/worker/1")
os.write(0, b'"alive"\\n')
while b"ping" in os.read(0, 100): os.write(0, b'"alive"\\n')
"""


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the watchdog about ten times as fast."""
    monkeypatch.setattr(watchdog_module, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(watchdog_module, "HUNG_AFTER_S", 0.2)
    monkeypatch.setattr(watchdog_module, "KILL_AFTER_S", 0.8)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.usefixtures("fast")
async def test_a_hung_child_is_shown_and_replaced(
    spec: Spec, supervise: Supervise, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = supervise(spec(ANSWER))
    (child,) = supervisor.children
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        await asyncio.sleep(0.3)
        assert child.unhealthy_reason == ""
        first = child.pid
        os.kill(first, signal.SIGSTOP)
        await until(lambda: child.hung)
        assert "does not answer" in child.unhealthy_reason
        await until(lambda: child_status(deployment, first) == ChildStatus(hung=True))
        await until(lambda: child.pid not in {0, first} and child.ready)
        assert child.last_exit == HUNG_EXIT_TEXT
        await until(lambda: child_status(deployment, child.pid) == ChildStatus(restarts=1))
        supervisor.stop()
        assert await running == 0
    assert "its event loop does not answer" in caplog.text


@pytest.mark.usefixtures("fast")
async def test_a_child_that_continues_in_time_is_kept(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    supervisor = supervise(spec(ANSWER))
    (child,) = supervisor.children
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        first = child.pid
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGSTOP)
        await until(lambda: child.hung)
        os.kill(first, signal.SIGCONT)
        await until(lambda: not child.hung)
        await until(lambda: child_status(deployment, first) is None)
        assert child.pid == first
        supervisor.stop()
        assert await running == 0


def child_status(deployment: Deployment, pid: int) -> ChildStatus | None:
    """Return what the record of the supervisor tells of a child, if anything."""
    return deployment.live_processes()[0].children.get(pid)


def test_ps_shows_which_processes_hang(deployment: Deployment) -> None:
    def write(role: str, pid: int, **fields: object) -> None:
        ticks = start_ticks(pid)
        values = {"deployment": deployment.id, "role": role, "name": role, "instance": role}
        record = values | {"pid": pid, "start_ticks": ticks, "state": "ready"} | fields
        deployment.write_record(ProcessRecord(**record))  # type: ignore[arg-type]

    deployment.create_folder()
    write("worker", os.getpid())
    write("supervisor", os.getppid(), children={os.getpid(): ChildStatus(hung=True, restarts=2)})
    supervisor, worker = deployment.live_processes()
    assert (worker.state, worker.restarts) == ("hung", 2)
    assert (supervisor.state, supervisor.restarts) == ("ready", 0)

"""The supervisor with tiny real children: readiness, logs, restarts, stopping."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import STATE_ROOT_VARIABLE, Deployment, ProcessRecord
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.exit_status import describe_exit
from dynamo.runtime.processes.supervisor import PrefixedLogWriter, Supervisor

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]

SERVE = 'tell(state="ready"); signal.pause()'
PRINT_ON_SIGTERM = """
signal.signal(signal.SIGTERM, lambda *_: (print("leaving", start["name"], flush=True), os._exit(0)))
"""


async def finish(supervisor: Supervisor, running: asyncio.Task[int]) -> int:
    supervisor.stop()
    return await running


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_it_is_ready_when_all_serve_and_stops_them_in_order(
    spec: Spec, supervise: Supervise
) -> None:
    out = io.StringIO()
    supervisor = supervise(
        spec(PRINT_ON_SIGTERM + SERVE, "worker", 1),
        spec(PRINT_ON_SIGTERM + SERVE, "frontend", 0),
        out=out,
    )
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        pids = [child.pid for child in supervisor.children]
        assert await finish(supervisor, running) == 0
    assert out.getvalue().splitlines() == [
        "frontend | leaving frontend",
        "worker   | leaving worker",
    ]
    assert not any(map(alive, pids))


async def test_its_record_shows_its_state(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    supervisor = supervise(spec(SERVE), address="http://127.0.0.1:1")
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        await until(lambda: [record.state for record in deployment.live_processes()] == ["ready"])
        (record,) = deployment.live_processes()
        assert (record.role, record.pid) == ("supervisor", os.getpid())
        await finish(supervisor, running)
    assert deployment.live_processes() == []


async def test_a_killed_child_is_restarted_and_its_group_killed(
    spec: Spec, supervise: Supervise
) -> None:
    script = """
import subprocess
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
"""
    out = io.StringIO()
    supervisor = supervise(spec(script + SERVE), out=out)
    (child,) = supervisor.children
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        first = child.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.pid not in {0, first} and child.ready)
        await finish(supervisor, running)
    left_behind = [int(line.rsplit(" ", 1)[1]) for line in out.getvalue().splitlines()]
    assert len(left_behind) == 2
    await until(lambda: not any(map(alive, left_behind)))


async def test_a_process_that_keeps_the_output_of_a_dead_child_delays_nothing(
    spec: Spec, supervise: Supervise
) -> None:
    """The process has a session of its own and is not killed with the group of the child."""
    script = """
import subprocess
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
print("unfinished", end="", flush=True)
"""
    out = io.StringIO()
    supervisor = supervise(spec(script + SERVE), out=out)
    (child,) = supervisor.children
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        first = child.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.pid not in {0, first} and child.ready)
        await finish(supervisor, running)
    keepers = [line.rsplit(" ", 1)[1] for line in out.getvalue().splitlines()]
    for keeper in map(int, keepers[::2]):
        os.kill(keeper, signal.SIGKILL)
    assert keepers[1::2] == ["unfinished", "unfinished"]


async def test_a_restarted_child_has_its_own_cards_again(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    script = 'print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)\n' + SERVE
    children = [replace(spec(script, name=name), cards=(name, f"{name}+")) for name in ("0", "2")]
    out = io.StringIO()
    supervisor = supervise(*children, out=out)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        second = supervisor.children[1]
        first = second.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: second.pid not in {0, first} and second.ready)
        (record,) = deployment.live_processes()
        assert record.cards_by_name == {"0": ("0", "0+"), "2": ("2", "2+")}
        await finish(supervisor, running)
    lines = sorted(line for line in out.getvalue().splitlines() if "+" in line)
    assert lines == ["0 | 0,0+", "2 | 2,2+", "2 | 2,2+"]


async def test_a_child_that_can_never_start_ends_the_deployment(
    spec: Spec, supervise: Supervise
) -> None:
    supervisor = supervise(
        spec('tell(fatal="no such model", hint="look", code=2); sys.exit(2)', "worker"),
        spec(SERVE, "frontend"),
    )
    assert await supervisor.run() == 2
    assert supervisor.failure is not None
    assert (supervisor.failure.fatal, supervisor.failure.hint) == ("no such model", "look")
    assert not supervisor.ready.is_set()


async def test_a_crash_loop_is_logged_as_an_error(
    spec: Spec,
    supervise: Supervise,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynamo.runtime.processes.restart_backoff.RESTART_DELAY_S", 0.001)
    supervisor = supervise(spec("sys.exit(7)"))
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await until(lambda: any(record.levelname == "ERROR" for record in caplog.records))
        await finish(supervisor, running)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert errors[0].fields["deaths"] == 5  # type: ignore[attr-defined]
    assert errors[0].fields["exit"] == "exit 7"  # type: ignore[attr-defined]


IGNORE_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
PAUSE_FOREVER = "\nwhile True: signal.pause()"


async def test_a_second_signal_kills(spec: Spec, supervise: Supervise) -> None:
    supervisor = supervise(spec(IGNORE_SIGTERM + SERVE + PAUSE_FOREVER), drain_s=1000)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        pid = supervisor.children[0].pid
        supervisor.stop()
        supervisor.stop()
        assert await running == 0
    assert not alive(pid)


async def test_a_full_disk_does_not_prevent_draining(
    spec: Spec, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Deployment.write_record

    def write_to_full_disk(deployment: Deployment, record: ProcessRecord) -> None:
        if record.state == "draining":
            raise ConfigError("no room")
        write(deployment, record)

    monkeypatch.setattr(Deployment, "write_record", write_to_full_disk)
    out = io.StringIO()
    supervisor = supervise(spec(PRINT_ON_SIGTERM + SERVE, "worker"), out=out)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        assert await finish(supervisor, running) == 0
    assert out.getvalue() == "worker | leaving worker\n"


async def test_stopping_logs_that_a_second_signal_kills(
    spec: Spec, supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    supervisor = supervise(spec(SERVE))
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        await finish(supervisor, running)
    assert "a second Ctrl-C" in caplog.text


async def test_children_get_the_state_root_of_their_supervisor(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    out = io.StringIO()
    script = f"print(os.environ[{STATE_ROOT_VARIABLE!r}], flush=True);"
    supervisor = supervise(spec(script + SERVE), out=out)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        await finish(supervisor, running)
    assert out.getvalue() == f"child | {deployment.folder.parent}\n"


async def test_a_secret_without_tls_beyond_loopback_is_reported(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    base = Settings()
    runtime = replace(base.runtime, plane_host="0.0.0.0")
    security = replace(base.security, secret="0123456789abcdef")
    supervisor = Supervisor([], deployment, replace(base, runtime=runtime, security=security))
    async with BackgroundTasks() as tasks:
        await finish(supervisor, tasks.start(supervisor.run()))
    assert caplog.text.count("neither hidden nor protected against alteration") == 1


async def test_a_child_that_ignores_sigterm_is_killed(
    spec: Spec, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime.processes.process_group.KILL_GRACE_S", 0.0)
    supervisor = supervise(spec(IGNORE_SIGTERM + SERVE + PAUSE_FOREVER), drain_s=0.05)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        pid = supervisor.children[0].pid
        await finish(supervisor, running)
    assert not alive(pid)


async def test_long_and_broken_lines_are_logged(spec: Spec, supervise: Supervise) -> None:
    out = io.StringIO()
    script = 'print("x" * 200000, flush=True); os.write(1, b"caf\\xc3"); sys.exit(0)'
    supervisor = supervise(spec(script), out=out)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await until(lambda: "caf" in out.getvalue())
        await finish(supervisor, running)
    assert out.getvalue().count("x") >= 200000


def test_prefixes_are_coloured_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, coloured = io.StringIO(), Terminal()
    PrefixedLogWriter(["a", "long"], plain)("a", b"text")
    PrefixedLogWriter(["a", "long"], coloured)("a", b"text")
    assert plain.getvalue() == "a    | text\n"
    assert "\x1b[36m" in coloured.getvalue()


def test_json_lines_get_no_prefix() -> None:
    out = io.StringIO()
    PrefixedLogWriter(["a"], out, bare=True)("a", b"{}")
    assert out.getvalue() == "{}\n"


def test_lines_of_children_are_escaped() -> None:
    out = io.StringIO()
    PrefixedLogWriter(["a"], out)("a", "\x1b]0;owned\x07\u202e é\r".encode() + b"\xff")
    assert out.getvalue() == "a | \\x1b]0;owned\\x07\\u202e é\\r\ufffd\n"


def test_exit_codes_are_described() -> None:
    assert describe_exit(2) == "exit 2"
    assert describe_exit(-9) == "SIGKILL"


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from dynamo.core.settings import Settings
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.exit_status import describe_exit
from dynamo.runtime.processes.supervisor import Supervisor, run_supervisor

CHILD = '''
import os, sys
from dynamo.runtime.processes.parent_pipe import ChildReport, ParentPipe
pipe = ParentPipe.from_stdin()
if sys.argv[1] == "prctl":
    pipe.die_with_parent()
    import signal; pipe.send_report(ChildReport(state="ready")); signal.pause()
else:
    import asyncio
    async def main():
        pipe.watch_parent(asyncio.get_running_loop(), lambda: os._exit(1))
        pipe.send_report(ChildReport(state="ready"))
        await asyncio.Event().wait()
    asyncio.run(main())
'''
specs = [ChildSpec(role="service", name=mode, settings=Settings(),
                     command=(sys.executable, "-c", CHILD, mode)) for mode in ("prctl", "eof")]

async def main():
    supervisor = Supervisor(specs, Deployment("t", Path(sys.argv[1])), Settings())
    asyncio.get_running_loop().create_task(announce(supervisor))
    return await supervisor.run()

async def announce(supervisor):
    await supervisor.ready.wait()
    print(*[child.pid for child in supervisor.children], flush=True)

sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_the_supervisor(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "t")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(pids) == 2
        supervisor.send_signal(number)
        assert supervisor.wait() == (-9 if number == signal.SIGKILL else 0)
    while any(map(alive, pids)):
        os.sched_yield()

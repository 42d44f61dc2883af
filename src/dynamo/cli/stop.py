"""`dynamo stop`: end a deployment in good order, and wait until it is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, DeadlineExceeded, NotFound

if TYPE_CHECKING:
    from dynamo.runtime.deployment import Deployment, ProcessRecord

STOP_HINT = "name one of: {}; or --all"

EXAMPLES = """\
  dynamo stop                  the only deployment that runs
  dynamo stop 8000             the one on this port
  dynamo stop http-8000        the one of this name
  dynamo stop --all --now      everything, without draining"""


def parser() -> Parser:
    """Which deployment, and how."""
    made = Parser("dynamo stop", "Stop a deployment: no new requests, drain, end.", EXAMPLES)
    made.add_argument("which", nargs="?", metavar="DEPLOYMENT|PORT", help="name or HTTP port")
    made.add_argument("--all", action="store_true", help="every deployment of yours")
    made.add_argument("--now", action="store_true", help="do not wait for requests in flight")
    made.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="give up after (default: 60)"
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Stop and wait."""
    found = parser().parse(arguments)

    from dynamo.runtime.deployment import live_deployments

    running = live_deployments()
    for deployment in running if found.all else select_deployments(running, found.which, STOP_HINT):
        stop(deployment, now=found.now, timeout_s=found.timeout)
        print(f"stopped {deployment.id}")
    return 0


def select_deployments(
    running: Sequence[Deployment], which: str | None, how: str = "--deployment names one of: {}"
) -> Sequence[Deployment]:
    """The deployments meant. `how`: to say which. Raises `ConfigError` where that is not clear,
    `NotFound`."""
    names = ", ".join(one.id for one in running)
    if which is None:
        if len(running) > 1:
            raise ConfigError("several deployments run", hint=how.format(names))
        if not running:
            raise NotFound("no deployment runs", hint="`dynamo ps` lists what runs")
        return running
    chosen = [one for one in running if which in {one.id, one.id.removeprefix("http-")}]
    chosen = chosen or [one for one in running if _http_port(one) == which]
    if not chosen:
        hint = f"running: {names}" if names else "no deployment runs"
        raise NotFound(f"no deployment is called {which!r}", hint=hint)
    return chosen


def stop(deployment: Deployment, *, now: bool, timeout_s: float) -> None:
    """Signal every process that none of the others started, and wait for the end of all."""
    from dynamo.runtime.pids import ancestors

    processes = deployment.live_processes()
    known = {one.pid for one in processes}
    heads = [one for one in processes if known.isdisjoint(ancestors(one.pid))]
    with contextlib.ExitStack() as watched:
        ends = [end for one in processes if (end := _open_pidfd(one, watched)) is not None]
        for head in heads:
            _send_signal(head, signal.SIGTERM)
            if now:
                _send_signal(head, signal.SIGINT)
        if not _wait_for_exits(ends, timeout_s):
            raise DeadlineExceeded(
                f"{deployment.id} still runs after {timeout_s:g} s",
                hint="requests are in flight: wait longer with --timeout, or end them with --now",
            )


def _send_signal(process: ProcessRecord, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _open_pidfd(process: ProcessRecord, stack: contextlib.ExitStack) -> int | None:
    """A descriptor that becomes readable when the process ends."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _wait_for_exits(ends: Iterable[int], timeout_s: float) -> bool:
    """Whether all have become readable in time."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    left = set(ends)
    for end in left:
        poll.register(end, select.POLLIN)
    while left and (rest_s := deadline - time.monotonic()) > 0:
        for end, _ in poll.poll(rest_s * 1000):
            poll.unregister(end)
            left.discard(end)
    return not left


def _http_port(deployment: Deployment) -> str:
    for process in deployment.live_processes():
        if process.address.startswith("http"):
            return process.address.rstrip("/").rpartition(":")[2]
    return ""

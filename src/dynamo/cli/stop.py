"""`dynamo stop`: stop a deployment and wait until its processes have ended."""

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
  dynamo stop                  the only running deployment
  dynamo stop 8000             the deployment on this port
  dynamo stop http-8000        the deployment of this name
  dynamo stop --all --now      everything, without draining"""


def parser() -> Parser:
    """Return the parser: the deployment and how to stop it."""
    parser = Parser("dynamo stop", "Stop a deployment after its requests in flight.", EXAMPLES)
    parser.add_argument(
        "deployment",
        nargs="?",
        metavar="DEPLOYMENT|PORT",
        help="name or HTTP port, or the folder that `dynamo ps` shows",
    )
    parser.add_argument("--all", action="store_true", help="stop all your deployments")
    parser.add_argument("--now", action="store_true", help="do not wait for requests in flight")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="give up after (default: 60)"
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Stop the chosen deployments and wait."""
    args = parser().parse(arguments)

    from dynamo.runtime.deployment import live_deployments

    running = live_deployments()
    for deployment in (
        running if args.all else select_deployments(running, args.deployment, STOP_HINT)
    ):
        stop(deployment, now=args.now, timeout_s=args.timeout)
        print(f"stopped {deployment.id}")
    return 0


def select_deployments(
    running: Sequence[Deployment],
    name_or_port: str | None,
    hint: str = "--deployment names one of: {}",
) -> Sequence[Deployment]:
    """Return the deployments with this name or port, or the only running one for None. Raises
    `ConfigError` with `hint` if several run and none is named, else `NotFound`."""
    names = ", ".join(deployment.id for deployment in running)
    if name_or_port is None:
        if len(running) > 1:
            raise ConfigError("several deployments are running", hint=hint.format(names))
        if not running:
            raise NotFound("no deployment is running", hint="`dynamo ps` lists deployments")
        return running
    ids = {name_or_port, f"http-{name_or_port}"}
    chosen = [deployment for deployment in running if deployment.id in ids] or [
        deployment for deployment in running if _http_port(deployment) == name_or_port
    ]
    if not chosen:
        hint = f"running: {names}" if names else "no deployment is running"
        raise NotFound(f"no deployment {name_or_port!r}", hint=hint)
    return chosen


def find_server_url(name_or_port: str | None, roles: Sequence[str] = ("frontend", "router")) -> str:
    """Return the URL of the HTTP port of a deployment of this user on this host: the one of this
    name or port, or the only one. `roles`: whose port. Raises `ConfigError` and `NotFound`."""
    from dynamo.runtime.deployment import live_deployments

    running = live_deployments()
    if not running and name_or_port is None:
        raise NotFound("no deployment is running", hint="start one, or give the URL of a server")
    (deployment,) = select_deployments(running, name_or_port)
    for process in deployment.live_processes():
        if process.role in roles and process.address.startswith("http"):
            return process.address
    if "observer" in roles:
        hint = "start it without --no-observer; --url names an observer elsewhere"
        raise NotFound(f"{deployment.id} has no observer", hint=hint)
    raise NotFound(f"{deployment.id} has no HTTP port", hint="give the URL of a server")


def stop(deployment: Deployment, *, now: bool, timeout_s: float) -> None:
    """Signal the processes that have no ancestor in the deployment, and wait until all have ended.
    Raises `DeadlineExceeded`."""
    from dynamo.core.host.pids import ancestors

    processes = deployment.live_processes()
    pids = {process.pid for process in processes}
    roots = [process for process in processes if pids.isdisjoint(ancestors(process.pid))]
    with contextlib.ExitStack() as stack:
        pidfds = {
            process.pid: pidfd
            for process in processes
            if (pidfd := _open_pidfd(process, stack)) is not None
        }
        for root in roots:
            if root.pid in pidfds:
                _send_signal(pidfds[root.pid], signal.SIGTERM)
                if now:
                    _send_signal(pidfds[root.pid], signal.SIGINT)
        if not _wait_for_exits(pidfds.values(), timeout_s):
            raise DeadlineExceeded(
                f"{deployment.id} still runs after {timeout_s:g} s",
                hint="requests are in flight: wait longer with --timeout, or end them with --now",
            )


def _send_signal(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _open_pidfd(process: ProcessRecord, stack: contextlib.ExitStack) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if it has ended, or
    if another process has its pid now."""
    from dynamo.core.host.pids import is_alive

    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor if is_alive(process.pid, process.start_ticks) else None


def _wait_for_exits(pidfds: Iterable[int], timeout_s: float) -> bool:
    """Return True once all descriptors are readable, False after the timeout."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    running = set(pidfds)
    for pidfd in running:
        poll.register(pidfd, select.POLLIN)
    while running and (remaining_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(remaining_s * 1000):
            poll.unregister(pidfd)
            running.discard(pidfd)
    return not running


def _http_port(deployment: Deployment) -> str:
    for process in deployment.live_processes():
        if process.address.startswith("http"):
            return process.address.rstrip("/").rpartition(":")[2]
    return ""

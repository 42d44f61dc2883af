"""TrialLane: tries structured outputs one at a time in a process, whose callers take turns."""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.errors import DECODE_ERRORS, Overloaded
from dynamo.models.grammar.trial_process import Verdict, read_message, write_message

if TYPE_CHECKING:
    from concurrent.futures import Executor

MAX_WAITING = 64
"""So many new structured outputs of one caller may wait for their trial."""
TRIAL_TIMEOUT_S = 10.0
"""A trial without a result after this time has failed for want of CPU time."""

Work = Callable[[], Verdict]


class TrialLane:
    """Runs trials in a thread and a process, which the first structured output starts. The process
    has a niceness and `cpu_s` of CPU time for each trial, and ends with the lane."""

    def __init__(self, niceness: int, cpu_s: float) -> None:
        self._arguments = (str(niceness), str(cpu_s))
        self._waiting: OrderedDict[str, deque[tuple[Future[Verdict], Work]]] = OrderedDict()
        self._lock = Lock()
        self._thread: Executor | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], object] = lambda: None

    async def run(self, caller: str, work: Work) -> Verdict:
        """Run `work` in the thread, after one piece of work of each other caller at most. Raises
        `Overloaded` where too much work of the caller waits."""
        future: Future[Verdict] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(caller, deque())
            if len(waiting) >= MAX_WAITING:
                raise Overloaded("too many new structured outputs wait for their check")
            waiting.append((future, work))
        if self._thread is None:
            from concurrent.futures import ThreadPoolExecutor

            self._thread = ThreadPoolExecutor(1, "structured outputs")
        self._thread.submit(self._run_next)
        return await asyncio.wrap_future(future)

    def _run_next(self) -> None:
        """Run the work of the caller whose turn is longest ago. A caller that was cancelled while
        its work runs leaves the thread busy until the end."""
        with self._lock:
            caller, waiting = self._waiting.popitem(last=False)
            future, work = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)

    def try_output(self, encoded: bytes) -> Verdict:
        """Ask the process, in the thread. Raises `Overloaded`."""
        if self.process is None or self.process.poll() is not None:
            self._end_process()
            self.process = _start_process(*self._arguments)
            self._end_process = weakref.finalize(self, _stop_process, self.process)
        process = self.process
        outgoing, incoming = process.stdin, process.stdout
        try:
            if outgoing and incoming:
                write_message(outgoing, encoded)
                poll = select.poll()  # `select.select` ends at descriptor 1024
                poll.register(incoming, select.POLLIN)
                if poll.poll(TRIAL_TIMEOUT_S * 1e3):
                    return _decode_verdict(read_message(incoming) or b"")
        except (OSError, *DECODE_ERRORS):
            pass  # the process has died
        self._end_process()
        raise Overloaded("the structured output could not be checked in time")


_decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def _start_process(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dynamo.models.grammar.trial_process", *arguments]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # The log pipe of this process is not inherited: its end tells the supervisor of a death.
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, bufsize=0)  # noqa: S603


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()

"""A few threads that share the work between two matrix products, where NumPy itself uses one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

ThreadJob = Callable[[], None]


class _WorkerThread:
    """One thread: takes a job, says when it is done."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="native-crew", daemon=True)
        self._thread.start()

    def submit(self, job: ThreadJob) -> None:
        self._jobs.put(job)

    def wait(self) -> BaseException | None:
        return self._done.get()

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        import numpy as np

        with np.errstate(over="ignore"):
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
                    self._done.put(error)
                else:
                    self._done.put(None)


class ThreadPool:
    """`threads` threads in all, the caller being one of them. Used from one thread at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._worker_threads = [_WorkerThread() for _ in range(threads - 1)]

    def run_jobs(self, jobs: Sequence[ThreadJob]) -> None:
        """Run up to `threads` jobs side by side; raises the first error when all are done."""
        helpers = self._worker_threads[: len(jobs) - 1]
        for helper, job in zip(helpers, jobs[1:], strict=True):
            helper.submit(job)
        errors: list[BaseException | None] = []
        try:
            jobs[0]()
        finally:
            errors = [helper.wait() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error

    def split_rows(self, count: int, least: int, work: Callable[[int, int], None]) -> None:
        """Call `work(low, high)` over `count` rows, on more than one thread when each would have
        at least `least` rows."""
        parts = min(self.threads, count // least) if least else self.threads
        if parts < 2:
            work(0, count)
            return
        borders = [count * part // parts for part in range(parts + 1)]
        self.run_jobs([partial(work, low, high) for low, high in pairwise(borders)])

    def stop(self) -> None:
        """End the threads."""
        for helper in self._worker_threads:
            helper.stop()
        self._worker_threads = []

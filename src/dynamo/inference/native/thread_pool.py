"""A few threads that share the work around the matrix products, for which NumPy uses one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

ThreadJob = Callable[[], None]


class _WorkerThread:
    """A thread that runs one job at a time and reports its end."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="native-pool", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        import numpy as np

        with np.errstate(over="ignore"):
            while (job := self.jobs.get()) is not None:
                try:
                    job()
                except BaseException as error:  # noqa: BLE001 - run_jobs raises it again
                    self.done.put(error)
                else:
                    self.done.put(None)
                del job  # holds weights, which may be given back meanwhile


class ThreadPool:
    """A pool of `threads` threads, one of which is the caller. Only one thread may call it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._worker_threads = [_WorkerThread() for _ in range(threads - 1)]

    def run_jobs(self, jobs: Sequence[ThreadJob]) -> None:
        """Run up to `threads` jobs at the same time. Raises the first error when all have ended."""
        workers = self._worker_threads[: len(jobs) - 1]
        for worker, job in zip(workers, jobs[1:], strict=True):
            worker.jobs.put(job)
        try:
            jobs[0]()
        finally:
            errors = [worker.done.get() for worker in workers]
        for error in errors:
            if error is not None:
                raise error

    def split_rows(self, count: int, min_rows: int, work: Callable[[int, int], None]) -> None:
        """Call `work(low, high)` over `count` rows, on several threads if each gets `min_rows`
        rows."""
        parts = min(self.threads, count // min_rows) if min_rows else self.threads
        if parts < 2:
            work(0, count)
            return
        borders = [count * part // parts for part in range(parts + 1)]
        self.run_jobs([partial(work, low, high) for low, high in pairwise(borders)])

    def stop(self) -> None:
        """Stop the threads."""
        for worker in self._worker_threads:
            worker.stop()
        self._worker_threads = []

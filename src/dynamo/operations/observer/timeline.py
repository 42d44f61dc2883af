"""Samples of every worker's cache and load over time, one series for each worker."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from dynamo.core.values import Load
from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE

SAMPLE_INTERVAL_S = 1.0
KEPT_S = 900.0
RECENT_S = 15.0
"""All samples of the last seconds are kept. Older ones are kept at multiples of a step."""
STEPS_S = (1, 5, 10, 30, 60, 300)
"""Steps between older samples. Each divides the next."""
MAX_WORKER_SAMPLES = 24_000
"""Samples times workers. A larger fleet has fewer old samples: 512 workers have one in 30 s."""

VIEWS = ("", "exact", "stale", "approximate", NO_PREFIX_CACHE)
"""Cache views by their number in samples, best first."""
LOAD_COLUMNS = (
    "running", "waiting", "prefill_tokens", "active_blocks", "cached_blocks", "total_blocks",
)  # fmt: skip
"""Columns of `Load`."""
COUNT_COLUMNS = ("sent", "routed")
"""`sent`: requests of this router at the worker. `routed`: requests routed to the worker since the
sample before."""

_NO_LOAD = Load()


class TimelineSample(NamedTuple):
    """All workers at the Unix time `at`. `waiting` counts requests held in the router. Each of
    `columns` has a number for each of the sorted `names`: the view, `LOAD_COLUMNS`,
    `COUNT_COLUMNS`."""

    at: float
    waiting: int
    names: Sequence[str]
    columns: Sequence[Sequence[int]]


class RoutingTimeline:
    """Keeps samples of the last `KEPT_S` seconds, the older ones at larger steps."""

    def __init__(self, routed: Counter[str]) -> None:
        """`routed`: how often each worker was chosen so far."""
        self._routed = routed
        self._samples: list[TimelineSample] = []
        """Samples in which `routed` counts all requests since the worker joined."""

    def record(
        self,
        at: float,
        workers: Sequence[str],
        loads: Mapping[str, Load],
        active: Mapping[str, int],
        *,
        views: Mapping[str, str],
        waiting: int,
    ) -> None:
        """Add a sample. `active` has the requests in flight by worker. Counters of workers that are
        not in `workers` are dropped."""
        distinct = set(workers)
        names: Sequence[str] = sorted(distinct)
        reports = [loads.get(name, _NO_LOAD) for name in names]
        routed = self._routed
        columns = [
            [VIEWS.index(views.get(name, "")) for name in names],
            *([getattr(load, column) for load in reports] for column in LOAD_COLUMNS),
            [active.get(name, 0) for name in names],
            [routed[name] for name in names],
        ]
        if self._samples and self._samples[-1].names == names:
            names = self._samples[-1].names  # samples share the list
        for name in [name for name in routed if name not in distinct]:
            del routed[name]
        self._thin_out(at, len(names))
        packed = [array("q", column) for column in columns]
        self._samples.append(TimelineSample(at, waiting, names, packed))

    def samples_since(self, at: float = 0.0) -> list[TimelineSample]:
        """Return the samples after a Unix time, oldest first. May be called in a thread: a large
        fleet takes 30 ms."""
        recorded = self._samples.copy()
        first = sum(sample.at <= at for sample in recorded)
        samples = []
        before: Mapping[str, int] | None = None
        for sample in recorded[max(0, first - 1) :]:
            routed = dict(zip(sample.names, sample.columns[-1], strict=True))
            if sample.at > at:
                counted = [*sample.columns[:-1], _count_since(before, routed)]
                samples.append(sample._replace(columns=counted))
            before = routed
        return samples

    def _thin_out(self, now: float, workers: int) -> None:
        """Make room for a sample of `workers` at `now`. Samples that are not earlier are from
        before the clock was set back and are dropped."""
        limit = max(2.0, MAX_WORKER_SAMPLES / max(1, workers))
        steps = (step for step in STEPS_S if RECENT_S + KEPT_S / step <= limit)
        step = next(steps, STEPS_S[-1])
        earlier = [
            sample
            for sample in self._samples
            if now - KEPT_S < sample.at < now
            and (sample.at > now - RECENT_S or sample.at % step == 0)
        ]
        self._samples = earlier[1 - int(limit) :]


def _count_since(before: Mapping[str, int] | None, routed: Mapping[str, int]) -> list[int]:
    """Return the requests since the sample `before`. Counters of a worker that joins again start
    at 0. The first sample counts none."""
    if before is None:
        return [0] * len(routed)
    earlier = (before.get(name, 0) for name in routed)
    return [
        count - then if count >= then else count
        for count, then in zip(routed.values(), earlier, strict=True)
    ]


Series = int | Sequence[int | None]
"""A number for each sample, or one number if all are equal. None: the worker was not known."""


def _align(sample: TimelineSample, names: Sequence[str]) -> Iterator[Sequence[int | None]]:
    """Yield the columns for the workers `names`. Workers that the sample lacks have None."""
    if sample.names == names:
        yield from sample.columns
        return
    position = {name: index for index, name in enumerate(sample.names)}
    order = [position.get(name, -1) for name in names]
    for column in sample.columns:
        yield [None if index < 0 else column[index] for index in order]


def series_by_worker(
    samples: Sequence[TimelineSample], worker: str = "", columns: str = ""
) -> Mapping[str, Any]:
    """Return the samples, which are in order of time, as a `Series` for each worker and column.
    `worker`, and `columns` separated by commas, leave out others. `view` is how the cache of the
    worker was known last."""
    known = {*chain.from_iterable(sample.names for sample in samples)}
    names = sorted(known & {worker} if worker else known)
    tables = [_align(sample, names) for sample in samples]
    views, *series = [[*zip(*rows, strict=True)] for rows in zip(*tables, strict=True)] or [[]]
    wanted = {
        column: values
        for column, values in zip((*LOAD_COLUMNS, *COUNT_COLUMNS), series, strict=False)
        if not columns or column in columns.split(",")
    }
    return {
        "at": [sample.at for sample in samples],
        "waiting": [sample.waiting for sample in samples],
        "workers": {
            name: {
                "view": _last_view(views[number]),
                **{column: _collapse(values[number]) for column, values in wanted.items()},
            }
            for number, name in enumerate(names)
        },
    }


def _last_view(views: Sequence[int | None]) -> str:
    return VIEWS[next(view for view in reversed(views) if view is not None)]


def _collapse(values: Sequence[int | None]) -> Series:
    first = values[0]
    return first if first is not None and values.count(first) == len(values) else values

"""The timeline of a deployment: samples of all processes, merged, as one series for each worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain, groupby
from operator import add

import msgspec

from dynamo.scheduling.router.explain.timeline import (
    COLUMN_COUNT,
    COUNT_COLUMNS,
    VIEWS,
    TimelineSample,
)

Series = int | Sequence[int | None]
"""A number for each sample, or one number if all are equal. None: the worker was not known."""


class WorkerSeries(msgspec.Struct, frozen=True):
    """A worker over time. Blocks, requests and prefill tokens come from its load reports. `view`
    is how its cache was known in its last sample. `sent`: requests of the routers at the worker.
    `routed`: requests since the sample before."""

    view: str
    cached_blocks: Series
    active_blocks: Series
    total_blocks: Series
    running: Series
    waiting: Series
    prefill_tokens: Series
    sent: Series
    routed: Series


class DeploymentTimeline(msgspec.Struct, frozen=True):
    """All workers at the Unix times `at`. `waiting` counts requests held in the routers."""

    at: list[float]
    waiting: list[int]
    workers: dict[str, WorkerSeries]


def merge_samples(samples: Sequence[TimelineSample]) -> list[TimelineSample]:
    """Merge the samples of each time: the largest values of load reports, the least precise view,
    and the sum of the requests that the processes sent and routed."""
    ordered = sorted(samples, key=lambda sample: sample.at)
    groups = groupby(ordered, key=lambda sample: sample.at)
    return [reduce(_merge_pair, group) for _, group in groups]


def _merge_pair(first: TimelineSample, second: TimelineSample) -> TimelineSample:
    names = first.names()
    if first.workers != second.workers:
        names = sorted({*names, *second.names()})
    pairs = zip(_align(first, names, 0), _align(second, names, 0), strict=True)
    loads = COLUMN_COUNT - len(COUNT_COLUMNS)
    columns = [
        [*map(max if position < loads else add, *pair)] for position, pair in enumerate(pairs)
    ]
    return TimelineSample.of_columns(first.at, first.waiting + second.waiting, names, columns)


def _align(
    sample: TimelineSample, names: Sequence[str], absent: int | None
) -> Iterator[Sequence[int | None]]:
    """Yield the columns for the workers `names`. Workers that the sample lacks have `absent`."""
    workers, columns = sample.names(), sample.columns()
    if workers == names:
        yield from columns
        return
    position = {name: index for index, name in enumerate(workers)}
    order = [position.get(name, -1) for name in names]
    for column in columns:
        yield [absent if index < 0 else column[index] for index in order]


def series_by_worker(samples: Sequence[TimelineSample]) -> DeploymentTimeline:
    """Return the samples, which are in order of time, as one series for each worker."""
    names = sorted({*chain.from_iterable(sample.names() for sample in samples)})
    tables = [_align(sample, names, None) for sample in samples]
    series = [[*zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
    return DeploymentTimeline(
        [sample.at for sample in samples],
        [sample.waiting for sample in samples],
        {
            name: WorkerSeries(_last_view(views), *map(_collapse, values))
            for name, views, *values in zip(names, *series, strict=True)
        },
    )


def _last_view(views: Sequence[int | None]) -> str:
    return VIEWS[next(view for view in reversed(views) if view is not None)]


def _collapse(values: Sequence[int | None]) -> Series:
    first = values[0]
    return first if first is not None and values.count(first) == len(values) else values

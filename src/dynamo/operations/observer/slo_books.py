"""The books of the service level objective: requests by minute and model, in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from msgspec.structs import asdict, astuple

from dynamo.core.errors import DynamoError, StoreUnavailable
from dynamo.telemetry.slo import SloCounts

MINUTE_S = 60
WINDOWS = (("1h", 3_600), ("24h", 86_400), ("30d", 30 * 86_400))
KEPT_S = WINDOWS[-1][1] + 86_400
PRUNE_EVERY_S = 3_600
BUSY_TIMEOUT_S = 3.0
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS processes (
  process TEXT, model TEXT, at REAL, requests, failed, late_first, late_gap, late,
  PRIMARY KEY (process, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS minutes (
  minute INTEGER, model TEXT, requests, failed, late_first, late_gap, late,
  PRIMARY KEY (minute, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS causes (
  minute INTEGER, model TEXT, cause TEXT, requests,
  PRIMARY KEY (minute, model, cause)) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
FIND_PROCESS = """
SELECT requests, failed, late_first, late_gap, late FROM processes WHERE process = ? AND model = ?
"""
SET_PROCESS = "INSERT OR REPLACE INTO processes VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
ADD_MINUTE = """
INSERT INTO minutes VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
  requests = requests + excluded.requests, failed = failed + excluded.failed,
  late_first = late_first + excluded.late_first, late_gap = late_gap + excluded.late_gap,
  late = late + excluded.late
"""
SET_CAUSE = """
INSERT INTO causes VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET
  requests = MAX(requests, excluded.requests)
"""
SUM_MINUTES = """
SELECT model, SUM(requests), SUM(failed), SUM(late_first), SUM(late_gap), SUM(late)
  FROM minutes WHERE minute > ? GROUP BY model
"""
SUM_CAUSES = """
SELECT cause, SUM(requests) FROM causes WHERE minute > ? GROUP BY cause ORDER BY 2 DESC LIMIT 20
"""
PRUNE_MINUTES = (
    "DELETE FROM minutes WHERE minute < ?",
    "DELETE FROM causes WHERE minute < ?",
)
Sums = Sequence[tuple[tuple[str, str], SloCounts]]
Causes = Sequence[tuple[int, Mapping[tuple[str, str], int]]]


class SloBooks:
    """Adds up the counts of processes. A process publishes sums since it has started. Nothing is
    lost while no observer runs or the disk is full, and two observers may share the file.
    The minute of a request is that in which it is written down.

    `write` and `report` block, and are called in a thread. The others return at once."""

    def __init__(self, path: Callable[[], Path], wall: Callable[[], float]) -> None:
        self._path, self._wall = path, wall
        self._sums: dict[tuple[str, str], SloCounts] = {}
        self._written: dict[tuple[str, str], SloCounts] = {}
        self._causes: dict[int, Counter[tuple[str, str]]] = {}
        self._written_causes: Causes = []
        self._pruned_s = 0.0
        self._lock = Lock()
        self.failures = 0

    def add(self, process: str, sums: Mapping[str, Sequence[int]]) -> None:
        """Note the sums of a process by model."""
        for model, values in sums.items():
            self._sums[process, model] = SloCounts(*values)

    def add_cause(self, model: str, cause: str) -> None:
        """Note the cause of a bad request."""
        minute = int(self._wall()) // MINUTE_S
        self._causes.setdefault(minute, Counter())[model, cause] += 1

    def write(self) -> bool:
        """Write what is new, and return whether all is written. The next call writes what
        could not be written."""
        sums = [(key, counts) for key, counts in [*self._sums.items()] if self._is_new(key, counts)]
        causes = [(minute, dict(each)) for minute, each in [*self._causes.items()]]
        if not sums and causes == self._written_causes:
            return True
        try:
            with self._open() as file:
                self._write(file, sums, causes)
        except (StoreUnavailable, sqlite3.Error):
            self.failures += 1
            return False
        self._written.update(sums)
        self._written_causes = causes
        for minute, _ in causes[:-1]:  # nothing is added to a minute that has passed
            self._causes.pop(minute, None)
        return True

    def _is_new(self, key: tuple[str, str], counts: SloCounts) -> bool:
        return self._written.get(key) != counts

    def forget(self, process: str) -> None:
        """Forget a process that has ended and is written down."""
        for key in [key for key in self._sums if key[0] == process]:
            if not self._is_new(key, self._sums[key]):
                del self._sums[key], self._written[key]

    def _write(self, file: sqlite3.Connection, sums: Sums, causes: Causes) -> None:
        now = self._wall()
        minute = int(now) // MINUTE_S
        for key, counts in sums:
            values = astuple(counts)
            before = file.execute(FIND_PROCESS, key).fetchone() or (0,) * len(values)
            added = [value - earlier for value, earlier in zip(values, before, strict=True)]
            if added[0] > 0:
                file.execute(ADD_MINUTE, (minute, key[1], *added))
                file.execute(SET_PROCESS, (*key, now, *values))
        rows = ((at, *name, count) for at, each in causes for name, count in each.items())
        file.executemany(SET_CAUSE, rows)
        if now - self._pruned_s > PRUNE_EVERY_S:
            self._pruned_s, oldest_s = now, now - KEPT_S
            file.execute("DELETE FROM processes WHERE at < ?", (oldest_s,))
            for statement in PRUNE_MINUTES:
                file.execute(statement, (oldest_s // MINUTE_S,))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction. Raises `StoreUnavailable`, `sqlite3.Error`."""
        try:
            path = self._path()
            path.touch(mode=0o600)
        except (OSError, DynamoError) as error:
            raise StoreUnavailable(f"the file of `dynamo slo` cannot be written: {error}") from None
        with self._lock, closing(sqlite3.connect(path, BUSY_TIMEOUT_S)) as file:
            (version,) = file.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA_VERSION):
                raise StoreUnavailable(
                    f"{path} has version {version}, and this program reads {SCHEMA_VERSION}",
                    hint="delete the file, or run the program that wrote it",
                )
            if not version:
                file.executescript(SCHEMA)
            with file:
                file.execute("BEGIN IMMEDIATE")
                yield file

    def report(self, target: float, ttft_slo: float, gap_slo: float) -> Mapping[str, Any]:
        """Return how the promise was kept, of all models and of each. Times are in seconds.
        `causes` are what bad requests suffered from. Raises `StoreUnavailable`."""
        self.write()
        now = self._wall()
        windows: list[Mapping[str, Any]] = []
        models: dict[str, list[Mapping[str, Any]]] = {}
        try:
            with self._open() as file:
                for name, seconds in WINDOWS:
                    since = (int(now - seconds) // MINUTE_S,)
                    rows = file.execute(SUM_MINUTES, since).fetchall()
                    causes = dict(file.execute(SUM_CAUSES, since).fetchall())
                    sums = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
                    windows.append(_make_window(name, sums or (0,) * 5, target, causes))
                    for model, *counts in rows:
                        models.setdefault(model, []).append(_make_window(name, counts, target))
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the file of `dynamo slo` cannot be read: {error}") from None
        promise = {"target": target, "ttft_slo": ttft_slo, "gap_slo": gap_slo}
        return {**promise, "windows": windows, "models": models}


def _make_window(
    name: str, values: Sequence[int], target: float, causes: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the requests of a window. Ratios are None without requests. `budget_left` is negative
    once more requests were bad than promised. `burn_rate` is the share of bad requests over the
    promised one."""
    counts = SloCounts(*values)
    requests, answered = counts.requests, counts.requests - counts.failed
    bad = (counts.failed + counts.late) / requests if requests else None
    return {
        "window": name,
        **asdict(counts),
        "good_ratio": None if bad is None else 1 - bad,
        "available_ratio": answered / requests if requests else None,
        "in_time_ratio": 1 - counts.late / answered if answered else None,
        "budget_left": None if bad is None else 1 - bad / (1 - target),
        "burn_rate": None if bad is None else bad / (1 - target),
        "causes": causes or {},
    }

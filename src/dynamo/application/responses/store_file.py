"""The file of stored responses: its tables and lock, events of streams, and pages of items."""

from __future__ import annotations

import fcntl
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from dynamo.application.responses.input_items import Item
from dynamo.core.errors import InvalidRequest, StoreUnavailable, Unsupported

if TYPE_CHECKING:
    import sqlite3

SCHEMA_VERSION = 1
"""The version of SCHEMA. The table `events` came later: older programs leave it alone."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, used_at REAL NOT NULL, running INTEGER NOT NULL,
  bytes INTEGER NOT NULL, input BLOB NOT NULL, response BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at, bytes);
CREATE TABLE IF NOT EXISTS events (
  id TEXT NOT NULL, last INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (id, last));
CREATE TRIGGER IF NOT EXISTS events_of_deleted AFTER DELETE ON responses BEGIN
  DELETE FROM events WHERE id = OLD.id; END;
PRAGMA user_version = 1;
"""
PRUNE = """
DELETE FROM responses WHERE id IN (
  SELECT id FROM (
    SELECT id, used_at, sum(bytes) OVER newest AS total, row_number() OVER newest AS number
    FROM responses WINDOW newest AS (ORDER BY used_at DESC, id))
  WHERE total > ? OR number > ? OR used_at < ?)
"""
LOCK_POLL_S = 0.02
MAX_PART_BYTES = 256 << 10
"""A part of a stream is complete with the row that reaches this size."""
RUNNING_STATUSES = frozenset({"queued", "in_progress"})
EVENT_END = b"\n\n"
_COMPRESSION = 1


class StreamEvents(msgspec.Struct, frozen=True):
    """Encoded events in order; `last` is the number of the last one."""

    last: int
    data: bytes


class StreamPart(msgspec.Struct, frozen=True):
    """Encoded events up to the number `last`. `stage`: more events are stored, more will be
    stored, or the stream has ended."""

    last: int
    data: bytes
    stage: Literal["stored", "running", "ended"]


EncodedItems = list[msgspec.Raw]
EncodedTurn = tuple[bytes, Item | None]
"""The encoded input of a response, and its object if its answer belongs to the items, too."""


class ItemPage(NamedTuple):
    """Encoded items (most are never decoded), their ids, and whether others follow."""

    items: EncodedItems
    ids: list[str]
    has_more: bool


class _ItemId(msgspec.Struct):
    id: str


@contextmanager
def hold_lock(file: Path, wait_s: float) -> Iterator[None]:
    """Hold a lock between processes: the first to open a file and the last to close it need it
    alone, and SQLite's own waiting does not cover that. Raises `TimeoutError` after `wait_s`."""
    with file.with_suffix(".lock").open("w") as lock:
        until_s = monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() >= until_s:
                    raise TimeoutError("another process holds its lock") from None
                sleep(LOCK_POLL_S)
        yield


def add_events(rows: sqlite3.Connection, response_id: str, batch: StreamEvents) -> int:
    """Store events of a response, unless that was deleted. Returns the stored bytes."""
    data = zlib.compress(batch.data, _COMPRESSION)
    size = "UPDATE responses SET bytes = bytes + ? WHERE id = ?"
    if not rows.execute(size, (len(data), response_id)).rowcount:
        return 0
    rows.execute("INSERT INTO events VALUES (?, ?, ?)", (response_id, batch.last, data))
    return len(data)


def read_events(rows: sqlite3.Connection, response: Item, after: int) -> StreamPart:
    """Return the events of a response behind the number `after`. Raises `Unsupported` for one that
    was not streamed in the background, and `StoreUnavailable` where events are missing."""
    newest = rows.execute(
        "SELECT last, data FROM events WHERE id = ? ORDER BY last DESC LIMIT 1", (response["id"],)
    ).fetchone()
    if newest is None:
        raise Unsupported(
            "this response was not created with background: true and stream: true",
            hint="retrieve it without stream",
            field="stream",
        )
    events: list[bytes] = []
    size, last = 0, after
    for number, data in _iter_batches(rows, response["id"], after):
        batch = data.split(EVENT_END)[:-1]
        first = number - len(batch) + 1
        if first > last + 1:
            raise StoreUnavailable(
                f"the events {last + 1} to {first - 1} of the response could not be stored",
                hint="retrieve it without stream",
            )
        events += batch[last + 1 - first :]
        size, last = size + len(data), number
        if size >= MAX_PART_BYTES:
            return StreamPart(last, _join(events), "stored")
    if response["status"] in RUNNING_STATUSES:
        return StreamPart(last, _join(events), "running")
    number = newest[0] + 1
    if number > after and not _ends(zlib.decompress(newest[1]), response["status"]):
        events.append(_last_event(response, number))  # its process has not written one
    return StreamPart(last, _join(events), "ended")


def _iter_batches(
    rows: sqlite3.Connection, response_id: str, after: int
) -> Iterator[tuple[int, bytes]]:
    query = "SELECT last, data FROM events WHERE id = ? AND last > ? ORDER BY last"
    for number, data in rows.execute(query, (response_id, after)):
        yield number, zlib.decompress(data)


def _join(events: list[bytes]) -> bytes:
    return b"".join(event + EVENT_END for event in events)


def _ends(data: bytes, status: str) -> bool:
    event = data.rstrip().rpartition(EVENT_END)[2]
    return event.startswith(b"event: response.%b\n" % status.encode())


def _last_event(response: Item, number: int) -> bytes:
    kind = f"response.{response['status']}"
    data = {"type": kind, "sequence_number": number, "response": response}
    return b"event: %b\ndata: %b" % (kind.encode(), msgspec.json.encode(data))


def read_page(
    turns: Iterable[EncodedTurn], *, ascending: bool, limit: int, after: str | None
) -> ItemPage:
    """Return up to `limit` of the items of `turns`, those after the item `after`. Of turns that
    come last first no more are read than the page needs. Raises `InvalidRequest`."""
    ordered = reversed(list(turns)) if ascending else turns
    items = (item for turn in ordered for item in _items_of(*turn, ascending=ascending))
    if after is not None and not any(_id_of(item) == after for item in items):
        raise InvalidRequest(f"there is no item {after[:100]!r}", field="after")
    page = list(islice(items, limit + 1))
    shown = page[:limit]
    return ItemPage(shown, [_id_of(item) for item in shown], len(page) > limit)


def _items_of(blob: bytes, response: Item | None, *, ascending: bool) -> EncodedItems:
    items = msgspec.json.decode(blob, type=EncodedItems)
    if response is not None:
        items += [msgspec.Raw(msgspec.json.encode(item)) for item in response["output"]]
    return items if ascending else items[::-1]


def _id_of(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_ItemId).id

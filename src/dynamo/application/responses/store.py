"""Stored responses: a SQLite file that the frontends of a deployment share.

A response is queued, in progress, then completed, failed or cancelled. A response whose process has
not renewed it has failed. The events of its stream and the items of its conversation are read from
the same file, in one thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec

from dynamo.application.responses.input_items import PREVIOUS, Item
from dynamo.core.errors import (
    InvalidRequest,
    NotFound,
    PreviousResponseNotFound,
    StoreUnavailable,
    TooLarge,
    Unsupported,
)
from dynamo.core.settings.schema import ResponsesSettings

if TYPE_CHECKING:
    import sqlite3
    from concurrent.futures import Executor

P = ParamSpec("P")
T = TypeVar("T")

FILE_NAME = "responses.sqlite"
MAX_RESPONSES = 100_000
MAX_CONTEXT_BYTES = 32 << 20
"""Limit of the input and output of all responses that a request continues."""
PRUNE_AFTER_WRITES = 64
PRUNE_AFTER_BYTES = 8 << 20
LOST_AFTER_S = 30.0
"""A running response whose process has not renewed it for so long has failed."""
BUSY_TIMEOUT_S = 3.0
"""How long a call waits for the lock of another process. Later calls then fail at once for
`LOCKED_PAUSE_S`, so that they do not wait in turn."""
LOCKED_PAUSE_S = 5.0
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

encode = msgspec.json.encode
decode = msgspec.json.decode


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


def _in_thread(
    work: Callable[Concatenate[ResponseStore, P], T],
) -> Callable[Concatenate[ResponseStore, P], Awaitable[T]]:
    """Make a method of the store run in its thread."""

    def call(self: ResponseStore, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return self._run(partial(work, self, *args, **kwargs))

    return call


class ResponseStore:
    """The responses in the file that `path` returns, opened by the first use; None: in memory.

    Each response belongs to an `owner` (a digest of an API key) and is unknown to others. A thread
    does all work. Every method raises `StoreUnavailable` if the file cannot be used.
    """

    def __init__(
        self,
        path: Callable[[], Path] | None,
        settings: ResponsesSettings,
        wall: Callable[[], float],
    ) -> None:
        self._path = path
        self._keep_s = settings.keep
        self._max_bytes = settings.max_bytes
        self._wall = wall
        self._thread: Executor | None = None
        self._file: sqlite3.Connection | None = None
        self._rows: sqlite3.Connection  # the open file, in the thread
        self._writes = self._written_bytes = 0
        self._locked_until_s = -math.inf

    async def close(self) -> None:
        """Close the file. A later use opens it again."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await asyncio.get_running_loop().run_in_executor(thread, self._close)
            thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            from concurrent.futures import ThreadPoolExecutor

            self._thread = ThreadPoolExecutor(1, "responses")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._work, work)

    def _work(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread, in a transaction."""
        import sqlite3

        if monotonic() < self._locked_until_s:
            raise _unavailable("another process holds its lock")
        try:
            if self._file is None:
                with self._alone():
                    self._rows = self._file = self._open()
            with self._file:
                return work()
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, TimeoutError) or "locked" in str(error):
                self._locked_until_s = monotonic() + LOCKED_PAUSE_S
            if self._path is not None:
                self._close()
            raise _unavailable(str(error)) from error

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        name = ":memory:"
        if self._path is not None:
            path = self._path()
            path.touch(mode=0o600)
            name = str(path)
        file = sqlite3.connect(name, timeout=BUSY_TIMEOUT_S)
        try:
            self._prepare(file, name)
        except BaseException:
            file.close()
            raise
        return file

    def _prepare(self, file: sqlite3.Connection, name: str) -> None:
        """Check the version, create what is missing, and delete what has expired."""
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise StoreUnavailable(
                f"{name} has version {version}, and this program reads {SCHEMA_VERSION}",
                hint="delete the file, or run the program that wrote it",
            )
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("PRAGMA cache_size = -1024")
        file.execute("PRAGMA secure_delete = ON")
        if file.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone() is None:
            file.executescript(SCHEMA)
        with file:
            self._prune(file)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                with self._alone(0.0 if self._locked_until_s > monotonic() else BUSY_TIMEOUT_S):
                    file.close()
            except TimeoutError:
                file.close()

    def _alone(self, wait_s: float = BUSY_TIMEOUT_S) -> AbstractContextManager[object]:
        return nullcontext() if self._path is None else hold_lock(self._path(), wait_s)

    @_in_thread
    def add(
        self,
        owner: str,
        response: Item,
        items: Sequence[Item],
        *,
        running: bool = False,
        events: StreamEvents | None = None,
    ) -> None:
        """Store a response with its input. `running`: `finish` will follow. `events`: the first
        ones of a stream."""
        blobs = (encode(items), encode(response))
        size = sum(map(len, blobs))
        self._rows.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
            (response["id"], owner, self._wall(), running, size, *blobs),
        )
        self._writes += 1
        self._written_bytes += size
        if events is not None:
            self._add_events(response["id"], events)
        if self._writes >= PRUNE_AFTER_WRITES or self._written_bytes >= PRUNE_AFTER_BYTES:
            self._prune(self._rows)

    def _prune(self, file: sqlite3.Connection) -> None:
        """Delete responses that are too old, and those beyond the bounds."""
        oldest = self._wall() - self._keep_s
        file.execute(PRUNE, (self._max_bytes, MAX_RESPONSES, oldest))
        self._writes = self._written_bytes = 0

    def _add_events(self, response_id: str, events: StreamEvents) -> None:
        self._written_bytes += add_events(self._rows, response_id, events)

    @_in_thread
    def finish(self, response: Item, events: StreamEvents | None = None) -> None:
        """Store the end of a running response and the last events of its stream, unless it was
        deleted. Of one that was cancelled, only a cancelled object is stored."""
        self._finish(response)
        if events is not None:
            self._add_events(response["id"], events)

    def _finish(self, response: Item) -> None:
        blob = encode(response)
        self._rows.execute(
            "UPDATE responses SET running = 0, used_at = ?, response = ?, "
            "bytes = bytes - length(response) + ? WHERE id = ? AND (running OR ?)",
            (self._wall(), blob, len(blob), response["id"], response["status"] == "cancelled"),
        )

    @_in_thread
    def read_stream(self, owner: str, response_id: str, after: int) -> StreamPart:
        """Return the events of a stream behind `after`. Raises as `get` and `read_events`."""
        return read_events(self._rows, self._read(owner, response_id)[1], after)

    def _read(self, owner: str, response_id: str) -> tuple[bytes, Item, int]:
        """Return encoded input, object and size of a response. Raises `NotFound`."""
        row = self._rows.execute(
            "SELECT input, response, bytes, running, used_at FROM responses "
            "WHERE id = ? AND owner = ? AND used_at >= ?",
            (response_id, owner, self._wall() - self._keep_s),
        ).fetchone()
        if row is None:
            raise NotFound(
                f"Response with id {response_id[:100]!r} not found.",
                hint="it may have expired, or belong to another API key; store: false keeps none",
                param="response_id",
            )
        response: Item = decode(row[1])
        if row[3] and row[4] < self._wall() - LOST_AFTER_S:
            message = "the process that generated the response has ended"
            error = {"code": "server_error", "message": message}
            response |= {"status": "failed", "error": error}
            self._finish(response)
        return row[0], response, row[2]

    @_in_thread
    def get(self, owner: str, response_id: str) -> Item:
        """Return the object of a response. Raises `NotFound`."""
        return self._read(owner, response_id)[1]

    @_in_thread
    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises `NotFound`."""
        self._read(owner, response_id)
        self._rows.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    @_in_thread
    def cancel(self, owner: str, response_id: str) -> Item:
        """Cancel a response in the background and return its object; one that has ended stays as
        it is. Raises `NotFound`, `InvalidRequest`."""
        response = self._read(owner, response_id)[1]
        if not response["background"]:
            raise InvalidRequest(
                "Cannot cancel a synchronous response.",
                hint="it has no background: true; close the connection of its request instead",
                param="response_id",
            )
        if response["status"] in RUNNING_STATUSES:
            response["status"] = "cancelled"
            self._finish(response)
        return response

    @_in_thread
    def renew(
        self, running: Sequence[str], events: Sequence[tuple[str, StreamEvents]] = ()
    ) -> set[str]:
        """Renew running responses, and store events of their streams. Returns those that are
        neither cancelled nor deleted."""
        for response_id, batch in events:
            self._add_events(response_id, batch)
        places = ", ".join("?" * len(running))
        self._rows.execute(
            f"UPDATE responses SET used_at = ? WHERE running AND id IN ({places})",  # noqa: S608
            (self._wall(), *running),
        )
        query = f"SELECT id FROM responses WHERE running AND id IN ({places})"  # noqa: S608
        return {response_id for (response_id,) in self._rows.execute(query, tuple(running))}

    @_in_thread
    def load_context(self, owner: str, response_id: str) -> list[Item]:
        """Return the items of a response and of all that it continues, and renew them. Raises
        `PreviousResponseNotFound`, `InvalidRequest`, `TooLarge`."""
        turns = list(self._iter_turns(owner, response_id))
        now = self._wall()
        renewed = ((now, response["id"]) for _, response in turns)
        self._rows.executemany("UPDATE responses SET used_at = ? WHERE id = ?", renewed)
        return [
            item
            for blob, response in reversed(turns)
            for item in (*decode(blob), *response["output"])
        ]

    def _iter_turns(self, owner: str, response_id: str) -> Iterator[tuple[bytes, Item]]:
        """Yield encoded input and object of a response and of all that it continues, the last
        first."""
        size, previous = 0, response_id
        while previous:
            blob, response, turn_bytes = self._read_previous(owner, previous)
            size += turn_bytes
            if size > MAX_CONTEXT_BYTES:
                raise TooLarge(
                    f"the conversation has more than {MAX_CONTEXT_BYTES:,} bytes",
                    hint="start a new one",
                    field=PREVIOUS,
                )
            yield blob, response
            previous = response[PREVIOUS]

    def _read_previous(self, owner: str, response_id: str) -> tuple[bytes, Item, int]:
        try:
            turn = self._read(owner, response_id)
        except NotFound as error:
            raise PreviousResponseNotFound(error.message, hint=error.hint, param=PREVIOUS) from None
        if turn[1]["status"] in RUNNING_STATUSES:
            raise InvalidRequest(
                f"{response_id!r} is still in progress",
                hint="wait until it has ended",
                field=PREVIOUS,
            )
        return turn

    @_in_thread
    def load_page(
        self, owner: str, response_id: str, *, ascending: bool, limit: int, after: str | None
    ) -> ItemPage:
        """Return up to `limit` of the items of which a response was generated, those after the item
        `after`. Only the items before the page's end are read. Raises as `get` and `load_context`,
        and `InvalidRequest` for an unknown item."""
        blob, response, _ = self._read(owner, response_id)
        previous = response[PREVIOUS]
        turns: Iterator[EncodedTurn] = self._iter_turns(owner, previous) if previous else iter(())
        encoded = chain([(blob, None)], turns)  # the last first
        return read_page(encoded, ascending=ascending, limit=limit, after=after)

    @_in_thread
    def find_items(self, owner: str, item_ids: Collection[str]) -> dict[str, Item]:
        """Return the items of stored responses that have these ids, as far as there are any.
        Raises `TooLarge`."""
        stored: dict[str, Item] = {}
        size = 0
        for response_id in {
            f"resp_{item_id.split('_')[1]}" for item_id in item_ids if "_" in item_id
        }:
            with suppress(NotFound):
                blob, response, item_bytes = self._read(owner, response_id)
                size += item_bytes
                if size > MAX_CONTEXT_BYTES:
                    raise TooLarge(
                        f"the responses of the items have over {MAX_CONTEXT_BYTES:,} bytes",
                        hint="send the items themselves",
                        field="input",
                    )
                stored |= {item["id"]: item for item in (*decode(blob), *response["output"])}
        return {item_id: stored[item_id] for item_id in item_ids if item_id in stored}


def _unavailable(reason: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"the store of responses cannot be used: {reason}",
        hint="send store: false, or free some space in the deployment's state folder",
        retry_after_s=LOCKED_PAUSE_S,
    )


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
    return b"event: %b\ndata: %b" % (kind.encode(), encode(data))


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
    items = decode(blob, type=EncodedItems)
    if response is not None:
        items += [msgspec.Raw(encode(item)) for item in response["output"]]
    return items if ascending else items[::-1]


def _id_of(item: msgspec.Raw) -> str:
    return decode(item, type=_ItemId).id

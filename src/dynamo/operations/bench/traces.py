"""Readers of recorded requests: records of deployments, Mooncake traces and ShareGPT files."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from operator import attrgetter, lt
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.workload import RequestPlan, SessionPlan

USER_ROLES = ("human", "user")
ASSISTANT_ROLES = ("gpt", "chatgpt", "assistant", "bard")
CountTokens = Callable[[str], int]
Row = TypeVar("Row", bound=msgspec.Struct)
TRACE_BLOCK_TOKENS = 512
"""Tokens of a hash id of a trace that does not tell: those of Mooncake."""
MAX_ROWS_FOR_BLOCKS = 1000
RECORD_FILES = "*.jsonl"
MOST_TOKENS = 10_000_000
"""A longer prompt or answer is a mistake."""
DAY_MS = 86_400e3
MOST_DAYS = 366
TRACE_HINT = "name a file, .jsonl or .jsonl.gz, or a deployment that has a record"


class TraceRow(msgspec.Struct):
    """A line of a Mooncake trace, times in milliseconds. `delay` passes after the response to the
    previous row of the same session. Records of requests also tell the tokens of a hash id, the
    answers to the prompt and the model."""

    input_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    timestamp: float = 0.0
    hash_ids: list[int | str] = []
    session_id: int | str | None = None
    delay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    block_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    choices: Annotated[int, msgspec.Meta(ge=1)] = 1
    model: str = ""


class Record(msgspec.Struct, Generic[Row], frozen=True):
    """The rows of the record of a deployment, in order of arrival. `damaged` counts lines that
    could not be read, such as the last one of a process that was killed."""

    rows: Sequence[Row]
    damaged: int


def read_record(folder: str, row_type: type[Row]) -> Record[Row]:
    """Read all files of the record in `folder`. Blocks. Raises `ConfigError`."""
    decoder, rows, damaged = msgspec.json.Decoder(row_type), [], 0
    for path in sorted(Path(folder).glob(RECORD_FILES)):
        for line in read_lines(str(path)):
            try:
                rows.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                damaged += 1
    rows.sort(key=attrgetter("timestamp"))
    return Record(rows, damaged)


def trace_block_tokens(path: str) -> int:
    """Return the tokens of a hash id, by the first row that tells. Blocks. Raises `ConfigError`."""
    rows = (row.block_tokens for row in islice(_read_rows(path), MAX_ROWS_FOR_BLOCKS))
    return next(filter(None, rows), TRACE_BLOCK_TOKENS)


def trace_models(path: str) -> set[str]:
    """Return the models of a trace that its first rows tell. Blocks. Raises `ConfigError`."""
    return {row.model for row in islice(_read_rows(path), MAX_ROWS_FOR_BLOCKS)} - {""}


def read_mooncake(path: str, *, rows: int = 0, speed: float = 1.0) -> Sequence[SessionPlan]:
    """Read the sessions of a Mooncake trace (JSON lines, plain or .gz), ordered by start. Reads the
    first `rows` lines, 0 for all. Times are divided by `speed`. Raises `ConfigError`. Blocks."""
    recorded = read_trace_sessions(path, rows)
    begin_ms = min((session[0][1].timestamp for session in recorded), default=0.0)
    sessions = [_make_session(session, begin_ms, speed) for session in recorded]
    return sorted(sessions, key=lambda session: session.start_s or 0.0)


def read_trace_sessions(path: str, rows: int = 0) -> list[list[tuple[int, TraceRow]]]:
    """Read the first `rows` lines of a Mooncake trace (0 = all), grouped by session. Each row comes
    with its number from 0. A row without a session id is a session by itself. Says how many of
    these have an earlier time than a line before them. Raises `ConfigError`. Blocks."""
    sessions: dict[str, list[tuple[int, TraceRow]]] = {}
    for number, row in enumerate(islice(_read_rows(path), rows or None)):
        key = f"row {number}" if row.session_id is None else f"session {row.session_id}"
        sessions.setdefault(key, []).append((number, row))
    firsts = [session[0][1] for session in sessions.values()]
    starts = [row.timestamp for row in firsts]
    alone = [row.timestamp for row in firsts if row.session_id is None]
    late = sum(map(lt, alone, accumulate(alone, max)))
    if late and not Path(path).is_dir():
        sys.stderr.write(f"{path}: {late} lines are not in order of their times; they are sorted\n")
    days = (max(starts) - min(starts)) / DAY_MS if starts else 0
    if days > MOST_DAYS:
        raise ConfigError(
            f"{path}: its times span {days:.3g} days",
            hint="timestamps are milliseconds, all since the same moment",
        )
    return list(sessions.values())


def _read_rows(path: str) -> Iterator[TraceRow]:
    if Path(path).is_dir():
        record = read_record(path, TraceRow)
        if record.damaged:
            sys.stderr.write(f"{path}: {record.damaged} damaged lines are left out\n")
        yield from record.rows
        return
    decoder = msgspec.json.Decoder(TraceRow)
    for number, line in numbered_lines(path, TRACE_HINT):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}:{number}: {error}",
                hint="each line must be {timestamp, input_length, output_length, hash_ids}",
            ) from None


def _make_session(
    rows: Sequence[tuple[int, TraceRow]], begin_ms: float, speed: float
) -> SessionPlan:
    turns = [
        RequestPlan(
            row.input_length,
            max(1, row.output_length),
            delay_s=row.delay / 1000 / speed if turn else 0.0,
            hash_ids=row.hash_ids,
        )
        for turn, (_, row) in enumerate(rows)
    ]
    return SessionPlan(turns, start_s=(rows[0][1].timestamp - begin_ms) / 1000 / speed)


def read_sharegpt(path: str, count: CountTokens, *, turns: int = 1) -> Sequence[SessionPlan]:
    """Read the conversations of a ShareGPT file, cut to `turns` questions (0 = all). Requested
    output lengths are those of the recorded answers. Raises `ConfigError`. Blocks."""
    sessions: list[SessionPlan] = []
    for conversation in _conversations(path):
        requests = list(_user_turns(conversation, count))
        if requests:
            sessions.append(SessionPlan(requests[: turns or None], history=True))
    if not sessions:
        raise ConfigError(f"{path}: no conversations", hint="wanted: [{conversations: [...]}]")
    return sessions


def _user_turns(conversation: Iterable[Any], count: CountTokens) -> Iterator[RequestPlan]:
    question = ""
    for message in conversation:
        role = str(message.get("from") or message.get("role"))
        text = str(message.get("value") or message.get("content") or "")
        if role in USER_ROLES:
            question = text
        elif role in ASSISTANT_ROLES and question and text:
            yield RequestPlan(count(question), max(1, count(text)), text=question, answer=text)
            question = ""


def _conversations(path: str) -> Iterator[Iterable[Any]]:
    lines = list(read_lines(path))
    try:
        if lines and lines[0].lstrip().startswith(b"["):
            records = msgspec.json.decode(b"\n".join(lines))
        else:
            records = [msgspec.json.decode(line) for line in lines]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", hint="the file must be ShareGPT JSON") from None
    for record in records:
        if isinstance(record, dict):
            names = ("conversations", "conversation", "messages")
            yield next((record[name] for name in names if record.get(name)), ())


def read_lines(path: str, hint: str = "") -> Iterator[bytes]:
    """Yield the lines that are not empty of a file, plain or .gz. Raises `ConfigError`."""
    for _, line in numbered_lines(path, hint):
        yield line


def numbered_lines(path: str, hint: str = "") -> Iterator[tuple[int, bytes]]:
    """Yield what `read_lines` does, each with its number in the file. Raises `ConfigError`."""
    try:
        with gzip.open(path) if path.endswith(".gz") else Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", "") or error
        raise ConfigError(f"{path}: {reason}", hint=hint) from None

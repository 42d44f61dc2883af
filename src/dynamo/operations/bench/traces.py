"""Requests that were recorded elsewhere."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.workload import RequestPlan, SessionPlan

USER_ROLES = ("human", "user")
ASSISTANT_ROLES = ("gpt", "chatgpt", "assistant", "bard")
CountTokens = Callable[[str], int]


class TraceRow(msgspec.Struct):
    """A line of a Mooncake trace. Times in milliseconds; `delay` after the row before of the same
    session ended."""

    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    timestamp: float = 0.0
    hash_ids: list[int | str] = []
    session_id: int | str | None = None
    delay: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def read_mooncake(path: str, *, rows: int = 0, speed: float = 1.0) -> Sequence[SessionPlan]:
    """Sessions of a trace, JSON lines (.gz too), by their starts; `rows` only the first so many;
    times are divided by `speed`. Raises `ConfigError`. Blocks."""
    together: dict[str, list[TraceRow]] = {}
    for at, row in enumerate(islice(read_rows(path), rows or None)):
        key = f"row {at}" if row.session_id is None else f"session {row.session_id}"
        together.setdefault(key, []).append(row)
    sessions = [_session(found, speed) for found in together.values()]
    return sorted(sessions, key=lambda session: session.start_s or 0.0)


def read_rows(path: str) -> Iterator[TraceRow]:
    """The lines of a Mooncake trace (.gz too). Raises `ConfigError`. Blocks."""
    decoder = msgspec.json.Decoder(TraceRow)
    for at, line in enumerate(_read_lines(path)):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}:{at + 1}: {error}",
                hint="wanted lines of {timestamp, input_length, output_length, hash_ids}",
            ) from None


def _session(rows: Sequence[TraceRow], speed: float) -> SessionPlan:
    turns = [
        RequestPlan(
            row.input_length,
            max(1, row.output_length),
            delay_s=row.delay / 1000 / speed if at else 0.0,
            hash_ids=row.hash_ids,
        )
        for at, row in enumerate(rows)
    ]
    return SessionPlan(turns, start_s=rows[0].timestamp / 1000 / speed)


def read_sharegpt(
    path: str, count: CountTokens, *, turns: int = 1, rows: int = 0
) -> Sequence[SessionPlan]:
    """Conversations of a ShareGPT file, cut to `turns` questions (0: all); an answer is as long as
    the file's. Raises `ConfigError`. Blocks."""
    sessions: list[SessionPlan] = []
    for conversation in _conversations(path):
        if rows and len(sessions) >= rows:
            break
        found = list(_user_turns(conversation, count))
        if found:
            sessions.append(SessionPlan(found[: turns or None], history=True))
    if not sessions:
        raise ConfigError(f"{path}: no conversations", hint="a list of {conversations: [...]}")
    return sessions


def _user_turns(conversation: Iterable[Any], count: CountTokens) -> Iterator[RequestPlan]:
    question = ""
    for message in conversation:
        who = str(message.get("from") or message.get("role"))
        said = str(message.get("value") or message.get("content") or "")
        if who in USER_ROLES:
            question = said
        elif who in ASSISTANT_ROLES and question and said:
            yield RequestPlan(count(question), max(1, count(said)), text=question, answer=said)
            question = ""


def _conversations(path: str) -> Iterator[Iterable[Any]]:
    lines = list(_read_lines(path))
    try:
        if lines and lines[0].lstrip().startswith(b"["):
            found = msgspec.json.decode(b"\n".join(lines))
        else:
            found = [msgspec.json.decode(line) for line in lines]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", hint="wanted a ShareGPT file, JSON") from None
    for one in found:
        if isinstance(one, dict):
            yield one.get("conversations") or one.get("conversation") or one.get("messages") or ()


def _read_lines(path: str) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.endswith(".gz") else Path(path).open("rb") as file:
            for line in file:
                if line.strip():
                    yield line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', '') or error}") from None

"""Traces for a replay: conversations ordered by start, with prompts as block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from random import Random

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.operations.arrivals import SyntheticLoad
from dynamo.operations.bench.traces import TraceRow, read_trace_sessions


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace, sent `delay_s` after the previous turn. `row` is its line, from 0.
    Each of `block_ids` identifies the whole prompt up to the end of that trace block."""

    row: int
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int] = ()
    delay_s: float = 0.0


class TraceConversation(msgspec.Struct, frozen=True):
    """Requests that run one after the other, the first at `start_s`."""

    start_s: float
    requests: Sequence[TraceRequest]


class ArrivalOptions(msgspec.Struct, frozen=True):
    """Changes to a trace's arrival times. Requests come `speed` times as fast. Each conversation
    starts later by a random part of `jitter_s` seconds of trace time."""

    speed: float = 1.0
    jitter_s: float = 0.0
    seed: int = 0


class PrefixBlockIds:
    """Assigns a number to every chain of trace blocks. Equal numbers mean equal prompts."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}

    def assign(self, hash_ids: Iterable[int | str]) -> array[int]:
        """Return the numbers of a prompt's blocks, all above 0."""
        numbers = self._numbers
        block_ids = array("q")
        parent = 0
        for hash_id in hash_ids:
            parent = numbers.setdefault((parent, hash_id), len(numbers) + 1)
            block_ids.append(parent)
        return block_ids


class TraceBlockConverter:
    """Splits or joins trace blocks into blocks of the engine's size."""

    def __init__(self, trace_tokens: int, block_tokens: int) -> None:
        """Raise `ConfigError` if neither size is a multiple of the other."""
        if max(trace_tokens, block_tokens) % min(trace_tokens, block_tokens):
            raise ConfigError(
                f"trace blocks of {trace_tokens} tokens and engine blocks of {block_tokens}",
                hint="one of --trace-block-size and --block-size must be a multiple of the other",
            )
        self._block_tokens = block_tokens
        self._engine_blocks_per_trace_block = trace_tokens // block_tokens
        self._trace_blocks_per_engine_block = block_tokens // trace_tokens

    def block_hashes(self, turn: TraceRequest) -> list[int]:
        """Return the hashes of the prompt's full engine blocks that the trace identifies."""
        full = turn.prompt_tokens // self._block_tokens
        parts = self._engine_blocks_per_trace_block
        if parts == 1:
            return list(turn.block_ids[:full])
        if parts:
            hashes = [block * parts + part for block in turn.block_ids for part in range(parts)]
            del hashes[full:]
            return hashes
        joined = self._trace_blocks_per_engine_block
        return list(turn.block_ids[joined - 1 : full * joined : joined])


def read_trace(path: str, arrivals: ArrivalOptions, rows: int = 0) -> list[TraceConversation]:
    """Read the first `rows` lines (0 = all) of a Mooncake trace, JSON lines, plain or .gz.
    Conversations are ordered by start; the first line's session starts at 0 if it is the earliest.
    Raises `ConfigError`. Blocks."""
    sessions = read_trace_sessions(path, rows)
    if not sessions:
        raise ConfigError(f"{path}: no requests", hint="a Mooncake trace has a JSON object a line")
    block_ids, rng = PrefixBlockIds(), Random(arrivals.seed)
    begin_ms = min(session[0][1].timestamp for session in sessions)
    further = count(sum(map(len, sessions)))
    conversations = [
        conversation
        for session in sessions
        for conversation in _with_choices(
            _make_conversation(session, begin_ms, block_ids, arrivals, rng),
            session[0][1].choices,
            further,
        )
    ]
    return sorted(conversations, key=lambda conversation: conversation.start_s)


def _with_choices(
    conversation: TraceConversation, choices: int, further: Iterator[int]
) -> Iterator[TraceConversation]:
    """Yield a conversation, and its prompt again for each further choice of a single request, with
    row numbers from `further`."""
    yield conversation
    if len(conversation.requests) == 1:
        for _ in range(choices - 1):
            request = replace(conversation.requests[0], row=next(further))
            yield TraceConversation(conversation.start_s, [request])


def make_synthetic_trace(
    load: SyntheticLoad, arrivals: ArrivalOptions
) -> Iterator[TraceConversation]:
    """Yield the conversations of a synthetic load, one request each, ordered by start. Raises
    `ConfigError`."""
    rng = Random(arrivals.seed)
    draw_isl, draw_osl = _lengths(load.isl, rng), _lengths(load.osl, rng)
    delayed: list[tuple[float, int, TraceConversation]] = []
    for row, drawn in enumerate(islice(load.draw(rng), load.requests)):
        time_s, *lengths = (drawn,) if isinstance(drawn, float) else drawn
        start_s = time_s + (rng.random() * arrivals.jitter_s if arrivals.jitter_s else 0.0)
        request = TraceRequest(row, *(lengths or (draw_isl(), draw_osl())))
        conversation = TraceConversation(start_s / arrivals.speed, [request])
        if not arrivals.jitter_s:
            yield conversation
            continue
        heappush(delayed, (start_s, row, conversation))
        while delayed and delayed[0][0] <= time_s:
            yield heappop(delayed)[-1]
    while delayed:
        yield heappop(delayed)[-1]


def _lengths(length: int, rng: Random) -> Callable[[], int]:
    """Return what draws lengths within 20 % of `length`, uniform as `randint` draws them."""
    low = -(-length * 4 // 5)
    count = length * 6 // 5 - low + 1
    bits, draw = count.bit_length(), rng.getrandbits

    def next_length() -> int:
        while (offset := draw(bits)) >= count:
            pass
        return low + offset

    return next_length


def _make_conversation(
    rows: Sequence[tuple[int, TraceRow]],
    begin_ms: float,
    block_ids: PrefixBlockIds,
    arrivals: ArrivalOptions,
    rng: Random,
) -> TraceConversation:
    scale = 1e-3 / arrivals.speed
    start_s = (rows[0][1].timestamp - begin_ms) * scale
    if arrivals.jitter_s:
        start_s += rng.random() * arrivals.jitter_s / arrivals.speed
    turns = [
        TraceRequest(
            number,
            max(1, row.input_length),
            max(1, row.output_length),
            block_ids.assign(row.hash_ids),
            row.delay * scale if turn else 0.0,
        )
        for turn, (number, row) in enumerate(rows)
    ]
    return TraceConversation(start_s, turns)

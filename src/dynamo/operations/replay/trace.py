"""Traces as a replay wants them: conversations in order of their start, prompts as block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from random import Random

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.traces import TraceRow, read_rows


class TraceRequest(msgspec.Struct, frozen=True):
    """One request. `row`: its line in the trace, from 0; `names`: of its trace blocks, each of
    which stands for the whole prompt up to its end; `delay_s`: after the turn before."""

    row: int
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int] = ()
    delay_s: float = 0.0


class TraceConversation(msgspec.Struct, frozen=True):
    """Turns one after the other, the first at `start_s`."""

    start_s: float
    requests: Sequence[TraceRequest]


class ArrivalOptions(msgspec.Struct, frozen=True):
    """When requests come: `speed` times as fast as in the trace; `smear_s`: each conversation
    starts later by up to so much of the trace's time, by chance."""

    speed: float = 1.0
    jitter_s: float = 0.0
    seed: int = 0


class PrefixBlockIds:
    """Numbers for trace blocks, one for every chain of them: equal numbers mean equal prompts."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}

    def assign(self, hash_ids: Iterable[int | str]) -> array[int]:
        """The numbers of a prompt's blocks; none is 0."""
        numbers = self._numbers
        found = array("q")
        above = 0
        for hash_id in hash_ids:
            above = numbers.setdefault((above, hash_id), len(numbers) + 1)
            found.append(above)
        return found


class TraceBlockConverter:
    """Cuts trace blocks into blocks of the engine, or joins them."""

    def __init__(self, trace_tokens: int, block_tokens: int) -> None:
        """Raises `ConfigError` where neither size is a multiple of the other."""
        big, small = max(trace_tokens, block_tokens), min(trace_tokens, block_tokens)
        if big % small:
            raise ConfigError(
                f"trace blocks of {trace_tokens} tokens and engine blocks of {block_tokens}",
                hint="one of --trace-block-size and --block-size must be a multiple of the other",
            )
        self._block_tokens = block_tokens
        self._engine_blocks_per_trace_block = trace_tokens // block_tokens
        self._trace_blocks_per_engine_block = block_tokens // trace_tokens

    def block_hashes(self, turn: TraceRequest) -> list[int]:
        """Of the full engine blocks of its prompt, as far as the trace names them."""
        full = turn.prompt_tokens // self._block_tokens
        parts = self._engine_blocks_per_trace_block
        if parts == 1:
            return list(turn.block_ids[:full])
        if parts:
            found = [name * parts + part for name in turn.block_ids for part in range(parts)]
            del found[full:]
            return found
        joined = self._trace_blocks_per_engine_block
        return list(turn.block_ids[joined - 1 : full * joined : joined])


def read_trace(path: str, arrivals: ArrivalOptions, rows: int = 0) -> list[TraceConversation]:
    """A Mooncake trace (JSON lines, .gz too), in order of start, which is 0 for the first.
    `rows`: only the first so many. Raises `ConfigError`. Blocks."""
    together: dict[str, list[tuple[int, TraceRow]]] = {}
    for at, row in enumerate(read_rows(path)):
        if rows and at >= rows:
            break
        key = f"row {at}" if row.session_id is None else f"session {row.session_id}"
        together.setdefault(key, []).append((at, row))
    if not together:
        raise ConfigError(f"{path}: no requests", hint="a Mooncake trace: one JSON object a line")
    names, chance = PrefixBlockIds(), Random(arrivals.seed)
    begin = min(found[0][1].timestamp for found in together.values())
    conversations = [
        _make_conversation(found, begin, names, arrivals, chance) for found in together.values()
    ]
    return sorted(conversations, key=lambda one: one.start_s)


def _make_conversation(
    rows: Sequence[tuple[int, TraceRow]],
    begin: float,
    names: PrefixBlockIds,
    arrivals: ArrivalOptions,
    chance: Random,
) -> TraceConversation:
    scale = 1e-3 / arrivals.speed
    start_s = (rows[0][1].timestamp - begin) * scale
    if arrivals.jitter_s:
        start_s += chance.random() * arrivals.jitter_s / arrivals.speed
    turns = [
        TraceRequest(
            at,
            max(1, row.input_length),
            max(1, row.output_length),
            names.assign(row.hash_ids),
            row.delay * scale if number else 0.0,
        )
        for number, (at, row) in enumerate(rows)
    ]
    return TraceConversation(start_s, turns)

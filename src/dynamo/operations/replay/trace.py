"""Traces as a replay wants them: conversations in order of their start, prompts as block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from random import Random

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.traces import Row, read_rows


class Turn(msgspec.Struct, frozen=True):
    """One request. `row`: its line in the trace, from 0; `names`: of its trace blocks, each of
    which stands for the whole prompt up to its end; `delay_s`: after the turn before."""

    row: int
    prompt_tokens: int
    answer_tokens: int
    names: Sequence[int] = ()
    delay_s: float = 0.0


class Conversation(msgspec.Struct, frozen=True):
    """Turns one after the other, the first at `start_s`."""

    start_s: float
    turns: Sequence[Turn]


class Arrivals(msgspec.Struct, frozen=True):
    """When requests come: `speed` times as fast as in the trace; `smear_s`: each conversation
    starts later by up to so much of the trace's time, by chance."""

    speed: float = 1.0
    smear_s: float = 0.0
    seed: int = 0


class Names:
    """Numbers for trace blocks, one for every chain of them: equal numbers mean equal prompts."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}

    def of(self, hash_ids: Iterable[int | str]) -> array[int]:
        """The numbers of a prompt's blocks; none is 0."""
        numbers = self._numbers
        found = array("q")
        above = 0
        for hash_id in hash_ids:
            above = numbers.setdefault((above, hash_id), len(numbers) + 1)
            found.append(above)
        return found


class Blocks:
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
        self._parts = trace_tokens // block_tokens
        self._joined = block_tokens // trace_tokens

    def hashes(self, turn: Turn) -> list[int]:
        """Of the full engine blocks of its prompt, as far as the trace names them."""
        full = turn.prompt_tokens // self._block_tokens
        parts = self._parts
        if parts == 1:
            return list(turn.names[:full])
        if parts:
            found = [name * parts + part for name in turn.names for part in range(parts)]
            del found[full:]
            return found
        joined = self._joined
        return list(turn.names[joined - 1 : full * joined : joined])


def read_trace(path: str, arrivals: Arrivals, rows: int = 0) -> list[Conversation]:
    """A Mooncake trace (JSON lines, .gz too), in order of start, which is 0 for the first.
    `rows`: only the first so many. Raises `ConfigError`. Blocks."""
    together: dict[str, list[tuple[int, Row]]] = {}
    for at, row in enumerate(read_rows(path)):
        if rows and at >= rows:
            break
        key = f"row {at}" if row.session_id is None else f"session {row.session_id}"
        together.setdefault(key, []).append((at, row))
    if not together:
        raise ConfigError(f"{path}: no requests", hint="a Mooncake trace: one JSON object a line")
    names, chance = Names(), Random(arrivals.seed)
    begin = min(found[0][1].timestamp for found in together.values())
    conversations = [
        _conversation(found, begin, names, arrivals, chance) for found in together.values()
    ]
    return sorted(conversations, key=lambda one: one.start_s)


def _conversation(
    rows: Sequence[tuple[int, Row]], begin: float, names: Names, arrivals: Arrivals, chance: Random
) -> Conversation:
    scale = 1e-3 / arrivals.speed
    start_s = (rows[0][1].timestamp - begin) * scale
    if arrivals.smear_s:
        start_s += chance.random() * arrivals.smear_s / arrivals.speed
    turns = [
        Turn(
            at,
            max(1, row.input_length),
            max(1, row.output_length),
            names.of(row.hash_ids),
            row.delay * scale if number else 0.0,
        )
        for number, (at, row) in enumerate(rows)
    ]
    return Conversation(start_s, turns)

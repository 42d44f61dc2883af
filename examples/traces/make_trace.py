"""Writes conversations.jsonl, a trace of conversations for `dynamo replay` and `dynamo bench`.

Each of 80 conversations begins with one of 4 system prompts of 2,048 tokens, and has 2 to 8 turns.
A turn adds a question to the prompt, and the answer before it. All numbers come from one seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

CONVERSATIONS = 80
SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = 2048
BLOCK_TOKENS = 512
START_WITHIN_MS = 240_000
MEAN_DELAY_MS = 8_000
MAX_PROMPT_TOKENS = 7000


def conversation(name: str, rng: Random, ids: Iterator[int]) -> Iterator[dict[str, object]]:
    """Yield the rows of a conversation. `ids` are unused numbers of blocks.

    A full block of an earlier prompt keeps its id. A block that is not full has an id of its own.
    """
    system = rng.randrange(SYSTEM_PROMPTS)
    blocks = [
        system * SYSTEM_TOKENS // BLOCK_TOKENS + n for n in range(SYSTEM_TOKENS // BLOCK_TOKENS)
    ]
    tokens, answer, row = SYSTEM_TOKENS, 0, {"timestamp": rng.randrange(START_WITHIN_MS)}
    for _ in range(rng.randint(2, 8)):
        tokens += answer + rng.randint(20, 600)
        if tokens > MAX_PROMPT_TOKENS:
            return
        blocks += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
        partial = [next(ids)] * (tokens % BLOCK_TOKENS > 0)
        answer = rng.randint(40, 400)
        yield row | {
            "session_id": name,
            "input_length": tokens,
            "output_length": answer,
            "hash_ids": blocks + partial,
        }
        row = {"delay": round(rng.expovariate(1 / MEAN_DELAY_MS))}


def main() -> None:
    """Write the trace beside this file, ordered by the start of the conversations."""
    rng, ids = Random(1), count(1000)
    conversations = [[*conversation(f"c{n}", rng, ids)] for n in range(CONVERSATIONS)]
    conversations.sort(key=lambda rows: int(str(rows[0]["timestamp"])))
    lines = [json.dumps(row) + "\n" for rows in conversations for row in rows]
    Path(__file__).with_name("conversations.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()

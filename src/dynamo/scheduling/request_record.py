"""The record of a request: a line that is a row of a trace, with what became of the request."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.worker import engine_info
from dynamo.telemetry.story import EndedStory, Story

if TYPE_CHECKING:
    from dynamo.scheduling.workers.placed_request import PlacedRequest

SALT_BYTES = 32
HASH_BYTES = 5
"""Size of a recorded block hash. Two blocks can only be taken for each other after equal blocks."""
NO_HASHES: Sequence[int] = ()
MAX_KNOWN_BLOCKS = 65_536
MIN_BLOCK_TOKENS = 64
"""Smaller blocks are recorded in groups, since each hash costs 2 us of a thread."""
SESSION_BYTES = 8


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The facts of an HTTP request that generates text, without its words and tokens. A record is
    a row of a trace: `timestamp` is the arrival in milliseconds since 1970, the lengths are those
    of one prompt and of one of its `choices` answers.

    Each of `hash_ids` is a salted hash of `block_tokens` tokens and all before them, where the
    router has hashed the prompt. `session` is a salted hash of the client's name for the
    conversation. `queue_ms` ends when a worker was chosen, `ttft_ms` with the first token, `e2e_ms`
    with the answer; None if that did not happen. `moves` counts the further attempts at workers.
    `end` is "" for a whole answer, else an error code or "cancelled".
    """

    timestamp: float
    input_length: int
    output_length: int
    model: str = ""
    hash_ids: Sequence[int] = ()
    block_tokens: int = 0
    session: str = ""
    priority: int = 0
    choices: int = 1
    cached_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    worker: str = ""
    prefill_worker: str = ""
    moves: int = 0
    end: str = ""


RequestFacts = tuple[EndedStory, bytes, Sequence[int], Instance | None]
"""The facts that become a record: a story, the client's session, the hashes of the first prompt,
and the instance that has named the size of its blocks."""


def request_facts(story: Story) -> RequestFacts:
    """Return the facts of a story that has ended. Its attempts can go then."""
    assert story.ended is not None  # noqa: S101 - stories are told at their end
    get = story.headers.get
    session = get(b"x-session-id") or get(b"session_id") or get(b"x-claude-code-session-id", b"")
    if story.attempts:
        placed: PlacedRequest = story.attempts[0].placed
        if placed.hashes:
            return story.ended, session, placed.hashes, placed.worker.instance
    return story.ended, session, NO_HASHES, None


class RecordMaker:
    """Makes the records of one process, off its event loop."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._salted_blocks: dict[int, int] = {}
        self._block_tokens: dict[str, int] = {}

    def make(self, facts: RequestFacts) -> RequestRecord:
        """Return a record."""
        story, session, hashes, instance = facts
        block_tokens, hash_ids = self._blocks(hashes, instance) if hashes else (0, hashes)
        attempts, answers = story.attempts, story.choices * story.prompts
        prompt_tokens, worker, prefill_worker = story.prompt_tokens // story.prompts, "", ""
        placed_us: int | None = None
        if attempts:
            worker, prefill_worker = attempts[-1].worker, attempts[-1].prefill_worker
            placed_us = attempts[0].placed_us
            if story.prompts == 1:
                prompt_tokens = attempts[0].prompt_tokens
        firsts = (attempt.first_us for attempt in attempts)
        first_us = next((each for each in firsts if each is not None), None)
        return RequestRecord(
            int(story.wall_s * 1e4) / 10,
            prompt_tokens,
            story.output_tokens // answers,
            story.model,
            hash_ids,
            block_tokens,
            f"{_salted(self._salt, session, SESSION_BYTES):x}" if session else "",
            story.priority,
            answers,
            story.cached_tokens // story.prompts,
            None if placed_us is None else int(placed_us) / 1e3,
            None if first_us is None else int(first_us) / 1e3,
            int(story.ended_us) / 1e3,
            worker,
            prefill_worker,
            max(0, len(attempts) - answers),
            story.end,
        )

    def _blocks(
        self, hashes: Sequence[int], instance: Instance | None
    ) -> tuple[int, Sequence[int]]:
        """Return the tokens of a recorded block and the salted hashes of the prompt's blocks. The
        router's hashes are chained, so that the last one of a group stands for all."""
        engine_block = 0 if instance is None else self._engine_block(instance)
        if not engine_block:
            return 0, NO_HASHES
        known, salt = self._salted_blocks, self._salt
        if len(known) > MAX_KNOWN_BLOCKS:
            known.clear()
        group, hash_ids = -(-MIN_BLOCK_TOKENS // engine_block), []
        for block in hashes[group - 1 :: group]:
            salted = known.get(block)
            if salted is None:
                salted = known[block] = _salted(salt, block.to_bytes(8, "little"), HASH_BYTES)
            hash_ids.append(salted)
        return group * engine_block, hash_ids

    def _engine_block(self, instance: Instance) -> int:
        tokens = self._block_tokens.get(instance.id)
        if tokens is None:
            info = engine_info(instance)
            tokens = self._block_tokens[instance.id] = 0 if info is None else info.block_tokens
        return tokens


def _salted(salt: bytes, value: bytes, size: int) -> int:
    """Return a number that tells nothing about `value` to readers without the salt."""
    return int.from_bytes(blake2b(value, key=salt, digest_size=size).digest())

"""The record of a request: a line that is a row of a trace, with what became of the request."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.worker import engine_info

if TYPE_CHECKING:
    from dynamo.scheduling.workers.placed_request import PlacedRequest
    from dynamo.telemetry.story import Story

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


RequestFacts = tuple[
    float, float, float, float | None, float | None, int, int, int, int,
    str, bytes, int, str, str, int, str, Sequence[int], Instance | None,
]  # fmt: skip
"""The part of a story that is taken on the event loop, in the order of `RecordMaker.make`."""


def request_facts(story: Story) -> RequestFacts:
    """Return the facts of a story that has ended. The story and its attempts can go then."""
    attempts: Sequence[PlacedRequest] = story.attempts
    answers, get = story.choices * story.prompts, story.headers.get
    session = get(b"x-session-id") or get(b"session_id") or get(b"x-claude-code-session-id", b"")
    placed_s = first_s = instance = None
    worker = prompt_worker = ""
    prompt_tokens, hashes = story.prompt_tokens // story.prompts, NO_HASHES
    if attempts:
        first, last = attempts[0], attempts[-1]
        placed_s, first_s = first.placed_s, first.first_token_s
        if first_s is None and last is not first:
            tokens_s = (each.first_token_s for each in attempts)
            first_s = next((each for each in tokens_s if each is not None), None)
        worker, prompt_worker = (last.decode_worker or last.worker).name, last.prompt_worker.name
        if first.hashes:
            hashes, instance = first.hashes, first.worker.instance
        if story.prompts == 1:
            prompt_tokens = first.prompt_tokens
    return (
        story.wall_s, story.began_s, story.ended_s, placed_s, first_s, prompt_tokens,
        story.output_tokens // answers, answers, story.cached_tokens // story.prompts,
        story.model, session, story.priority, worker,
        prompt_worker if prompt_worker != worker else "",
        max(0, len(attempts) - answers), story.end, hashes, instance,
    )  # fmt: skip


class RecordMaker:
    """Makes the records of one process, off its event loop."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._salted_blocks: dict[int, int] = {}
        self._block_tokens: dict[str, int] = {}

    def make(self, facts: RequestFacts) -> RequestRecord:
        """Return a record."""
        (
            wall_s, began_s, ended_s, placed_s, first_s, prompt_tokens, output_tokens, answers,
            cached_tokens, model, session, priority, worker, prefill_worker, moves, end, hashes,
            instance,
        ) = facts  # fmt: skip
        block_tokens, hash_ids = self._blocks(hashes, instance) if hashes else (0, hashes)
        return RequestRecord(
            int(wall_s * 1e4) / 10,
            prompt_tokens,
            output_tokens,
            model,
            hash_ids,
            block_tokens,
            f"{_salted(self._salt, session, SESSION_BYTES):x}" if session else "",
            priority,
            answers,
            cached_tokens,
            None if placed_s is None else int((placed_s - began_s) * 1e6) / 1e3,
            None if first_s is None else int((first_s - began_s) * 1e6) / 1e3,
            int((ended_s - began_s) * 1e6) / 1e3,
            worker,
            prefill_worker,
            moves,
            end,
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

"""The record of a request: a line that is a row of a trace, with what became of the request."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from dynamo.scheduling.workers.worker import engine_info

if TYPE_CHECKING:
    from dynamo.scheduling.workers.placed_request import PlacedRequest
    from dynamo.telemetry.story import Story

SALT_BYTES = 32
HASH_BYTES = 5
"""Size of a recorded block hash. Two blocks can only be taken for each other after equal blocks."""
MIN_BLOCK_TOKENS = 64
"""Smaller blocks are recorded in groups, since each hash costs 2 us of a thread."""
SESSION_BYTES = 8
SESSION_HEADERS = (b"x-session-id", b"session_id", b"x-claude-code-session-id")
"""Headers by which clients name the conversation of a request; the first that is there counts."""


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
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


def make_record(story: Story, salt: bytes) -> RequestRecord:
    """Return the record of a story that has ended."""
    attempts: Sequence[PlacedRequest] = story.attempts
    answers = story.choices * story.prompts
    first = attempts[0] if attempts else None
    tokens_s = [each.first_token_s for each in attempts if each.first_token_s is not None]
    prompt_tokens = story.prompt_tokens // story.prompts
    if first is not None and story.prompts == 1:
        prompt_tokens = first.prompt_tokens
    block_tokens, hashes = _prompt_blocks(first, salt)
    requests = {each.key.rpartition("/")[0] for each in attempts}
    prompt_worker = attempts[-1].prompt_worker.name if attempts else ""
    worker = attempts[-1].answering.name if attempts else ""
    return RequestRecord(
        timestamp=round(story.wall_s * 1e3, 1),
        input_length=prompt_tokens,
        output_length=story.output_tokens // answers,
        model=story.model,
        hash_ids=hashes,
        block_tokens=block_tokens,
        session=_session(story, salt),
        priority=story.priority,
        choices=answers,
        cached_tokens=story.cached_tokens // story.prompts,
        queue_ms=_milliseconds(story, None if first is None else first.placed_s),
        ttft_ms=_milliseconds(story, min(tokens_s, default=None)),
        e2e_ms=_milliseconds(story, story.ended_s) or 0.0,
        worker=worker,
        prefill_worker=prompt_worker if prompt_worker != worker else "",
        moves=len(attempts) - len(requests),
        end=story.end,
    )


def _prompt_blocks(placed: PlacedRequest | None, salt: bytes) -> tuple[int, Sequence[int]]:
    """Return the tokens of a recorded block and the salted hashes of the prompt's blocks. The
    router's hashes are chained, so that the last one of a group stands for all."""
    if placed is None or not placed.hashes:
        return 0, ()
    info = engine_info(placed.worker.instance)
    if info is None:
        return 0, ()
    group = -(-MIN_BLOCK_TOKENS // info.block_tokens)
    ends = placed.hashes[group - 1 :: group]
    return group * info.block_tokens, [
        _salted(salt, value.to_bytes(8, "little"), HASH_BYTES) for value in ends
    ]


def _milliseconds(story: Story, until_s: float | None) -> float | None:
    return None if until_s is None else round((until_s - story.began_s) * 1e3, 3)


def _session(story: Story, salt: bytes) -> str:
    names = (story.headers.get(header) for header in SESSION_HEADERS)
    name = next(filter(None, names), b"")
    return f"{_salted(salt, name, SESSION_BYTES):x}" if name else ""


def _salted(salt: bytes, value: bytes, size: int) -> int:
    """Return a number that tells nothing about `value` to readers without the salt."""
    return int.from_bytes(blake2b(value, key=salt, digest_size=size).digest())

"""What a frontend asks a router of its own, and what that answers, in msgpack."""

from __future__ import annotations

from array import array

import msgspec

from dynamo.core.hashing import pack_hashes, unpack_hashes
from dynamo.core.values import GenerateRequest, Sampling, Stops
from dynamo.scheduling.router.policy import Decision
from dynamo.scheduling.router.prompt import Prompt

CHOOSE = "choose"
"""The endpoint."""
TAKEN = b""
"""The first thing that is answered: the router is there and thinks."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Which instance? `hashes`: of the prompt's full blocks, packed u64; `tried`: not these. The
    request's id and attempt come with the call."""

    model: str
    choice: int
    prompt_tokens: int
    hashes: bytes
    max_tokens: int
    tried: tuple[str, ...] = ()
    priority: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The decision, without its table, which stays with the router until somebody asks."""

    instance: str
    mode: str
    candidates: int
    overlap_blocks: int
    prompt_blocks: int
    best_overlap_blocks: int
    predicted_ttft_s: float | None
    waited_s: float
    view: str
    rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_ask = msgspec.msgpack.Decoder(Ask).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def encode_ask(request: GenerateRequest, prompt: Prompt, tried: tuple[str, ...]) -> bytes:
    """The question for one choice of a request."""
    return _encode(
        Ask(
            request.model,
            request.choice,
            prompt.tokens,
            pack_hashes(prompt.hashes),
            request.stops.max_tokens,
            tried,
            request.priority,
        )
    )


def decode_ask(payload: bytes) -> Ask:
    """Raises `msgspec.DecodeError`."""
    return _decode_ask(payload)


def encode_answer(made: Decision) -> bytes:
    """The answer."""
    return _encode(
        Answer(
            made.instance.id,
            made.mode,
            made.candidates,
            made.overlap_blocks,
            made.prompt_blocks,
            made.best_overlap_blocks,
            made.predicted_ttft_s,
            made.waited_s,
            made.view,
            made.rank,
        )
    )


def decode_answer(payload: bytes) -> Answer:
    """Raises `msgspec.DecodeError`."""
    return _decode_answer(payload)


def request_of(ask: Ask, request_id: str) -> GenerateRequest:
    """A request for a policy that reads its prompt by `read_asked`: hashes in place of tokens."""
    return GenerateRequest(
        request_id,
        ask.model,
        array("Q", (ask.prompt_tokens,)).tobytes() + ask.hashes,
        Sampling(),
        Stops(ask.max_tokens),
        choice=ask.choice,
        priority=ask.priority,
    )


def read_asked(request: GenerateRequest) -> Prompt:
    """The prompt of a request made by `request_of`."""
    tokens, *hashes = unpack_hashes(request.token_ids)
    return Prompt(tokens, hashes)

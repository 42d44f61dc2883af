"""What a frontend asks a router of its own, and what that answers, in msgpack."""

from __future__ import annotations

from array import array

import msgspec

from dynamo.core.hashing import pack_hashes, unpack_hashes
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.scheduling.router.policy import Decision
from dynamo.scheduling.router.prompt import Prompt

CHOOSE_ENDPOINT = "choose"
"""The endpoint."""
QUERY_ACCEPTED = b""
"""The first thing that is answered: the router is there and thinks."""


class RouteQuery(msgspec.Struct, frozen=True, array_like=True):
    """Which instance? `hashes`: of the prompt's full blocks, packed u64; `tried`: not these. The
    request's id and attempt come with the call."""

    model: str
    choice: int
    prompt_tokens: int
    hashes: bytes
    max_tokens: int
    excluded: tuple[str, ...] = ()
    priority: int = 0


class RouteReply(msgspec.Struct, frozen=True, array_like=True):
    """The decision, without its table, which stays with the router until somebody asks."""

    instance: str
    mode: str
    candidates: int
    overlap_blocks: int
    prompt_blocks: int
    best_overlap_blocks: int
    predicted_ttft_s: float | None
    waited_s: float
    cache_view: str
    rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_query_decode = msgspec.msgpack.Decoder(RouteQuery).decode
_reply_decode = msgspec.msgpack.Decoder(RouteReply).decode


def encode_query(request: GenerateRequest, prompt: Prompt, tried: tuple[str, ...]) -> bytes:
    """The question for one choice of a request."""
    return _encode(
        RouteQuery(
            request.model,
            request.choice,
            prompt.tokens,
            pack_hashes(prompt.hashes),
            request.stops.max_tokens,
            tried,
            request.priority,
        )
    )


def decode_query(payload: bytes) -> RouteQuery:
    """Raises `msgspec.DecodeError`."""
    return _query_decode(payload)


def encode_reply(made: Decision) -> bytes:
    """The answer."""
    return _encode(
        RouteReply(
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


def decode_reply(payload: bytes) -> RouteReply:
    """Raises `msgspec.DecodeError`."""
    return _reply_decode(payload)


def request_from_query(ask: RouteQuery, request_id: str) -> GenerateRequest:
    """A request for a policy that reads its prompt by `read_asked`: hashes in place of tokens."""
    return GenerateRequest(
        request_id,
        ask.model,
        array("Q", (ask.prompt_tokens,)).tobytes() + ask.hashes,
        SamplingParams(),
        StopConditions(ask.max_tokens),
        choice=ask.choice,
        priority=ask.priority,
    )


def read_query_prompt(request: GenerateRequest) -> Prompt:
    """The prompt of a request made by `request_of`."""
    tokens, *hashes = unpack_hashes(request.token_ids)
    return Prompt(tokens, hashes)

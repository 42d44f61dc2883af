"""The messages between a frontend and a router process, in msgpack."""

from __future__ import annotations

from array import array

import msgspec

from dynamo.core.hashing import pack_hashes, unpack_hashes
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.policy import Decision
from dynamo.scheduling.workers.prompt import Prompt

CHOOSE_ENDPOINT = "choose"
"""The endpoint of router processes."""
QUERY_ACCEPTED = b""
"""The first response item: the router has accepted the query and works on it."""


class RouteQuery(msgspec.Struct, frozen=True, array_like=True):
    """The query for the instance of one request. `hashes` are those of the prompt's full blocks,
    packed u64. `excluded` are ids of instances and names of ranks. The request's id and attempt
    come with the call."""

    model: str
    choice: int
    prompt_tokens: int
    hashes: bytes
    max_tokens: int
    excluded: tuple[str, ...] = ()
    priority: int = 0


class RouteReply(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a `Decision` that a frontend needs; its cost table stays in the router's
    decision log. `instance` and `prefill` are ids; "" if no other worker computes the prompt."""

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
    prefill: str = ""
    harm_weight: float | None = None
    itl_slo_ms: float = 0.0
    prefill_rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_query_decode = msgspec.msgpack.Decoder(RouteQuery).decode
_reply_decode = msgspec.msgpack.Decoder(RouteReply).decode


def encode_query(request: GenerateRequest, prompt: Prompt, tried: tuple[str, ...]) -> bytes:
    """Encode the query for one choice of a request."""
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
    """Decode a query. Raises `msgspec.DecodeError`."""
    return _query_decode(payload)


_SHARED_FIELDS = [
    name for name in RouteReply.__struct_fields__ if name not in ("instance", "prefill")
]


def encode_reply(decision: Decision) -> bytes:
    """Encode a decision."""
    values = {name: getattr(decision, name) for name in _SHARED_FIELDS}
    prefill = "" if decision.prefill is None else decision.prefill.id
    return _encode(RouteReply(instance=decision.instance.id, prefill=prefill, **values))


def decode_reply(payload: bytes) -> RouteReply:
    """Decode a reply. Raises `msgspec.DecodeError`."""
    return _reply_decode(payload)


def decision_from_reply(
    reply: RouteReply, instance: Instance, prefill: Instance | None
) -> Decision:
    """Return the decision of a router for instances of this process."""
    values = {name: getattr(reply, name) for name in _SHARED_FIELDS}
    return Decision(instance=instance, prefill=prefill, **values)


def request_from_query(query: RouteQuery, request_id: str) -> GenerateRequest:
    """Return a request for a policy that reads prompts by `read_query_prompt`. Its `token_ids`
    hold the prompt's length and block hashes instead of tokens."""
    return GenerateRequest(
        request_id,
        query.model,
        array("Q", (query.prompt_tokens,)).tobytes() + query.hashes,
        SamplingParams(),
        StopConditions(query.max_tokens),
        choice=query.choice,
        priority=query.priority,
    )


def read_query_prompt(request: GenerateRequest) -> Prompt:
    """Return the prompt of a request made by `request_from_query`."""
    tokens, *hashes = unpack_hashes(request.token_ids)
    return Prompt(tokens, hashes)

"""`GenerateRequest.prefill` on the wire."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo.core.codec import decode_request, decode_shared_request, encode_choice, encode_request
from dynamo.core.shared_payload import ReceivedPayload
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions

REQUEST = GenerateRequest("r", "m", b"", SamplingParams(), StopConditions(), prefill="p1")


def test_choices_of_a_prompt_may_name_different_prefill_workers() -> None:
    shared = ReceivedPayload(encode_request(REQUEST))
    first = decode_shared_request(encode_choice(replace(REQUEST, prefill="p2")), shared)
    second = decode_shared_request(encode_choice(replace(REQUEST, prefill="")), shared)
    assert (first.prefill, second.prefill) == ("p2", "")
    assert decode_request(encode_request(REQUEST)).prefill == "p1"

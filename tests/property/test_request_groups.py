"""A choice of a group is the same request as one that is sent whole."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dynamo.core.codec import (
    decode_request,
    decode_shared_request,
    encode_choice,
    encode_request,
    pack_ids,
    share_group,
)
from dynamo.core.shared_payload import ReceivedPayload
from dynamo.core.values import GenerateRequest, RequestGroup, SamplingParams, StopConditions
from dynamo.inference.sequence import ForkedContent, TokenContent

U32 = st.integers(0, 2**32 - 1)
IDS = st.lists(U32, max_size=60).map(pack_ids)
REQUESTS = st.builds(
    GenerateRequest,
    request_id=st.text(max_size=20),
    model=st.text(max_size=10),
    token_ids=IDS,
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        seed=st.integers(0, 2**63 - 1),
        logit_bias=st.dictionaries(U32, st.floats(-100, 100), max_size=5),
    ),
    stops=st.builds(
        StopConditions,
        max_tokens=st.integers(1, 1 << 31),
        stop_token_ids=st.lists(U32, max_size=5).map(tuple),
    ),
    resumed=st.integers(0, 9),
    top_logprobs=st.none() | st.integers(0, 20),
    salt=st.text(max_size=20),
    priority=st.integers(-9, 9),
)
CHOICES = st.tuples(
    st.text(max_size=20), st.integers(0, 127), st.none() | st.integers(0, 7), st.integers(-9, 9)
)


@given(request=REQUESTS, choices=st.lists(CHOICES, min_size=1, max_size=4))
def test_shared_and_whole_requests_are_equal(
    request: GenerateRequest, choices: list[tuple[str, int, int | None, int]]
) -> None:
    group = RequestGroup(request)
    shared = share_group(group)
    received = ReceivedPayload(shared.payload)
    prompts = []
    for request_id, number, rank, priority in choices:
        choice = replace(
            request,
            request_id=request_id,
            choice=number,
            rank=rank,
            priority=priority,
            group=group,
        )
        assert group.covers(choice)
        whole = encode_request(replace(choice, group=None))
        payload = encode_choice(choice)
        decoded = decode_shared_request(payload, received)
        assert replace(decoded, group=None) == decode_request(whole)
        prompts.append(decoded.token_ids)
    assert all(prompt is prompts[0] for prompt in prompts)
    assert share_group(group) is shared


@given(request=REQUESTS, other=REQUESTS)
def test_a_changed_request_leaves_its_group(
    request: GenerateRequest, other: GenerateRequest
) -> None:
    group = RequestGroup(request)
    for field in ("sampling", "stops", "salt", "model", "resumed", "top_logprobs"):
        value = getattr(other, field)
        changed = replace(request, **{field: value})
        assert group.covers(changed) == (value == getattr(request, field))
    assert not group.covers(replace(request, token_ids=request.token_ids + b"1234"))


@given(
    prompt=IDS,
    outputs=st.lists(st.lists(U32, max_size=20), min_size=1, max_size=3),
    cuts=st.lists(st.tuples(st.integers(-90, 90), st.integers(-90, 90)), max_size=6),
)
def test_sequences_that_share_a_prompt_have_their_own_contents(
    prompt: bytes, outputs: list[list[int]], cuts: list[tuple[int, int]]
) -> None:
    shared = TokenContent(prompt, 4, "salt")
    pairs = [(ForkedContent(shared), TokenContent(prompt, 4, "salt")) for _ in outputs]
    for (forked, plain), output in zip(pairs, outputs, strict=True):
        forked.ensure_hashes(len(shared.tokens) // 8)
        for token in output:
            forked.append_token(token)
            plain.append_token(token)
    for forked, plain in pairs:
        tokens = plain.tokens
        assert isinstance(tokens, array)
        assert len(forked.tokens) == len(tokens)
        assert forked.tokens.tobytes() == tokens.tobytes()
        assert list(forked.tokens) == list(tokens)
        for start, stop in cuts:
            assert forked.tokens[start:stop] == tokens[start:stop]
        if tokens:
            assert forked.tokens[-1] == tokens[-1]
        blocks = len(tokens) // 4
        forked.ensure_hashes(blocks)
        plain.ensure_hashes(blocks)
        assert forked.hashes[:blocks] == plain.hashes[:blocks]

"""The check of large bodies agrees with a count of the whole body, wherever slices end."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from dynamo.application import large_bodies
from dynamo.application.gateway import Gateway, ServedModel
from dynamo.application.large_bodies import LargeBodies, default_body_bytes, structure_limits
from dynamo.communication.http import Request
from dynamo.core.errors import InvalidRequest, TooLarge

LIMITS = {b",": (6, 0), b":": (5, 0), b"[": (4, 0), b"{": (3, 0)}
BODIES = st.lists(
    st.sampled_from([b",", b":", b"[", b"{", b"a", "é".encode(), "😀".encode(), b"\xff", b"\xc3"]),
    max_size=40,
).map(b"".join)


def verdict(body: bytes) -> str:
    """Return what the check of `body` raises."""
    request = Request("POST", b"/", {})
    request.body = body
    try:
        asyncio.run(LargeBodies(Gateway()).check(request))
    except TooLarge:
        return "too large"
    except InvalidRequest:
        return "not UTF-8"
    return ""


def is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(BODIES, st.integers(1, 9))
def test_counts_and_text_are_checked_across_slices(body: bytes, slice_bytes: int) -> None:
    with (
        patch.object(large_bodies, "STRUCTURE_LIMITS", LIMITS),
        patch.object(large_bodies, "SLICE_BYTES", slice_bytes),
    ):
        actual = verdict(body)
    too_many = any(body.count(byte) > limit for byte, (limit, _) in LIMITS.items())
    expected = {"too large"} if too_many else {""}
    if not is_utf8(body):
        expected = {"not UTF-8"} | (expected - {""})
    assert actual in expected


@given(st.integers(0, 1 << 24))
def test_ids_of_the_whole_context_pass(context: int) -> None:
    """Eight prompts of the whole context pass, unless they exceed the fixed bound."""
    limits = structure_limits(context)
    assert limits[b","] >= min(8 * context, large_bodies.MAX_COUNT)
    assert limits[b"["] >= 32_768
    assert default_body_bytes(context) >= min(7 * 8 * context, large_bodies.MAX_BODY_BYTES)


def test_the_gateway_knows_the_longest_context() -> None:
    gateway, changes = Gateway(), []
    gateway.on_change(lambda: changes.append(gateway.context_tokens))
    for name, context in (("a", 1000), ("b", 5000), ("c", 2000), ("b", 3000)):
        gateway.add(ServedModel((name,), None, 0, context))
    assert changes == [1000, 5000, 5000, 3000]

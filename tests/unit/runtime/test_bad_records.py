"""A record that nobody can read is skipped: it keeps nobody from seeing the others."""

from __future__ import annotations

import pytest

from dynamo.runtime.calls.instances import decode_instance

KEY = "/dynamo/workers/worker/generate/1"
GOOD = (
    b'{"component": "worker", "endpoint": "generate", "namespace": "dynamo", "lease_id": "1", '
    b'"transport": {"tcp": "tcp://127.0.0.1:1/a"}, "capabilities": {}}'
)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        GOOD.replace(b"tcp://127", b"tcp://\xff127"),
        GOOD.replace(b'"worker"', b'"\xc3("'),
        GOOD.replace(b'"tcp": "tcp://127.0.0.1:1/a"', b""),
        GOOD.replace(b'"tcp://127.0.0.1:1/a"', b"5"),
        GOOD[:-1],
        GOOD + GOOD,
    ],
)
def test_a_bad_record_is_none(value: bytes) -> None:
    assert decode_instance(KEY, GOOD) is not None
    assert decode_instance(KEY, value) is None

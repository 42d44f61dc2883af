"""Errors of other servers as ours, whatever the form of their bodies."""

from __future__ import annotations

import pytest

from dynamo.core.errors import (
    ContextLengthExceeded,
    DynamoError,
    Forbidden,
    InvalidRequest,
    UpstreamFailed,
)
from dynamo.inference.openai_server.server_errors import map_error


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (
            502,
            b"<html><head><title>502 Bad\n Gateway</title>",
            UpstreamFailed,
            "502: 502 Bad Gatew",
        ),
        (400, b'[{"error": {"code": 400, "message": "m"}}]', InvalidRequest, "^m$"),
        (400, b'{"object": "error", "message": "m", "code": null}', InvalidRequest, "^m$"),
        (422, b'{"detail": [{"loc": ["body"], "msg": "m"}]}', InvalidRequest, "m"),
        (422, b'{"error": "m", "error_type": "validation"}', InvalidRequest, "^m$"),
        (
            400,
            b'{"error": {"message": "m", "code": "context_length_exceeded"}}',
            ContextLengthExceeded,
            "^m$",
        ),
        (400, b'{"error":' + b"[" * 50_000, InvalidRequest, r"\[\["),
        (400, b"\xff\xfe", InvalidRequest, "\ufffd"),
        (403, b"null", Forbidden, "null"),
        (302, b"", UpstreamFailed, "a redirect, which is not followed"),
        (204, b"", UpstreamFailed, "answers 204"),
        (999, b"{}", UpstreamFailed, "answers 999"),
    ],
)
def test_bodies_of_errors_are_read_in_every_form(
    status: int, body: bytes, error: type[DynamoError], message: str
) -> None:
    mapped = map_error(status, body, {})
    assert type(mapped) is error
    with pytest.raises(error, match=message):
        raise mapped
    assert len(mapped.message) < 400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("9" * 400, 86_400.0),
        ("9" * 4000, None),
        ("999999999", 86_400.0),
        ("-5", None),
        ("²", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("", None),
    ],
)
def test_a_time_to_wait_is_bounded(text: str, seconds: float | None) -> None:
    assert map_error(503, b"{}", {"retry-after": text}).retry_after_s == seconds

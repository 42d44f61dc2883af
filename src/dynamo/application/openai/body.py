"""Decoding of JSON bodies, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from dynamo.communication.http import Request
from dynamo.core.errors import InvalidRequest

T = TypeVar("T")
_FIELD_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`\Z")
_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")


def decode_body(decoder: msgspec.json.Decoder[T], request: Request) -> T:
    """Return the body as the decoder's type. Raises `InvalidRequest`."""
    body = request.body
    if b"content-encoding" in request.headers:
        _check_content_encoding(request.header(b"content-encoding"))
    if not body:
        raise InvalidRequest("the body is empty", hint="send a JSON object")
    try:
        if not body.isascii():
            body.decode()  # the JSON decoder does not validate text in skipped fields
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field_error(str(error)) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def _check_content_encoding(coding: str | None) -> None:
    if coding and coding != "identity":
        raise InvalidRequest(f"content-encoding {coding!r} is not supported")


def invalid_field_error(message: str) -> InvalidRequest:
    """Return an error for a message of msgspec: the field first, then the expectation."""
    suffix = _FIELD_PATH.search(message)
    reason = message[: suffix.start()] if suffix else message
    path = suffix[1] if suffix else ""
    missing = _MISSING_FIELD.search(reason)
    if missing:
        field = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"{field}: required, but missing", param=field)
    reason = reason[:1].lower() + reason[1:].replace("`", "").replace(" | null", "")
    return InvalidRequest(f"{path or 'the body'}: {reason}", param=path or None)
